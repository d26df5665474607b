"""Trains a model with 50 MB of state with `attach`, until it is ended; says how large the state is."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.worker import attach

WIDTH = 2048


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = attach(model=model, optimizer=optimizer, save_every_steps=1000)
    for batch in run.steps([torch.randn(2, WIDTH)], until=100_000):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
