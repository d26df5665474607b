"""What a save to disk by the process beside the training costs the training: by how much steps beside it are longer.

It is told the time and what the saver said; it knows no file and no clock.
"""

from collections import deque
from statistics import median

_STEPS_KEPT = 64
_STEPS_MIN = 5
_SAVES_KEPT = 5
_SAVES_MIN = 2


class SaverCost:
    """Measures on one rank."""

    def __init__(self) -> None:
        self._quiet_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._saves_s: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._since_s: float | None = None
        self._was_busy = False
        self._saves = 0
        self._extra_s = 0.0

    def end_step(self, now_s: float, *, is_busy: bool, saves: int, took_s: float) -> None:
        """A step has ended.

        Args:
            is_busy: the saver is at work now.
            saves: how many it has ended so far; the last of them took `took_s`.
        """
        since_s, self._since_s = self._since_s, now_s
        ended = saves != self._saves
        if since_s is not None and not (is_busy or self._was_busy or ended):
            self._quiet_s.append(now_s - since_s)
        elif since_s is not None and len(self._quiet_s) >= _STEPS_MIN:
            self._extra_s += now_s - since_s - median(self._quiet_s)
        if ended:
            self._saves_s.append(min(max(0.0, self._extra_s), took_s))
            self._extra_s = 0.0
        self._was_busy, self._saves = is_busy, saves

    def pause_s(self) -> float | None:
        """What a save costs, in seconds of training; None while too few are known."""
        if len(self._saves_s) < _SAVES_MIN or len(self._quiet_s) < _STEPS_MIN:
            return None
        return median(self._saves_s)
