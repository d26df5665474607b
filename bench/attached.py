"""The training script of the restart benchmark: DDP with `attach` on a block model; tells its life like workload.py."""

from workload import mark  # isort: skip - the first event comes before every import that takes time

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint_ranks import WIDTH, Block
from everstep.worker import attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mark("pg_ready")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(Block() for _ in range(args.layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mark("built")
    run = attach(model=model, optimizer=optimizer)
    mark("restored", step=run.step)
    for batch in run.steps([torch.randn(16, WIDTH) for _ in range(8)], until=100_000):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not run.rehearsing:
            mark("step", step=run.step + 1)


if __name__ == "__main__":
    main()
