"""Makes one host's progress out of its ranks' marks: steps that all have finished, phases of the group.

Knows no clock: every mark carries its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.ids import Rank
from everstep.domain.phases import Phase, phase_of_group
from everstep.domain.progress import Mark

_LATE_STARTER_STEPS = 20
"""A rank that has not stepped when the others have done this many does not step at all, such as a parameter server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """All ranks of the host that step have finished `step`; the slowest did so at `at_s`."""

    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPhase:
    """The host's ranks as a group are in `phase` since `at_s`."""

    phase: Phase
    at_s: float
    step: int


class HostProgress:
    """The fold for one attempt on one host.

    Args:
        ranks: the host's ranks.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._steps: dict[Rank, int] = {}
        self._marked: dict[Rank, int] = {}
        self._phases = dict.fromkeys(ranks, Phase.UNOBSERVED)
        self._phase = Phase.UNOBSERVED
        self._first: int | None = None
        self._done: int | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def step(self) -> int:
        """The newest step that all have finished in this attempt; 0 before the first."""
        return self._done or 0

    def take(self, marks: Sequence[Mark]) -> list[FinishedStep | GroupPhase]:
        """What the marks amount to, in order. `marks` may come from several ranks in any order."""
        told: list[FinishedStep | GroupPhase] = []
        for mark in sorted(marks, key=lambda mark: mark.at_s):
            self._phases[mark.rank] = mark.phase
            if mark.is_step:
                told += self._finish(mark)
            phase = phase_of_group(list(self._phases.values()))
            if phase is not self._phase:
                self._phase = phase
                told.append(GroupPhase(phase=phase, at_s=mark.at_s, step=self.step))
        return told

    def _finish(self, mark: Mark) -> list[FinishedStep | GroupPhase]:
        self._steps[mark.rank] = mark.step
        self._marked[mark.rank] = self._marked.get(mark.rank, 0) + 1
        self._first = mark.step if self._first is None else min(self._first, mark.step)
        if len(self._steps) < len(self._phases) and max(self._marked.values()) < _LATE_STARTER_STEPS:
            return []
        newest = min(self._steps.values())
        before = self._first - 1 if self._done is None else self._done
        if newest <= before:
            return []
        self._done = newest
        return [FinishedStep(step=step, at_s=mark.at_s) for step in range(before + 1, newest + 1)]
