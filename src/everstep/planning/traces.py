"""What a record of host faults says about failures, repairs and spares; it knows no file and no format.

A record is a list of faults, each on one host with its start and end. The spread of hosts down at once is measured over
time, as hosts (a host with two open faults counts once).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.domain.errors import ConfigError
from everstep.planning.failures import CONFIDENCE, DAY_S, FailureRate, fit_rate

TOP_SHARE = 0.05
"""The hosts with the most faults that a summary tells of: by hindsight, so chance alone puts some of them there."""


COUNTED_S = 14 * DAY_S
"""Faults are counted by fortnights, which most bursts fit in. The rate may drift more slowly: in StepFun's record the
ratio is 5.2 by weeks, 8.5 by fortnights and 15.9 by four weeks, so even the widened range is no forecast of a month."""
PERIODS_MIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFault:
    """One fault of one host. `began_s` and `ended_s` count from the start of the record.

    Attributes:
        level: the record's own word for its kind, such as `Hardware Failure`.
        detail: the record's own description.
    """

    host: str
    began_s: float
    ended_s: float
    level: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What planning takes from a record.

    Attributes:
        rate: of all faults; its interval is widened by `count_variance_ratio`.
        count_variance_ratio: variance ÷ mean of the faults in periods of `COUNTED_S`, at least 1; 1 for Poisson.
        repair_s: mean time from a fault to its end.
        down_mean: hosts down at once, over time.
        down_variance_ratio: their variance ÷ their mean; 1 for Poisson.
        down_p99: so many or fewer hosts were down in 99 % of the time.
        top_host_share: `TOP_SHARE` of the hosts, those with the most faults …
        top_failure_share: … had this share of all faults.
    """

    host_count: int
    fault_count: int
    duration_s: float
    rate: FailureRate
    count_variance_ratio: float
    repair_s: float
    down_mean: float
    down_variance_ratio: float
    down_p99: int
    top_host_share: float
    top_failure_share: float


def summarize(
    faults: Sequence[HostFault], *, host_count: int, duration_s: float, source: str, confidence: float = CONFIDENCE
) -> TraceSummary:
    """Count, average and spread of a record.

    Args:
        host_count: all hosts that were watched, also those without a fault.
        duration_s: how long they were watched.

    Raises:
        ConfigError: no fault, no time, or fewer hosts than had faults.
    """
    if not faults:
        raise ConfigError(f"{source}: it holds no fault, so there is nothing to fit")
    if duration_s <= 0:
        raise ConfigError(f"{source}: all faults are at one moment, so there is no time to fit a rate over")
    by_host = Counter(fault.host for fault in faults)
    if host_count < len(by_host):
        raise ConfigError(
            f"{source}: {len(by_host)} hosts had faults, and {host_count} were watched: give the number of all hosts"
        )
    top_count = max(1, round(host_count * TOP_SHARE))
    time_s = down_time_s(faults, duration_s=duration_s)
    total_s = sum(time_s.values())
    mean = sum(count * spent for count, spent in time_s.items()) / total_s
    variance = sum((count - mean) ** 2 * spent for count, spent in time_s.items()) / total_s
    count_ratio = count_variance_ratio(faults, duration_s=duration_s)
    return TraceSummary(
        host_count=host_count,
        fault_count=len(faults),
        duration_s=duration_s,
        rate=fit_rate(
            failure_count=len(faults),
            host_days=host_count * duration_s / DAY_S,
            source=source,
            confidence=confidence,
            variance_ratio=count_ratio,
        ),
        count_variance_ratio=count_ratio,
        repair_s=sum(fault.ended_s - fault.began_s for fault in faults) / len(faults),
        down_mean=mean,
        down_variance_ratio=variance / mean if mean else 1.0,
        down_p99=down_quantile(time_s, 0.99),
        top_host_share=top_count / host_count,
        top_failure_share=sum(count for _, count in by_host.most_common(top_count)) / len(faults),
    )


def count_variance_ratio(faults: Sequence[HostFault], *, duration_s: float) -> float:
    """Variance ÷ mean of the faults in whole periods of `COUNTED_S`; 1 when there are fewer than `PERIODS_MIN`."""
    periods = int(duration_s // COUNTED_S)
    if periods < PERIODS_MIN:
        return 1.0
    counts = Counter(int(fault.began_s // COUNTED_S) for fault in faults)
    seen = [counts[period] for period in range(periods)]
    mean = sum(seen) / periods
    return max(1.0, sum((count - mean) ** 2 for count in seen) / (periods - 1) / mean) if mean else 1.0


def down_time_s(faults: Iterable[HostFault], *, duration_s: float) -> dict[int, float]:
    """For each number of hosts down at once, how long it lasted."""
    ends: list[tuple[float, int]] = []
    for spans in _spans_by_host(faults).values():
        for began_s, ended_s in spans:
            ends += [(began_s, 1), (ended_s, -1)]
    spent: defaultdict[int, float] = defaultdict(float)
    at_s, down = 0.0, 0
    for moment_s, change in sorted(ends):
        spent[down] += moment_s - at_s
        at_s, down = moment_s, down + change
    spent[down] += max(0.0, duration_s - at_s)
    return dict(spent)


def down_quantile(time_s: dict[int, float], probability: float) -> int:
    """The smallest number that was not exceeded for `probability` of the time."""
    total_s, passed_s = sum(time_s.values()), 0.0
    for count in sorted(time_s):
        passed_s += time_s[count]
        if passed_s >= probability * total_s * (1.0 - 1e-12):
            return count
    return max(time_s, default=0)


def _spans_by_host(faults: Iterable[HostFault]) -> dict[str, list[tuple[float, float]]]:
    """Each host's time down, overlaps merged."""
    by_host: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: (fault.began_s, fault.ended_s)):
        spans = by_host[fault.host]
        if spans and fault.began_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], fault.ended_s))
        elif math.isfinite(fault.ended_s):
            spans.append((fault.began_s, fault.ended_s))
    return by_host
