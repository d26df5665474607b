"""Many seeds of one scenario put together: means, how sure they are, and how far single runs lie apart.

Plain statistics over outcomes; it plays nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.causes import LLAMA3
from everstep.sim.outcome import Outcome
from everstep.sim.scenario import Scenario

_Z95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Attributes:
    half_width: of the 95 % interval of the mean (normal); 0 for a single run.
    low, high: the 5th and the 95th percentile of single runs.
    """

    mean: float
    half_width: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One scenario over all its seeds. `exact_share` is what the exact formula gives for the same inputs."""

    label: str
    scenario: Scenario
    seed_count: int
    effective_share: Estimate
    available_share: Estimate
    unexpected: Estimate
    planned: Estimate
    replaced: Estimate
    lost_per_interruption_s: Estimate
    ended_early_count: int
    exact_share: float
    outcomes: tuple[Outcome, ...]


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    ordered = sorted(values)
    return Estimate(
        mean=mean,
        half_width=_Z95 * math.sqrt(variance / count),
        low=ordered[round(0.05 * (count - 1))],
        high=ordered[round(0.95 * (count - 1))],
    )


def summarise(label: str, scenario: Scenario, outcomes: Sequence[Outcome], *, exact_share: float) -> Summary:
    def over(name: str) -> Estimate:
        return estimate([float(getattr(outcome, name)) for outcome in outcomes])

    return Summary(
        label=label,
        scenario=scenario,
        seed_count=len(outcomes),
        effective_share=over("effective_share"),
        available_share=over("available_share"),
        unexpected=over("unexpected_count"),
        planned=over("planned_count"),
        replaced=over("replaced_count"),
        lost_per_interruption_s=over("lost_per_interruption_s"),
        ended_early_count=sum(outcome.ended_early for outcome in outcomes),
        exact_share=exact_share,
        outcomes=tuple(outcomes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow:
    """A cause's mean count per run, beside Llama 3's; None where that table has no such row."""

    component: str
    mean_count: float
    share: float
    llama3_count: int | None


def cause_table(outcomes: Sequence[Outcome]) -> tuple[CauseRow, ...]:
    """Unexpected interruptions by component, most frequent first."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(dict(outcome.causes))
    known = {row.cause.component: row.count for row in LLAMA3}
    rows = [
        CauseRow(
            component=component,
            mean_count=count / len(outcomes),
            share=count / counts.total(),
            llama3_count=known.get(component),
        )
        for component, count in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.mean_count, row.component)))
