"""Healthy, with long silences that were not announced: a checkpoint by rank 0, an evaluation, and announced ones."""

import sys
import time

import torch
import torch.distributed as dist

import everstep.worker


def save_checkpoint(seconds: float) -> None:
    time.sleep(seconds)


def evaluate(model: torch.nn.Module, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until_s:
            model(torch.ones(64, 64))


def main() -> None:
    seconds = float(sys.argv[1])
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(70):
        model(torch.ones(4, 64)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if step == 30:
            if dist.get_rank() == 0:
                save_checkpoint(seconds)
            dist.barrier()
        if step == 40:
            evaluate(model, seconds)
            dist.barrier()
        if step == 50:
            with everstep.worker.phase("saving"):
                time.sleep(seconds)
            dist.barrier()
    print("healthy", flush=True)


if __name__ == "__main__":
    main()
