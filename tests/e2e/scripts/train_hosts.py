"""Trains on several hosts with `attach`; arguments: ddp or fsdp2, steps, seconds of each, where the digest goes."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from weights_digest import write_digest

from everstep.worker import EpochSampler, attach, resuming


def wrapped(kind: str, net: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main() -> None:
    kind, steps, step_s, digest_file = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"resuming: {resuming()}", flush=True)
    else:
        resuming()
    torch.manual_seed(1)
    layers = torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
    model = wrapped(kind, torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    data = TensorDataset(torch.randn(200, 32))
    run = attach(model=model, optimizer=optimizer)
    for (batch,) in run.steps(DataLoader(data, batch_size=4, sampler=EpochSampler(data)), until=steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())
        time.sleep(step_s)
        if dist.get_rank() == 0:
            with digest_file.with_suffix(".steps").open("a") as done:
                done.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
    whole = torch.nn.Module()
    for number, tensor in enumerate(model.parameters()):
        content = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole.register_buffer(f"parameter {number}".replace(" ", "_"), content.detach())
    if dist.get_rank() == 0:
        write_digest(whole, digest_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
