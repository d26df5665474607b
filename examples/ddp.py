"""Data parallel training with DistributedDataParallel that goes on where it was, whatever kills it.

everstep run --nproc-per-node 4 examples/ddp.py --steps 2000 --out model.pt
everstep run --nproc-per-node 4 --inject kill:rank=1,step=300 examples/ddp.py --steps 2000 --out model.pt
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from everstep.worker import EpochSampler, attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, torch.sin(inputs).sum(dim=1, keepdim=True))
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = DataLoader(data, batch_size=32, sampler=EpochSampler(data), drop_last=True)
    torch.manual_seed(1 + dist.get_rank())  # another dropout on each rank

    run = attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for batch, target in run.steps(loader, until=args.steps):
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.log(loss=loss.item())

    if dist.get_rank() == 0:
        torch.save(net.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
