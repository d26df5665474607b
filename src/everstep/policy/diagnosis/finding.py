"""A finding while it is being weighed, and the words for operations; the verdict is made of findings."""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.ids import Rank
from everstep.domain.recorder import GroupTrace
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis.situation import Group, Situation, operation_at
from everstep.policy.wording import name_ranks

PRIORITY = {
    Trouble.GROUP_CREATION: 0,
    Trouble.MISMATCH: 1,
    Trouble.EXTRA_COLLECTIVE: 1,
    Trouble.DEAD: 2,
    Trouble.FROZEN: 3,
    Trouble.LOOP_BOUND: 4,
    Trouble.NEVER_ENTERED: 4,
    Trouble.GPU_SIDE: 5,
    Trouble.INSIDE_OP: 6,
    Trouble.ORDER_DEADLOCK: 7,
    Trouble.UNKNOWN: 9,
}
"""flight_recorder.md, section 4.3 step 6."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """Attributes:
    nodes: of the graph of waits; those who wait for them are its victims.
    ranks, suspects: as in `Explanation`.
    what: completes `Rank 3 on host h …`, or is a sentence of its own when no rank is named.
    decided: False for a circle of which nothing tells whose order is wrong.
    sure: it rests on what a rank's own record shows, not on the lack of one.
    """

    trouble: Trouble
    nodes: Sequence[int] = ()
    ranks: tuple[Rank, ...] = ()
    suspects: tuple[Rank, ...] = ()
    what: str = ""
    evidence: tuple[str, ...] = ()
    operation: str = ""
    group: Group | None = None
    stack: tuple[str, ...] = ()
    sure: bool = True
    decided: bool = True
    blocked: int = 0


def operation_text(situation: Situation, group: Group, seq: int, places: Sequence[int] = ()) -> str:
    """`all_reduce of [[17]] Float, number 12 of group 3 (TENSOR)`.

    Args:
        places: traces of which at least one should know the operation; all of the group's when empty.
    """
    wanted = set(places)
    parts: list[GroupTrace] = [part for place, part in group.seen if not wanted or place in wanted]
    for part in parts:
        if (op := operation_at(part, seq)) is not None:
            return f"{op.signature}, number {seq} of {group}"
    return f"operation number {seq} of {group}"


def last_line(situation: Situation, place: int) -> tuple[str, ...]:
    """The rank's Python stack, else where its newest collective was called from; empty when neither is known."""
    trace = situation.traces[place]
    if trace.stack:
        return trace.stack
    ops = [part.tail[-1] for part in trace.groups if part.tail]
    newest = max(ops, key=lambda op: op.order, default=None)
    return tuple(newest.stack.split(" < ")) if newest is not None and newest.stack else ()


def waiting_text(ranks: Sequence[Rank]) -> str:
    """`rank 3 waits`, or `ranks 0-2, 5 wait`."""
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
