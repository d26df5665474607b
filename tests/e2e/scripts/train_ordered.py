"""Trains with DDP on augmented samples of one order; each rank writes what it got. Arguments: steps, and a folder."""

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from everstep.worker import EpochSampler, SeededDataset, attach


class Noisy(Dataset):
    """Index and chance."""

    def __len__(self) -> int:
        return 203

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))])


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    data = SeededDataset(Noisy())
    loader = DataLoader(data, batch_size=16 // world, sampler=EpochSampler(data), num_workers=1, drop_last=True)
    run = attach(model=model, optimizer=optimizer)
    out = os.open(folder / f"got.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for batch in run.steps(loader, until=steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        if not run.rehearsing:
            line = {"step": run.step, "world": world, "rank": rank, "got": batch.tolist()}
            os.write(out, (json.dumps(line) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
