"""All ranks' traces side by side: groups with who has come how far, and what each rank waits in.

The frontier of a group is the oldest collective that somebody waits in (flight_recorder.md, section 4.3 step 2).
Clocks are never compared between ranks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from everstep.domain.ids import Rank
from everstep.domain.recorder import (
    ChannelTrace,
    GroupTrace,
    HostState,
    Membership,
    Operation,
    OpState,
    RankTrace,
)

ONE_WAY = frozenset(("broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter"))
"""A member of these can end before the others have come."""
_LAG_MIN = 2
_LAGGING_SHARE_MAX = 0.25


@dataclass(slots=True)
class Group:
    """One process group over all ranks.

    Attributes:
        ranks: its members, in its order; empty when nobody says.
        seen: index of each trace that has it, with the trace's part.
        frontier: the oldest collective that somebody waits in; -1 when nobody does.
        messages: it carries point-to-point operations.
    """

    name: str
    description: str
    members: str
    ranks: tuple[Rank, ...] = ()
    seen: list[tuple[int, GroupTrace]] = field(default_factory=list)
    frontier: int = -1
    messages: bool = False

    def __str__(self) -> str:
        return f"group {self.name} ({self.description})" if self.description else f"group {self.name}"

    def entered(self, part: GroupTrace, seq: int) -> bool:
        """Whether a member has enqueued `seq`."""
        if not part.counted and self.messages:
            return False
        return part.enqueued >= seq


@dataclass(slots=True)
class Situation:
    """Attributes:
    traces: by rank.
    index: of each rank's trace.
    silent: expected ranks without a trace, ascending.
    groups: by name and member list.
    stopped: traces that run nothing any more, each with why.
    lagging: those of them whose GPU's work is never seen to end, each with the fact that shows it.
    groups_of_silent: for each silent rank the groups that have it and at least one trace.
    blocked: for each trace the collectives and the channels that it waits in, oldest only.
    """

    traces: Sequence[RankTrace]
    index: dict[Rank, int]
    silent: tuple[Rank, ...]
    groups: dict[tuple[str, str], Group]
    stopped: dict[int, str] = field(default_factory=dict)
    lagging: dict[int, str] = field(default_factory=dict)
    groups_of_silent: dict[Rank, list[Group]] = field(default_factory=dict)
    blocked: list[tuple[tuple[Group, int] | None, tuple[ChannelTrace, ...]]] = field(default_factory=list)

    def ranks_of(self, indexes: Iterable[int]) -> tuple[Rank, ...]:
        return tuple(sorted(self.traces[one].rank for one in indexes))


def operation_at(part: GroupTrace, seq: int) -> Operation | None:
    """The operation with this number, when the tail still has it."""
    tail = part.tail
    if not tail:
        return None
    place = seq - tail[0].seq
    return tail[place] if 0 <= place < len(tail) else None


def survey(
    traces: Sequence[RankTrace], memberships: Sequence[Membership], expected_ranks: Collection[Rank]
) -> Situation:
    """Lay out the situation."""
    ordered = sorted(traces, key=lambda trace: trace.rank)
    index = {trace.rank: place for place, trace in enumerate(ordered)}
    lists = {one.identity: one.ranks for one in memberships}
    expected = set(expected_ranks)
    for ranks in lists.values():
        expected.update(ranks)
    silent = tuple(sorted(expected.difference(index)))
    situation = Situation(traces=ordered, index=index, silent=silent, groups=_grouped(ordered, lists))
    for place, trace in enumerate(ordered):
        situation.blocked.append(_waits_in(trace, situation.groups) if trace.blocked_order >= 0 else (None, ()))
        if trace.host_state is HostState.ENDED:
            situation.stopped[place] = "has ended"
        elif trace.host_state is HostState.FROZEN:
            situation.stopped[place] = "is frozen"
    _find_lagging(situation)
    if silent:
        for group in situation.groups.values():
            for rank in silent_members(situation, group):
                situation.groups_of_silent.setdefault(rank, []).append(group)
    return situation


def _grouped(traces: Sequence[RankTrace], lists: dict[str, tuple[Rank, ...]]) -> dict[tuple[str, str], Group]:
    groups: dict[tuple[str, str], Group] = {}
    with_messages: set[str] = set()
    for place, trace in enumerate(traces):
        with_messages.update(channel.group for channel in trace.channels)
        for part in trace.groups:
            key = (part.name, part.members)
            group = groups.get(key)
            if group is None:
                group = groups[key] = Group(
                    name=part.name,
                    description=part.description,
                    members=part.members,
                    ranks=lists.get(part.members, ()),
                )
            group.seen.append((place, part))
            if part.enqueued > part.completed and part.counted:
                oldest = part.completed + 1
                if group.frontier < 0 or oldest < group.frontier:
                    group.frontier = oldest
    for group in groups.values():
        group.messages = group.name in with_messages
    return groups


def _waits_in(
    trace: RankTrace, groups: dict[tuple[str, str], Group]
) -> tuple[tuple[Group, int] | None, tuple[ChannelTrace, ...]]:
    order = trace.blocked_order
    for part in trace.groups:
        if part.enqueued > part.completed:
            for op in part.tail:
                if op.order == order and op.state is not OpState.DONE:
                    return (groups[(part.name, part.members)], op.seq), ()
    channels = tuple(one for one in trace.channels if one.order == order and one.posted > one.done)
    if channels:
        return None, channels
    for part in trace.groups:
        if part.enqueued > part.completed and not part.tail:
            return (groups[(part.name, part.members)], part.completed + 1), ()
    return None, ()


def _find_lagging(situation: Situation) -> None:
    """Members that still show as unfinished what others have finished with them: GPU or watchdog stopped reporting.

    An operation that a peer has finished has been entered by all. One of them may be where the hang is (inside, and
    through at one end); two or more can't: in one group operations run in order, and in two it would be chance.
    When a quarter of the ranks seem so, the dumps were taken while the job was moving, and this says nothing.
    """
    passed: dict[int, int] = {}
    facts: dict[int, str] = {}
    for group in situation.groups.values():
        if group.frontier < 0 or len(group.seen) < 2:
            continue
        newest = max((part.completed for _, part in group.seen if part.counted), default=-1)
        if newest < group.frontier:
            continue
        for place, part in group.seen:
            if part.ordered and part.counted and part.completed < newest and part.enqueued > part.completed:
                count = _passed_by_peers(part, newest)
                passed[place] = passed.get(place, 0) + count
                if count:
                    fact = f"shows {part.completed + 1} of {group} as unfinished, and its peers have finished {newest}"
                    facts.setdefault(place, fact)
    lagging = {place: facts[place] for place, count in passed.items() if count >= _LAG_MIN}
    if len(lagging) <= max(1, _LAGGING_SHARE_MAX * len(situation.traces)):
        situation.lagging = lagging
        for place in lagging:
            situation.stopped.setdefault(place, "has stopped reporting its GPU's work")


def _passed_by_peers(part: GroupTrace, newest: int) -> int:
    """How many of the member's unfinished operations others have finished, of those that need all members."""
    count = 0
    for seq in range(part.completed + 1, min(newest, part.enqueued) + 1):
        op = operation_at(part, seq)
        count += op is None or op.kind not in ONE_WAY
        if count >= _LAG_MIN:
            break
    return count


def is_through(group: Group, seq: int) -> bool:
    """Whether a member has finished an operation that can't end anywhere before all have entered it."""
    ended = False
    for _, part in group.seen:
        if part.counted and part.completed >= seq:
            ended = True
            if (op := operation_at(part, seq)) is not None:
                return op.kind not in ONE_WAY
        elif ended and (op := operation_at(part, seq)) is not None:
            return op.kind not in ONE_WAY
    return ended


def absent_members(situation: Situation, group: Group, seq: int) -> Iterator[int]:
    """Traces of members that have not entered `seq`."""
    for place, part in group.seen:
        if not group.entered(part, seq):
            yield place
    if len(group.seen) < len(group.ranks):
        seen = {place for place, _ in group.seen}
        for rank in group.ranks:
            place = situation.index.get(rank, -1)
            if place >= 0 and place not in seen:
                yield place


def silent_members(situation: Situation, group: Group) -> list[Rank]:
    """Members without any trace."""
    if not situation.silent or len(group.seen) >= len(group.ranks):
        return []
    return [rank for rank in group.ranks if rank not in situation.index]


def unstarted_members(group: Group, seq: int, waiting: Collection[int]) -> list[int]:
    """Of the waiting those whose GPU has not started what as many or more others have; known with timing only."""
    members = set(waiting)
    states = [(p, op.state) for p, part in group.seen if p in members and (op := operation_at(part, seq))]
    unstarted = [place for place, state in states if state is OpState.ENQUEUED]
    return unstarted if 0 < 2 * len(unstarted) <= len(states) else []
