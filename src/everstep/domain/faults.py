"""A fault that the injector shall cause, with what it stands for; the plan of an `--inject` flag or of the demo."""

from dataclasses import dataclass

from everstep.domain.causes import Cause, FaultKind
from everstep.domain.ids import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault, due once in the life of a run.

    Attributes:
        number: the fault's place in the plan, from 1.
        kind: what is done to the process.
        rank: the rank it is done to.
        step: due as soon as that rank has finished this step; None when `after_s` says when.
        after_s: due this many seconds after the run's start, at the next step; None when `step` says when.
        cause: what the fault stands for in the interruption table; None for a plain `--inject`.
    """

    number: int
    kind: FaultKind
    rank: Rank
    step: int | None = None
    after_s: float | None = None
    cause: Cause | None = None
