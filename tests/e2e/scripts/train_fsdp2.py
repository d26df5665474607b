"""A plain torchrun script with FSDP2 over gloo."""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(int(sys.argv[1])):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    if dist.get_rank() == 0:
        print("fsdp2 finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
