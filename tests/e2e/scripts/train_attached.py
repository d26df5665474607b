"""Trains with `attach` and writes a digest of the final weights; argument: steps, and where the digest goes."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from weights_digest import write_digest

from everstep.worker import attach


def main() -> None:
    steps, digest_file = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    torch.manual_seed(100 + dist.get_rank())
    loader = DataLoader(TensorDataset(torch.randn(100, 32)), batch_size=4, shuffle=True)
    run = attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for (batch,) in run.steps(loader, until=steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())
        time.sleep(0.03)
    if dist.get_rank() == 0:
        write_digest(model, digest_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
