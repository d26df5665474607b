"""A small training with all that makes a resume hard: dropout, buffers, a scheduler, shuffling, three kinds of chance.

It is run by launcher.py in one process per rank and writes one line of digests per step.
"""

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from everstep.worker import EpochSampler, SeededDataset, attach
from everstep.worker.state import local


class Noisy(Dataset):
    """Numbers with augmentation from Python's, numpy's and torch's global generators."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        base = torch.full((12,), index / 48.0)
        return base + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand(12)


class Net(nn.Module):
    """Its parameters are used in another order than they are made: DDP's first buckets are not its later ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.first = nn.Linear(12, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        hidden = self.dropout(torch.relu(self.first(x)))
        return self.last(self.norm(torch.tanh(self.middle(hidden))))


class Average:
    """An averaged model, as an example for `extra`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = [local(p).detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for value, parameter in zip(self.values, self._model.parameters(), strict=True):
            value.lerp_(local(parameter), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


def build(spec: dict[str, Any], world: int) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = Net(spec.get("width", 24))
    if spec["kind"] == "ddp":
        return DistributedDataParallel(model, **spec.get("ddp", {}))
    if spec["kind"] in {"fsdp", "hsdp"}:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if spec["kind"] == "fsdp":
            mesh = init_device_mesh("cpu", (world,))
        else:
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def build_loader(spec: dict[str, Any], world: int) -> Any:
    data: Any = Noisy()
    options = {"batch_size": 4, "num_workers": spec.get("num_workers", 0), "drop_last": True}
    options["persistent_workers"] = spec.get("persistent", False)
    if spec.get("loader") in {"ordered", "seeded"}:
        data = SeededDataset(data) if spec["loader"] == "seeded" else data
        return DataLoader(data, sampler=EpochSampler(data, seed=3), **options)
    if spec.get("loader") == "list":
        return [torch.rand(4, 12) for _ in range(5)]
    if spec.get("loader") == "stateful":
        return Stateful()
    if spec.get("loader") == "generator":
        return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(5), **options)
    if world > 1:
        return DataLoader(data, sampler=DistributedSampler(data, shuffle=True), **options)
    return DataLoader(data, shuffle=True, **options)


def batches(spec: dict[str, Any], run: Any, loader: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The steps of one loop; or of two, with something done between them."""
    if "first_loop_until" in spec:
        yield from run.steps(loader, until=spec["first_loop_until"])
        torch.rand(3)
        for group in optimizer.param_groups if spec.get("halve") else ():
            group["lr"] *= 0.5
        loader = [torch.full((4, 12), number / 7) for number in range(7)]
    yield from run.steps(loader, until=spec["until"])


class Stateful:
    """Keeps its own position, like torchdata's StatefulDataLoader: five batches an epoch."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Any:
        while self._at < 5:
            self._at += 1
            yield torch.rand(4, 12) + self._at
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def sha(*values: Any) -> str:
    seal = hashlib.sha256()
    for value in values:
        seal.update(
            local(value).detach().clone().contiguous().numpy().tobytes()
            if torch.is_tensor(value)
            else repr(value).encode()
        )
    return seal.hexdigest()[:16]


def digests(model: nn.Module, optimizer: torch.optim.Optimizer, average: Average) -> dict[str, str]:
    states = [(sorted(state), *state.values()) for state in optimizer.state.values()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    kind, keys, *rest = np.random.get_state()
    with torch.no_grad():
        return {
            "parameters": sha(*model.parameters()),
            "buffers": sha(*model.buffers()),
            "optimizer": sha(*(value for state in states for value in state), groups),
            "extra": sha(*average.values),
            "chance": sha(random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state()),
        }


def main(spec: dict[str, Any]) -> None:
    """Train as `spec` says; `die_at` names the step in whose middle every rank is killed."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if spec["kind"] != "alone":
        dist.init_process_group("gloo")
    model = build(spec, world)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    average = Average(inner)
    loader = build_loader(spec, world)
    seed = spec.get("seed", 7) + rank
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    run = attach(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra={"average": average},
        directory=spec["directory"],
        **spec.get("attach", {}),
    )
    every = spec.get("accumulate", 1)
    with Path(f"{spec['out']}.{rank}").open("a") as out:
        for batch in batches(spec, run, loader, optimizer):
            for_show = run.rehearsing
            got = sha(batch)
            if not isinstance(loader, list) and "first_loop_until" not in spec:
                batch.mul_(0.9)  # a script may change its batch in place
            loss = model(batch).square().mean()
            loss.backward()
            if run.step % every == every - 1:
                if spec["kind"] == "manual":
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad(set_to_none=spec.get("set_to_none", True))
                scheduler.step()
                average.update()
            if run.step + 1 == spec.get("replace_at") and rank == world - 1:
                for state in optimizer.state.values():  # as no optimizer should
                    state["exp_avg"] = state["exp_avg"].clone()
            if spec.get("evaluate"):  # FSDP2 leaves whole parameters behind after a forward pass alone
                with torch.no_grad(), run.evaluating():
                    model(batch)
            run.log(loss=loss.item())
            step = run.step + 1
            time.sleep(spec.get("pause_s", 0))  # stands for a model that takes its time
            if step == spec.get("die_at") and not for_show:
                os.kill(os.getpid(), signal.SIGKILL)
            if not for_show:
                line = {"step": step, "data": got, "loss": repr(loss.item()), **digests(inner, optimizer, average)}
                out.write(json.dumps(line) + "\n")
                out.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
