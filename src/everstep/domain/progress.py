"""What a progress page tells: marks, and the page's state at a moment."""

from dataclasses import dataclass

from everstep.domain.ids import Rank
from everstep.domain.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something a rank wrote: it ended step `step`, or entered `phase` (then `step` is where it stood)."""

    at_s: float
    rank: Rank
    step: int
    phase: Phase
    is_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """A progress page as it reads now.

    Attributes:
        changed_at_s: when the rank last wrote anything on it.
        loss: the newest that it logged; None when none.
        marks: what it wrote since the last view, oldest first; after an overflow only the newest.
    """

    rank: Rank
    phase: Phase
    step: int
    changed_at_s: float
    loss: float | None
    marks: tuple[Mark, ...]
