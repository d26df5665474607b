"""Rank 1 raises after a few steps, always at the same place; the others lose a peer."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(100):
    if step == 3 and os.environ["RANK"] == "1":
        raise ValueError("the label 17 is out of range")
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
