"""Restores what other ranks saved, or trains two steps, then saves, and writes what this rank holds of each tensor."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.adapters.checkpoints.memory_slots import SavePages, SavePlan
from everstep.policy.staging import Course, Way
from everstep.worker.data import randomness
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.restoring.restore import Restoring
from everstep.worker.saving.by_ranks import Checkpoints
from everstep.worker.saving.memory_state import Bulk
from everstep.worker.saving.memory_tier import MemoryTier, draft_of
from everstep.worker.saving.schedule import SaveConfig
from everstep.worker.state import Sharing, TrainingState, local


def build(kind: str, world: int) -> nn.Module:
    """Seven rows are no multiple of anything, so shards are uneven and some are empty."""
    plain = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7), nn.BatchNorm1d(7))
    if kind == "alone":
        return plain
    if kind == "ddp":
        return DistributedDataParallel(plain)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if kind == "fsdp":
        return fully_shard(plain, mesh=init_device_mesh("cpu", (world,)))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":
        return fully_shard(plain, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(plain, mesh["inner"], plan)
    return fully_shard(plain, mesh=mesh["outer"]) if kind == "fsdp and tp" else plain


def main(spec: dict[str, Any]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(spec["seed"])
    if spec["kind"] != "alone":
        dist.init_process_group("gloo")
    model = build(spec["kind"], world)
    if rank >= spec.get("spoilt_from", world):
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).mul_(1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"])
    state = TrainingState(model=model, optimizer=optimizer, scheduler=None, extra={})
    ranks, observer, directory = Ranks(), Observer(None), Path(spec["directory"])
    directory.mkdir(exist_ok=True)
    memory = Path(spec["memory"]) if spec.get("memory") else None
    restored = Restoring(state, directory, memory, ranks, observer, 1).run()
    step = restored.manifest.step + 1 if restored else 1
    state.begin_body()
    if restored is None:
        for _ in range(2):
            model(torch.randn(5, 12)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    lives = Bulk(state, share=0, share_count=1).lives
    held = [(found.key, found.tensor.clone(), found.whole, found.offset) for found in lives]
    torch.save({"held": held, "lr": optimizer.param_groups[0]["lr"]}, f"{spec['out']}.{rank}")
    draft = draft_of(step, world, 1, (), state.sharing is Sharing.REPLICATED)
    own = {"random": randomness.capture_own(), "data": None}
    if memory is None:
        assert not Checkpoints(directory, ranks, observer, keep=2).save(state, own, draft).error
    else:
        tier = MemoryTier(memory, ranks, observer, SaveConfig())
        tier.open(state, directory, step)
        plan = SavePlan(from_step=step, course=Course(stride=1, way=Way.IN_LINE), world_size=world)
        if ranks.leads:
            SavePages(memory).write_plan(plan)
        ranks.broadcast(b"written")
        tier.save(step, own, draft)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
