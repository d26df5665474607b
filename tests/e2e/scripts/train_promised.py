"""Trains like train_attached.py, but builds nothing in vain when it resumes; arguments: steps, the digest's file."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from weights_digest import write_digest

from everstep.worker import attach, resuming


def main() -> None:
    steps, digest_file = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    fresh = not resuming()
    print("fresh" if fresh else "resuming", os.environ["RANK"], flush=True)
    with torch.device("cpu" if fresh else "meta"):
        layers = torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
        plain = torch.nn.Sequential(*layers)
    if not fresh:
        plain.to_empty(device="cpu")
        for tensor in (*plain.parameters(), *plain.buffers()):
            tensor.data.fill_(7)  # whatever the memory holds
    model = DistributedDataParallel(plain, init_sync=fresh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    loader = DataLoader(TensorDataset(torch.randn(100, 32)), batch_size=4, shuffle=True)
    run = attach(model=model, optimizer=optimizer)
    for (batch,) in run.steps(loader, until=steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())
        time.sleep(0.02)
    if dist.get_rank() == 0:
        write_digest(model, digest_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
