"""The pace of a job: how long its healthy step takes and which part of its training time was slower than that.

It sees durations only, keeps a fixed amount of memory however long the job runs, and knows nothing of ranks or causes.
"""

from dataclasses import dataclass
from math import log

WINDOW_STEPS = 20
SPIKE_FACTOR = 1.5
"""A step longer than this times the median of the steps around it is a spike; what is above that median is slow."""
SLOW_WINDOW_FACTOR = 1.2
"""A window whose median is longer than this times the healthy step is slow as a whole: not a spike but a slower job."""
_BUCKETS_PER_E_FOLD = 1000
"""Windows are grouped by their median in steps of 0.1 %, so the healthy step is known to 0.1 %."""


@dataclass(slots=True)
class _Bucket:
    """Windows with about the same median. `base_ns` is their time without the spikes' excess."""

    step_count: int = 0
    base_ns: int = 0
    medians_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSplit:
    """Training time in two parts that sum to it. `healthy_step_ns` is None before the first step."""

    productive_ns: int
    slow_ns: int
    healthy_step_ns: int | None


class Pace:
    """Takes the durations of first-time steps, in order, and splits their sum into productive and slow.

    Two rules: a spike is slow against its own window of 20 steps, and a whole window is slow against the healthy step,
    which is the median of the job's faster half (the lower quartile), so it holds when up to three quarters of a run
    are slow. A job whose steps differ by design (sequence lengths that double) counts as slow too: a ledger can't tell.
    """

    def __init__(self) -> None:
        self._window: list[int] = []
        self._buckets: dict[int, _Bucket] = {}
        self._spikes_ns = 0

    def add(self, durations_ns: list[int]) -> None:
        """Add finished steps, each longer than 0 ns."""
        window = self._window
        window += durations_ns
        while len(window) >= WINDOW_STEPS:
            self._spikes_ns += _close(window[:WINDOW_STEPS], self._buckets)
            del window[:WINDOW_STEPS]

    def end_window(self) -> None:
        """The next step belongs to another attempt, which may have another pace."""
        self._spikes_ns += _close(self._window, self._buckets)
        self._window.clear()

    def split(self) -> PaceSplit:
        """The split so far; changes nothing."""
        spikes_ns = self._spikes_ns
        last: dict[int, _Bucket] = {}
        spikes_ns += _close(list(self._window), last)
        buckets = sorted([*self._buckets.items(), *last.items()], key=lambda item: item[0])
        healthy_ns = _lower_quartile_ns([bucket for _, bucket in buckets])
        if healthy_ns is None:
            return PaceSplit(productive_ns=0, slow_ns=0, healthy_step_ns=None)
        productive_ns, slow_ns = 0, spikes_ns
        for _, bucket in buckets:
            healthy_part_ns = bucket.step_count * healthy_ns
            is_slow = bucket.medians_ns > SLOW_WINDOW_FACTOR * healthy_part_ns
            if is_slow and bucket.base_ns > healthy_part_ns:
                productive_ns += healthy_part_ns
                slow_ns += bucket.base_ns - healthy_part_ns
            else:
                productive_ns += bucket.base_ns
        return PaceSplit(productive_ns=productive_ns, slow_ns=slow_ns, healthy_step_ns=healthy_ns)


def _close(window: list[int], buckets: dict[int, _Bucket]) -> int:
    """Put a window into its bucket and return the excess of its spikes."""
    if not window:
        return 0
    window.sort()
    median_ns = window[(len(window) - 1) // 2]
    base_ns = sum(window)
    spikes_ns = 0
    limit_ns = SPIKE_FACTOR * median_ns
    for duration_ns in reversed(window):
        if duration_ns <= limit_ns:
            break
        spikes_ns += duration_ns - median_ns
    bucket = buckets.setdefault(int(log(median_ns) * _BUCKETS_PER_E_FOLD), _Bucket())
    bucket.step_count += len(window)
    bucket.base_ns += base_ns - spikes_ns
    bucket.medians_ns += len(window) * median_ns
    return spikes_ns


def _lower_quartile_ns(buckets: list[_Bucket]) -> int | None:
    """The median of the bucket in which a quarter of all steps is reached; None without steps."""
    quarter = sum(bucket.step_count for bucket in buckets) / 4
    reached = 0
    for bucket in buckets:
        reached += bucket.step_count
        if reached >= quarter:
            return bucket.medians_ns // bucket.step_count
    return None
