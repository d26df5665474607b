"""Three ranks that give DDP the buckets of another DDP; rank 0 writes what came of it, by case."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from everstep.worker.ddp_buckets import Buckets
from everstep.worker.ranks import Ranks
from everstep.worker.state import TrainingState

SMALL = {"bucket_cap_mb": 0.02}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several buckets": SMALL,
    "gradients in buckets": {**SMALL, "gradient_as_bucket_view": True},
    "static graph": {**SMALL, "static_graph": True},
    "a hook of the script": {**SMALL, "hook": default_hooks.allreduce_hook},
    "a hook that compresses": {**SMALL, "hook": default_hooks.fp16_compress_hook},
}


class Branched(nn.Module):
    """Two branches, made in another order than they are used, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 1)
        self.right = nn.Linear(40, 40)
        self.shared = nn.Linear(40, 40)
        self.left = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 40))
        self.first = nn.Linear(12, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.shared(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.left(hidden)) + self.shared(torch.tanh(self.right(hidden))))


def wrapped(model: nn.Module | None = None, *, hook: Any = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model or Branched(), **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp


def of(ddp: nn.Module, **extra: Any) -> Buckets:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = TrainingState(model=ddp, optimizer=optimizer, scheduler=None, extra=extra)
    return Buckets(state, extra.values())


def iterate(ddp: DistributedDataParallel, count: int = 1) -> list[str]:
    """The gradients of the last iteration, exactly."""
    chance = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(count):
        ddp.zero_grad()
        ddp(torch.randn(4, 12, generator=chance.manual_seed(5 + dist.get_rank()))).square().sum().backward()
    return [str(p.grad.double().sum().item()) + str(p.grad.flatten()[:50].tolist()) for p in ddp.parameters()]


def check_way(options: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    old = wrapped(**options)
    untold = of(old).record
    expected = iterate(old, 3 if old.static_graph else 2)
    record = of(old).record
    new, plain = wrapped(**options), wrapped(**options)
    buckets = of(new)
    settled = buckets.settle(record, ranks)
    first, unsettled = iterate(new), iterate(plain)
    return {
        "untold": untold,
        "settled": settled,
        "first is as later": first == expected,
        "later is as later": iterate(new, 3) == expected,
        "without it is not": unsettled != expected,
        "told": buckets.record == record == of(new).record,
    }


def refusals(ranks: Ranks) -> dict[str, bool]:
    old = wrapped(**SMALL)
    iterate(old, 3)
    record = of(old).record
    traits = record.partition(":")[0]
    longer = nn.Sequential(Branched(), nn.Linear(1, 1))
    grown, lacking = wrapped(**SMALL), wrapped(**SMALL)
    second = Branched()
    iterate(grown, 2)
    found = {
        "no record": of(wrapped(**SMALL)).settle("", ranks),
        "nonsense": of(wrapped(**SMALL)).settle("12345678", ranks),
        "another model": of(wrapped(longer, **SMALL)).settle(record, ranks),
        "other buckets": of(wrapped(bucket_cap_mb=1)).settle(record, ranks),
        "unused parameters": of(wrapped(**SMALL, find_unused_parameters=True)).settle(record, ranks),
        "one rank without": of(wrapped(**SMALL)).settle(record if ranks.rank else "", ranks),
        "one rank with another": of(wrapped(**SMALL)).settle(f"{traits}: 0" if ranks.rank else record, ranks),
        "more is trained": of(wrapped(**SMALL), second=second).settle(record, ranks),
        "rebuilt already": of(grown).settle(record, ranks),
        "a parameter is lacking": of(lacking).settle(f"{traits}: 1 2, 3", ranks),
    }
    iterate(lacking, 3)
    return {**found, "lost its own afterwards": of(lacking).record != record}


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks()
    told: dict[str, Any] = {way: check_way(options, ranks) for way, options in WAYS.items()}
    told["refusals"] = refusals(ranks)
    average = {"average": torch.optim.swa_utils.AveragedModel(Branched())}
    one, two = wrapped(), nn.ModuleList([wrapped(), wrapped()])
    iterate(one, 3)
    told["records"] = [bool(of(one, **average).record), bool(of(one, other=Branched()).record), bool(of(two).record)]
    if ranks.leads:
        Path(spec["out"]).write_text(json.dumps(told))
    dist.destroy_process_group()
