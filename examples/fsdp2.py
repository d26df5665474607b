"""Training with parameters and optimizer sharded by fully_shard (FSDP2) that goes on where it was, whatever kills it.

everstep run --nproc-per-node 2 examples/fsdp2.py --steps 2000 --out model.pt
everstep run --nproc-per-node 2 --inject kill:rank=1,step=300 examples/fsdp2.py --steps 2000 --out model.pt
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from everstep.worker import EpochSampler, attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, torch.sin(inputs).sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, sampler=EpochSampler(data), drop_last=True)

    run = attach(model=model, optimizer=optimizer)  # after fully_shard
    for batch, target in run.steps(loader, until=args.steps):
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
