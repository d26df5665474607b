"""How long the parts of a recovery take in the coarse world, each with where the figure comes from.

A simulated figure is as good as its delays, so none is without an origin. Knows no cluster and no policy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from random import Random

from everstep.domain.errors import ConfigError


class Origin(StrEnum):
    """How far a delay can be trusted."""

    MEASURED = "measured"
    """By `make bench`, on a small machine: good for parts that do not grow with the job."""
    PUBLISHED = "published"
    RULE = "rule"
    """Follows from a rule of everstep's own policy."""
    ASSUMED = "assumed"
    GIVEN = "given"
    """By the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """A delay in seconds with a log-normal spread.

    Attributes:
        mean_s: its mean.
        sigma: of the logarithm; 0 for a constant.
        source: where the figure comes from, in a few words.
    """

    mean_s: float
    sigma: float = 0.0
    origin: Origin = Origin.ASSUMED
    source: str = ""

    def draw_s(self, rng: Random) -> float:
        if self.sigma == 0 or self.mean_s == 0:
            return self.mean_s
        return self.mean_s * math.exp(rng.gauss(0.0, self.sigma) - self.sigma**2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """The parts of a recovery, in their order.

    Attributes:
        detect_death: from the fault to the news of an exit.
        detect_silence: from the fault to the suspicion, for ranks that freeze instead of ending.
        evidence: a snapshot of all hosts.
        teardown: from the order to stop to the last worker's end.
        requeue: until the next attempt has its hosts.
        spawn: processes and imports.
        group_init: rendezvous and communicators.
        restore: loading a checkpoint, beside what the storage takes (`Scenario.restore_tb`).
        first_step: what the first step takes longer than the others.
    """

    detect_death: Delay
    detect_silence: Delay
    evidence: Delay
    teardown: Delay
    requeue: Delay
    spawn: Delay
    group_init: Delay
    restore: Delay
    first_step: Delay

    def of(self) -> tuple[tuple[str, Delay], ...]:
        """Name and delay of every part."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    def replaced(self, name: str, mean_s: float) -> "Delays":
        """The same with one part's mean given by the user, as a constant."""
        given = Delay(mean_s=mean_s, origin=Origin.GIVEN, source="given by the user")
        return replace(self, **{name: given})


def delay_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Delays))


PUBLISHED = Delays(
    detect_death=Delay(mean_s=60, sigma=0.3, origin=Origin.PUBLISHED, source="60 s, FT-HSDP 2602.00277 (notes)"),
    detect_silence=Delay(
        mean_s=600, sigma=0.1, origin=Origin.PUBLISHED, source="10 min without traffic, ByteRobust 2509.16293 (notes)"
    ),
    evidence=Delay(mean_s=30, sigma=0.5, source="no time published"),
    teardown=Delay(mean_s=15, sigma=0.3, source="no time published"),
    requeue=Delay(mean_s=60, sigma=0.5, source="half of FT-HSDP's 120 s at 98,000 GPUs"),
    spawn=Delay(mean_s=30, sigma=0.2, source="no time published"),
    group_init=Delay(
        mean_s=30, sigma=0.2, origin=Origin.PUBLISHED, source="< 30 s above 10,000 GPUs, MegaScale 2402.15627 (notes)"
    ),
    restore=Delay(mean_s=10, sigma=0.2, source="no time published"),
    first_step=Delay(mean_s=30, sigma=0.2, source="no time published"),
)
"""For a job of about 16,384 GPUs as Llama 3's, whose paper gives no times ("we reduced job startup … time")."""

FT_HSDP = replace(
    PUBLISHED,
    requeue=Delay(mean_s=120, sigma=0.3, origin=Origin.PUBLISHED, source="scheduling 120 s, FT-HSDP (notes)"),
    group_init=Delay(mean_s=300, sigma=0.1, origin=Origin.PUBLISHED, source="NCCL init 300 s, FT-HSDP (notes)"),
    restore=Delay(mean_s=120, sigma=0.1, origin=Origin.PUBLISHED, source="checkpoint load 120 s, FT-HSDP (notes)"),
    first_step=Delay(mean_s=200, sigma=0.1, origin=Origin.PUBLISHED, source="first step 200 s, FT-HSDP (notes)"),
    evidence=Delay(mean_s=0, source="in the detection"),
    teardown=Delay(mean_s=0, source="in the scheduling"),
    spawn=Delay(mean_s=0, source="in the scheduling"),
)
"""Synchronous recovery at 98,000 GPUs: 800 s, the sum of FT-HSDP's parts (its abstract says 10 minutes)."""

_BENCH = "make bench, 4 ranks on 2 cores"
EVERSTEP = Delays(
    detect_death=Delay(mean_s=0.124, sigma=0.3, origin=Origin.MEASURED, source=_BENCH),
    detect_silence=Delay(
        mean_s=25, sigma=0.1, origin=Origin.RULE, source="4 × the slow end of 6.2 s steps (policy/stall.py)"
    ),
    evidence=Delay(mean_s=2, sigma=0.5, source="0.2 s on one host; at 2,048 hosts nobody has measured it"),
    teardown=Delay(mean_s=3, sigma=0.2, origin=Origin.RULE, source="the whole grace; 0.02 s in make bench"),
    requeue=Delay(mean_s=0, source="the spares are hot: their agents wait"),
    spawn=Delay(mean_s=0.442, sigma=0.5, origin=Origin.MEASURED, source=_BENCH),
    group_init=PUBLISHED.group_init,
    restore=PUBLISHED.restore,
    first_step=PUBLISHED.first_step,
)
"""What everstep measured where the part does not grow with the job; published or assumed where it does."""


def torchrun_delays(timeout_s: float) -> Delays:
    """A job without everstep: collective timeouts, the job requeued, cold starts.

    Args:
        timeout_s: of a collective: 600 s is NCCL's default in PyTorch, 1800 s gloo's and older ones.
    """
    return replace(
        PUBLISHED,
        detect_death=Delay(mean_s=0.143, sigma=0.3, origin=Origin.MEASURED, source=f"torchrun, {_BENCH}"),
        detect_silence=Delay(mean_s=timeout_s, origin=Origin.RULE, source=f"the collective timeout of {timeout_s:g} s"),
        evidence=Delay(mean_s=0, source="none is taken"),
        requeue=Delay(mean_s=120, sigma=0.5, source="the scheduler's 120 s of FT-HSDP (notes); --max-restarts is 0"),
        spawn=Delay(mean_s=35, sigma=0.2, source="as published, and 4.7 s of imports measured in make bench"),
        group_init=Delay(
            mean_s=265, sigma=0.1, origin=Origin.PUBLISHED, source="stock NCCL at 96,000 GPUs, 2510.20171"
        ),
    )


def _is_measured(parts: object) -> bool:
    return isinstance(parts, Mapping) and all(isinstance(part_s, int | float) for part_s in parts.values())


_BENCH_PARTS = {"detect_death": ("detect",), "spawn": ("spawn", "import"), "teardown": ("teardown",)}


def with_measured(delays: Delays, rows: object) -> Delays:
    """The delays with the parts that a `make bench` result has measured for everstep.

    Only parts that do not grow with the job are taken: detection of a death, teardown, spawn.

    Args:
        rows: the result's `rows.recovery_kill`.

    Raises:
        ConfigError: it holds no measured recovery of everstep's.
    """
    parts = [
        row["parts"]
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, Mapping) and row.get("launcher") == "everstep" and _is_measured(row.get("parts"))
    ]
    if not parts:
        raise ConfigError("--delays: this result of `make bench` has no recovery of everstep's; run `make bench` again")
    found = {}
    for name, summed in _BENCH_PARTS.items():
        times_s = sorted(sum(float(part.get(key, 0.0)) for key in summed) for part in parts)
        found[name] = Delay(
            mean_s=times_s[len(times_s) // 2], sigma=0.3, origin=Origin.MEASURED, source=f"{_BENCH}, n={len(times_s)}"
        )
    return replace(delays, **found)
