"""What breaks in the coarse world, when and where: drawn once per seed, before the cluster plays.

Poisson per cause, and what Poisson leaves out: lemon hosts, bursts, racks that fail together, faults that come back,
slow hosts, silent corruption, planned maintenance. Knows no policy: what a fault does to a job is the cluster's.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from everstep.domain.causes import LLAMA3, LLAMA3_UNEXPECTED_COUNT, Cause, FaultKind

DAY_S = 86_400.0
_HOUR_S = 3600.0
MAINTENANCE = Cause(component="Host Maintenance", category="Planned")
SILENT_CORRUPTION = "Silent Data Corruption"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        hosts: numbers of the hosts that it hits; the first one's rank is at fault.
        kind: how it shows itself.
        down_s: how long the hosts are away for repair; 0 when they stay.
        slow_factor: above 1 it breaks nothing: the host is slower by this, for `down_s`.
        rollback_s: checkpoints of this long before are not to be trusted (silent corruption).
        planned: ordered from outside; interrupts, and is no failure.
    """

    at_s: float
    hosts: tuple[int, ...]
    kind: FaultKind
    cause: Cause
    down_s: float = 0.0
    slow_factor: float = 1.0
    rollback_s: float = 0.0
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """How hosts fail.

    Attributes:
        per_1000_host_days: unexpected failures, all causes of Llama 3's table in its proportions.
        planned_per_day: planned interruptions of the whole job.
        down_share, down_hours: of GPU, Host and Network faults, how many take the host away, and for how long on
            average (log-normal).
        lemon_share, lemon_factor: so many hosts fail so much more often; the rest less, so that the rate stays.
        burst_share, burst_size, burst_minutes: so many faults begin a burst of this mean size on other hosts within
            this time, on top of the rate.
        rack_hosts, rack_share: hosts on one switch, and how many Network faults take the whole rack.
        repeat_share, repeat_days: so many faults come back on the same host, after this long on average; on top.
        slow_per_1000_host_days, slow_factor, slow_minutes: slow hosts (2–3 in a day at 16,384 GPUs are usual).
        corruption_hours: how far back silent corruption reaches when it is found.
    """

    per_1000_host_days: float
    planned_per_day: float = 0.0
    down_share: float = 0.5
    down_hours: float = 24.0
    lemon_share: float = 0.0
    lemon_factor: float = 1.0
    burst_share: float = 0.0
    burst_size: float = 3.0
    burst_minutes: float = 30.0
    rack_hosts: int = 2
    rack_share: float = 0.0
    repeat_share: float = 0.0
    repeat_days: float = 7.0
    slow_per_1000_host_days: float = 0.0
    slow_factor: float = 1.34
    slow_minutes: float = 72.0
    corruption_hours: float = 0.0


_HARDWARE = {"GPU", "Host", "Network"}
_HOURS_SIGMA = 1.0
_WEIGHTS = tuple(accumulate(row.count for row in LLAMA3))


def draw_faults(model: FailureModel, *, host_count: int, duration_s: float, rng: Random) -> tuple[Fault, ...]:
    """All faults of a run, by time. The rate holds for every host, spares included: an idle one interrupts nobody."""
    hosts = _HostDraw(model, host_count, rng)
    rate_per_s = model.per_1000_host_days / 1000 * host_count / DAY_S
    faults: list[Fault] = []
    for at_s in _poisson_times(rate_per_s, duration_s, rng):
        fault = _draw_fault(model, at_s, hosts.draw(), host_count, rng)
        faults.append(fault)
        faults += _burst(model, fault, hosts, host_count, rng)
    for fault in tuple(faults):
        faults += _repeats(model, fault, host_count, rng)
    slow_per_s = model.slow_per_1000_host_days / 1000 * host_count / DAY_S
    faults += [_slow(model, at_s, hosts.draw(), rng) for at_s in _poisson_times(slow_per_s, duration_s, rng)]
    faults += [
        Fault(at_s=at_s, hosts=(hosts.any(),), kind=FaultKind.MAINTENANCE, cause=MAINTENANCE, planned=True)
        for at_s in _poisson_times(model.planned_per_day / DAY_S, duration_s, rng)
    ]
    return in_order(fault for fault in faults if fault.at_s < duration_s)


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """By time, then by host, so that equal times have one order everywhere."""
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.hosts)))


class _HostDraw:
    """Draws hosts, lemons more often."""

    def __init__(self, model: FailureModel, host_count: int, rng: Random) -> None:
        self._count = host_count
        self._rng = rng
        lemons = set(rng.sample(range(host_count), round(model.lemon_share * host_count)))
        factor = model.lemon_factor if lemons else 1.0
        self._weights = list(accumulate(factor if host in lemons else 1.0 for host in range(host_count)))

    def draw(self) -> int:
        found = bisect_left(self._weights, self._rng.random() * self._weights[-1])
        return min(found, self._count - 1)

    def any(self) -> int:
        return self._rng.randrange(self._count)


def _poisson_times(rate_per_s: float, duration_s: float, rng: Random) -> list[float]:
    times: list[float] = []
    at_s = 0.0
    while rate_per_s > 0:
        at_s += rng.expovariate(rate_per_s)
        if at_s >= duration_s:
            break
        times.append(_rounded(at_s))
    return times


def _rounded(at_s: float) -> float:
    """To a millisecond, so that the last digit of a machine's logarithm does not show."""
    return round(at_s, 3)


def _hours_s(mean_h: float, rng: Random) -> float:
    drawn_h = mean_h * math.exp(rng.gauss(0.0, _HOURS_SIGMA) - _HOURS_SIGMA**2 / 2)
    return _rounded(drawn_h * _HOUR_S)


def _draw_fault(model: FailureModel, at_s: float, host: int, host_count: int, rng: Random) -> Fault:
    row = LLAMA3[bisect_left(_WEIGHTS, rng.random() * LLAMA3_UNEXPECTED_COUNT)]
    breaks = row.cause.category in _HARDWARE and rng.random() < model.down_share
    hosts: tuple[int, ...] = (host,)
    if row.cause.category == "Network" and rng.random() < model.rack_share:
        first = host - host % model.rack_hosts
        others = range(first, min(first + model.rack_hosts, host_count))
        hosts = (host, *(other for other in others if other != host))
    corrupted = row.cause.component == SILENT_CORRUPTION
    return Fault(
        at_s=at_s,
        hosts=hosts,
        kind=row.fault,
        cause=row.cause,
        down_s=_hours_s(model.down_hours, rng) if breaks else 0.0,
        rollback_s=_hours_s(model.corruption_hours, rng) if corrupted and model.corruption_hours else 0.0,
    )


def _burst(model: FailureModel, first: Fault, hosts: _HostDraw, host_count: int, rng: Random) -> list[Fault]:
    if rng.random() >= model.burst_share:
        return []
    more = max(1, round(rng.expovariate(1 / model.burst_size)))
    return [
        _draw_fault(
            model, _rounded(first.at_s + rng.random() * model.burst_minutes * 60), hosts.draw(), host_count, rng
        )
        for _ in range(more)
    ]


def _repeats(model: FailureModel, first: Fault, host_count: int, rng: Random) -> list[Fault]:
    found: list[Fault] = []
    last = first
    while rng.random() < model.repeat_share:
        back_s = last.down_s + rng.expovariate(1 / (model.repeat_days * DAY_S))
        last = _draw_fault(model, _rounded(last.at_s + back_s), first.hosts[0], host_count, rng)
        found.append(last)
    return found


def _slow(model: FailureModel, at_s: float, host: int, rng: Random) -> Fault:
    return Fault(
        at_s=at_s,
        hosts=(host,),
        kind=FaultKind.SLEEP,
        cause=Cause(component="Slow Host", category="Host"),
        down_s=_rounded(rng.expovariate(1 / (model.slow_minutes * 60))),
        slow_factor=model.slow_factor,
    )
