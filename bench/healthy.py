"""A healthy training script with all that a watchdog might take for a hang: slow steps, long saves, long evaluations.

It announces half of its long parts to everstep and keeps quiet about the other half.
"""

import argparse
import contextlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep.worker
from workload import make_model, mark, train_step


def save_checkpoint(model: nn.Module, path: Path, length_s: float) -> None:
    """Rank 0 writes to a slow disk; the others wait for it."""
    if dist.get_rank() == 0:
        ends_s = time.monotonic() + length_s
        with path.open("wb") as file:
            while time.monotonic() < ends_s:
                torch.save(model.state_dict(), file)
                file.seek(0)
                time.sleep(0.2)
    dist.barrier()


def evaluate(model: nn.Module, length_s: float) -> None:
    """Every rank computes on its own, without a collective."""
    ends_s = time.monotonic() + length_s
    with torch.no_grad():
        while time.monotonic() < ends_s:
            model(torch.randn(64, 256))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--steps-between", type=int, required=True)
    parser.add_argument("--slow-step-s", type=float, required=True)
    parser.add_argument("--save-s", type=float, required=True)
    parser.add_argument("--evaluate-s", type=float, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bare = make_model()
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0

    def train(count: int, step_s: float) -> None:
        nonlocal step
        for _ in range(count):
            began_s = time.monotonic()
            train_step(model, optimizer)
            time.sleep(max(0.0, began_s + step_s - time.monotonic()))
            step += 1
            mark("step", step=step)

    train(3, args.slow_step_s)
    for _ in range(args.cycles):
        for announced in (False, True):
            train(args.steps_between, 0.05)
            with everstep.worker.phase("saving") if announced else contextlib.nullcontext():
                save_checkpoint(bare, args.checkpoint, args.save_s)
            mark("saved", announced=announced)
            train(args.steps_between, 0.05)
            with everstep.worker.phase("evaluating") if announced else contextlib.nullcontext():
                evaluate(bare, args.evaluate_s)
            mark("evaluated", announced=announced)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
