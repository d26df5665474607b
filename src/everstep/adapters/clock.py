"""The machine's monotonic clock, told in seconds of the run."""

import time
from datetime import UTC, datetime


class MonotonicClock:
    """Counts from `start_at_s`, so that a resumed run continues where its ledger ended.

    All processes of a host share CLOCK_MONOTONIC, so a worker can tell the run's time from `zero_ns` alone.
    """

    def __init__(self, *, start_at_s: float = 0.0) -> None:
        self.zero_ns = time.monotonic_ns() - int(start_at_s * 1e9)

    @classmethod
    def of_zero(cls, zero_ns: int) -> "MonotonicClock":
        """A clock whose second 0 was at this time of CLOCK_MONOTONIC, as another host's clock tells it."""
        clock = cls()
        clock.zero_ns = zero_ns
        return clock

    def now_s(self) -> float:
        return self.to_run_s(time.monotonic_ns())

    def to_run_s(self, monotonic_ns: int) -> float:
        return (monotonic_ns - self.zero_ns) / 1e9

    def wall(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
