"""The figures of the benchmark: bars with their targets, spreads and the table of all. Measures nothing."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One measured value against its target.

    Attributes:
        value: None when nothing could be measured; the bar is missed then.
        limit: the target; the value may be at most this, or at least this with `at_least`.
        spread: the sample behind the value.
    """

    name: str
    value: float | None
    unit: str
    limit: float
    at_least: bool = False
    spread: str = ""

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        """`met`, or by how much it was missed."""
        if self.is_met:
            return "met"
        if self.value is None:
            return "MISSED: nothing measured"
        return f"MISSED by {abs(self.value - self.limit):.3g} {self.unit}".rstrip()

    @property
    def target(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one measurement gives.

    Attributes:
        rows: every repetition, failed ones too.
        notes: sentences to print below the table.
    """

    bars: tuple[Bar, ...]
    rows: Sequence[dict[str, object]] = ()
    notes: tuple[str, ...] = field(default=())


def spread(values: Sequence[float], *, failed: int = 0) -> str:
    """`median [min–max] n=…`, with the failures that have no value."""
    lost = f", {failed} failed" if failed else ""
    if not values:
        return f"n=0{lost}"
    return f"median {statistics.median(values):.3g} [{min(values):.3g}–{max(values):.3g}] n={len(values)}{lost}"


def median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def left_behind_notes(name: str, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """A sentence when processes outlived their launcher, else none."""
    count = sum(int(str(row.get("left_behind", 0))) for row in rows)
    return [f"{name}: {count} processes outlived their launcher and were killed by the benchmark"] if count else []


def bar_json(bar: Bar) -> dict[str, object]:
    return {**asdict(bar), "is_met": bar.is_met, "verdict": bar.verdict}


def table(bars: Sequence[Bar]) -> str:
    """Name, value, target, verdict and sample of each bar, in columns."""
    lines = [("bar", "value", "target", "", "sample")]
    for bar in bars:
        value = "–" if bar.value is None else f"{bar.value:.4g} {bar.unit}".rstrip()
        lines.append((bar.name, value, bar.target, bar.verdict, bar.spread))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(line[:4], widths, strict=True)), line[4]]).rstrip()
        for line in lines
    )
