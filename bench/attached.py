"""The training script of the restart benchmark: DDP on a block model; tells its life and its losses like workload.py.

With `attach` under `everstep run`, as usual or building nothing in vain (`--promised`); without (`--save-at`), as the
run that nothing touches, which leaves a checkpoint of PyTorch's own; and `--load`, the usual cold start from that
checkpoint, up to its first step.
"""

from workload import mark  # isort: skip - the first event comes before every import that takes time

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint_ranks import WIDTH, Block

if "--save-at" in sys.argv:  # each way pays for its own imports
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
else:
    from everstep.worker import attach, resuming


def tell(event: str, **fields: object) -> None:
    mark(event, cpu_s=time.process_time(), **fields)


tell("script_imported")


def batches() -> list[torch.Tensor]:
    return list(torch.randn(8, 16, WIDTH, generator=torch.Generator().manual_seed(1)))


class Training:
    """Model, optimizer and one step."""

    def __init__(self, layers: int, *, fresh: bool = True) -> None:
        torch.manual_seed(0)
        with torch.device("cpu" if fresh else "meta"):
            plain = nn.Sequential(*(Block() for _ in range(layers)))
        if not fresh:
            plain.to_empty(device="cpu")
        self.model = DistributedDataParallel(plain, init_sync=fresh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch: torch.Tensor) -> float:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def attached(training: Training) -> None:
    run = attach(model=training.model, optimizer=training.optimizer)
    tell("restored", step=run.step)
    for batch in run.steps(batches(), until=100_000):
        loss = training.step(batch)
        if not run.rehearsing:
            tell("step", step=run.step + 1, loss=loss.hex())


def untouched(training: Training, folder: Path, *, save_at: int, until: int) -> None:
    for number, batch in enumerate(_again_and_again(batches()), 1):
        tell("step", step=number, loss=training.step(batch).hex())
        if number == save_at:
            model, optimizer = get_state_dict(training.model, training.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if number == until:
            return


def cold(training: Training, folder: Path, *, save_at: int) -> None:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    tell("restored", step=save_at)
    data = batches()
    tell("step", step=save_at + 1, loss=training.step(data[save_at % len(data)]).hex())


def _again_and_again(data: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--until", type=int, default=0)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--promised", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tell("pg_ready")
    training = Training(args.layers, fresh=not (args.promised and resuming()))
    tell("built")
    if args.load:
        cold(training, args.folder, save_at=args.save_at)
    elif args.save_at:
        untouched(training, args.folder, save_at=args.save_at, until=args.until)
    else:
        attached(training)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
