"""Trains with `attach`; each rank writes a line for each step it has done. Arguments: steps, and the folder."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.worker import attach


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(model=model, optimizer=optimizer)
    out = os.open(folder / f"steps.{dist.get_rank()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for batch in run.steps([torch.ones(4, 32)], until=steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        if not run.rehearsing:
            os.write(out, f"{run.step + 1}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
