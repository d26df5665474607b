"""The script of `everstep demo`: trains the GPT with DDP and writes down what came out. It knows nothing of faults.

Alone: `everstep run --nproc-per-node 4 -m everstep.worker.demo.train --steps 200 --weights-out out.json`.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from everstep.worker import attach
from everstep.worker.demo.gpt import GPT, GPTConfig
from everstep.worker.demo.text import VOCABULARY_SIZE, Windows, read_corpus, to_tokens

BATCH_SIZE = 4
LEARNING_RATE = 2e-3
GRADIENT_NORM_MAX = 1.0
SAVE_EVERY_S = 2.0
"""Far more often than a real job needs: the demo presses 54 days of faults into minutes."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights-out", type=Path, required=True, help="JSON file for digests and the final loss")
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())  # every rank has dropout of its own; DDP shares rank 0's weights
    config = GPTConfig(vocabulary_size=VOCABULARY_SIZE)
    model = DistributedDataParallel(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=args.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    data = Windows(to_tokens(read_corpus()), context=config.context)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        data, shuffle=True, seed=args.seed, drop_last=True
    )
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)

    run = attach(model=model, optimizer=optimizer, scheduler=scheduler, save_every_s=SAVE_EVERY_S)
    for tokens, targets in run.steps(loader, until=args.steps):
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss.item())

    if dist.get_rank() == 0:
        write_result(args.weights_out, model.module, optimizer, loss=run.metrics.get("loss"))
    dist.destroy_process_group()


def write_result(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, loss: float | None) -> None:
    """Write digests of all weights and of the optimizer, and the last loss; the file is there whole or not at all."""
    states = optimizer.state_dict()["state"]
    result = {
        "weights_sha256": sha256_of([*model.parameters(), *model.buffers()]),
        "optimizer_sha256": sha256_of([states[number][name] for number in sorted(states) for name in states[number]]),
        "loss": loss,
    }
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(result, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def sha256_of(tensors: list[Tensor]) -> str:
    """The SHA-256 of the tensors' bytes, in order."""
    seal = hashlib.sha256()
    for tensor in tensors:
        seal.update(tensor.detach().contiguous().numpy().tobytes())
    return seal.hexdigest()


if __name__ == "__main__":
    main()
