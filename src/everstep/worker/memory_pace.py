"""What saves to memory cost beside a step, as measured, and the steps between two of them that follow from it."""

import math
import time

STALL_SHARE = 0.01
"""Saving to memory may take at most this share of the time of training."""
STRIDE_MAX = 100_000


class Pace:
    """Measures what a save to memory costs beside a step."""

    def __init__(self) -> None:
        self._stalls_s: list[float] = []
        self._since_s = 0.0
        self._since_step = -1
        self._stalled_s = 0.0

    def begin(self, step: int) -> None:
        """Measure from here, once."""
        if self._since_step < 0:
            self.restart(step)

    def restart(self, step: int) -> None:
        self._since_s, self._since_step, self._stalled_s = time.monotonic(), step, 0.0
        self._stalls_s = []

    def saved(self, step: int, stall_s: float) -> None:
        self.begin(step)
        self._stalls_s.append(stall_s)
        self._stalled_s += stall_s

    def stride(self, step: int, assumed_s: float | None) -> int | None:
        """Steps between two saves for the allowed share of time; None while too little is known."""
        steps = step - self._since_step
        if self._since_step < 0 or steps < 1 or (assumed_s is None and len(self._stalls_s) < 5):
            return None
        step_s = max((time.monotonic() - self._since_s - self._stalled_s) / steps, 1e-6)
        stalls = sorted(self._stalls_s[1:])  # the first one touches pages
        stall_s = stalls[len(stalls) // 2] if assumed_s is None else assumed_s
        return min(STRIDE_MAX, max(1, math.ceil(stall_s / (STALL_SHARE * step_s))))
