"""Which way saves to memory are copied, and how many steps apart, from what both ways cost in this run.

In line, training stands still for the copy. Overlapped, a thread copies while the next step runs, up to where the
optimizer may write: that hides the copy where a core is spare, and may cost more in all where none is. So both ways
take turns now and then, and the cheaper one is used between. It is told the time, and knows no thread and no memory.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

COST_SHARE = 0.01
"""Saving to memory may take at most this share of the time of training."""
STRIDE_MAX = 100_000
_TRIED_MIN = 5
"""Saves of each way before they are compared."""
_SETTLED_MAX = 256
"""Saves in the chosen way before both are tried again."""
_CLEARLY = 0.9
"""Another way must cost less than this share of the present one."""
_KEPT = 16
_SILENT_SAVES_MAX = 8
_BASE_KEPT = 64


class Way(IntEnum):
    """How saves are copied."""

    TRIAL = 0
    """Both in turn."""
    IN_LINE = 1
    OVERLAPPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What all ranks do from some step on: save every `stride` steps (0: not at all) in one way."""

    stride: int
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """One save and the step after it, in seconds.

    Attributes:
        stall_s: training stood still at the end of the step.
        waited_s: the optimizer waited for the copy.
        busy_s: the copying thread worked, seal and all.
        step_s: the step after the save.
    """

    stall_s: float
    waited_s: float = 0.0
    busy_s: float = 0.0
    step_s: float = 0.0


def way_of(course: Way, turn: int) -> Way:
    """The way of the save number `turn`, the same on every rank."""
    if course is not Way.TRIAL:
        return course
    return Way.OVERLAPPED if turn % 2 else Way.IN_LINE


def cost_s(saves: Iterable[SaveTimes], step_s: float) -> float:
    """What a save costs training: its stall, and by how much the step after it is longer than `step_s`.

    Steps vary by more than a save costs, so the extra is kept between what is known for certain: at least the wait
    before the optimizer, at most that and all the time that the thread was at work.
    """
    kept = list(saves)
    extra_s = median(save.step_s for save in kept) - step_s
    waited_s = median(save.waited_s for save in kept)
    most_s = max(waited_s, median(save.busy_s for save in kept))
    return median(save.stall_s for save in kept) + min(max(extra_s, waited_s), most_s)


class CommitWatch:
    """Whether saves to memory still become complete on all ranks, as one rank sees it."""

    def __init__(self) -> None:
        self._newest = self._saves_since = 0
        self._since_s = math.inf

    def note(self, newest: int, now_s: float) -> None:
        """A save; `newest` is the step that is complete on all ranks."""
        has_moved = newest > self._newest
        self._newest, self._saves_since = max(newest, self._newest), 0 if has_moved else self._saves_since + 1
        self._since_s = now_s if has_moved else min(self._since_s, now_s)

    def are_missing(self, now_s: float, *, patience_s: float) -> bool:
        """No commit for some saves, and for longer than news of one may take."""
        return self._saves_since >= _SILENT_SAVES_MAX and now_s - self._since_s >= patience_s


class Pace:
    """Measures steps and saves on one rank, and says what rank 0 is to announce."""

    def __init__(self) -> None:
        self._saves: dict[Way, deque[SaveTimes]] = {way: deque(maxlen=_KEPT) for way in (Way.IN_LINE, Way.OVERLAPPED)}
        self._steps_s: deque[float] = deque(maxlen=_BASE_KEPT)  # without a copy beside them
        self._since_s: float | None = None
        self._open: tuple[Way, SaveTimes] | None = None
        self._count = 0
        self._first = {Way.IN_LINE, Way.OVERLAPPED}

    def end_step(self, now_s: float) -> None:
        """A step has ended, and no save of it has begun."""
        if self._since_s is not None:
            self._take(now_s - self._since_s)
        self._since_s = now_s

    def _take(self, step_s: float) -> None:
        way, save = self._open or (None, None)
        self._open = None
        if way is not Way.OVERLAPPED:
            self._steps_s.append(step_s)
        if way is None or save is None:
            return
        if way in self._first:  # it pays for pages, threads and caches
            self._first.discard(way)
            return
        whole = SaveTimes(stall_s=save.stall_s, waited_s=save.waited_s, busy_s=save.busy_s, step_s=step_s)
        self._saves[way].append(whole)

    def saved(self, way: Way, *, stall_s: float, now_s: float) -> None:
        """Training goes on after a save."""
        self._open = way, SaveTimes(stall_s=stall_s)
        self._since_s = now_s
        self._count += 1

    def copied(self, *, waited_s: float, busy_s: float) -> None:
        """What became of the overlapped save while the step after it ran. May be told in parts."""
        if self._open is not None:
            way, save = self._open
            waited_s, busy_s = save.waited_s + waited_s, save.busy_s + busy_s
            self._open = way, SaveTimes(stall_s=save.stall_s, waited_s=waited_s, busy_s=busy_s)

    @property
    def step_s(self) -> float | None:
        """A usual step without a save; None before the first."""
        return max(median(self._steps_s), 1e-6) if self._steps_s else None

    def stride_for(self, save_s: float) -> int:
        """Steps between two saves that cost so much each; 1 while no step is known."""
        if self.step_s is None:
            return 1
        return min(STRIDE_MAX, max(1, math.ceil(save_s / (COST_SHARE * self.step_s))))

    def decide(self, now: Course) -> Course:
        """What to do from now on; `now` itself while too little is known or little would change."""
        if self.step_s is None:
            return now
        way = self._choose(now.way)
        if way is None:
            return now
        cheapest_s = min(cost_s(self._saves[w], self.step_s) for w in self._saves if w is way or way is Way.TRIAL)
        stride = self.stride_for(cheapest_s)
        if now.stride * 0.7 <= stride <= now.stride * 1.3:
            stride = now.stride
        return Course(stride=stride, way=way)

    def announced(self) -> None:
        """Something else begins: what is measured from now on is counted anew."""
        self._count = 0

    def _choose(self, now: Way) -> Way | None:
        assert self.step_s is not None
        in_line, overlapped = self._saves[Way.IN_LINE], self._saves[Way.OVERLAPPED]
        if now is not Way.TRIAL:
            if self._count < _TRIED_MIN or not self._saves[now]:
                return None
            return Way.TRIAL if self._count >= _SETTLED_MAX and in_line and overlapped else now
        if self._count < 2 * _TRIED_MIN or not in_line:
            return None
        if len(overlapped) < _TRIED_MIN - 1:
            return Way.IN_LINE if self._count >= 4 * _TRIED_MIN else None  # this rank may not overlap
        overlapped_s, in_line_s = cost_s(overlapped, self.step_s), cost_s(in_line, self.step_s)
        return Way.IN_LINE if in_line_s < _CLEARLY * overlapped_s else Way.OVERLAPPED
