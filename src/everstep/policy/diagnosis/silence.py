"""Where a rank without a dump may stand, and what may hold it there, as far as its peers' records tell.

It is at fault only when nothing else can hold it. Its program is read off a twin: a rank with the same place in every
step, such as a member of its tensor-parallel group. Peers have finished operations with it, so it is past those; peers
wait for it alone, so it is not in those; what the twin did in between may be where it waits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.domain.ids import Rank
from everstep.domain.recorder import ChannelTrace, GroupTrace, Operation, RankTrace
from everstep.policy.diagnosis.situation import ONE_WAY, Group, Situation, operation_at, silent_members
from everstep.policy.diagnosis.waits import Pair, Waits

_LATER = 1 << 62
"""Place in the program of what the twin has not come to."""
_EARLIER = -1
_SAMPLE = 8
_TWINS_MAX = 256


@dataclass(slots=True)
class _Standing:
    """Between two places of its twin's program: past `after`, and not past `before`.

    Attributes:
        twin: trace by index; -1 when none is known, and then the places say nothing.
    """

    twin: int
    after: int = _EARLIER
    before: int = _LATER + 1


def excuse_the_silent(waits: Waits) -> None:
    """Lead each rank without a dump to what may hold it; one that leads nowhere is held by nothing."""
    situation = waits.situation
    count = len(situation.traces)
    silent_node = {rank: count + place for place, rank in enumerate(situation.silent)}
    if not silent_node:
        return
    missed: dict[Rank, list[int]] = {}
    for number, stuck in enumerate(waits.stuck):
        for rank in silent_members(situation, stuck.group):
            missed.setdefault(rank, []).append(number)
    waiting: dict[int, list[Pair]] = {}
    for pair in waits.pairs:
        if waits.is_silent(pair.keeping):
            waiting.setdefault(pair.keeping, []).append(pair)
    known = _Known(situation)
    for rank, node in silent_node.items():
        groups = situation.groups_of_silent.get(rank, [])
        twins = known.twins(groups)
        standing = _Standing(twins[-1] if twins else -1)
        against = missed.get(rank, ()), waiting.get(node, ())
        held = _collectives(waits, known, node, groups, standing, *against)
        nearest = next((t for t in twins if _reached(situation.traces[t]) >= standing.before), standing.twin)
        if nearest != standing.twin:  # what it did last is nearest to what the silent rank would do next
            standing = _Standing(nearest)
            held = _collectives(waits, known, node, groups, standing, *against)
        edges = waits.edges[node]
        edges += held
        for peer in _peers(situation, rank, groups, standing):
            place = situation.index.get(peer, silent_node.get(peer, -1))
            if place >= 0 and place not in edges:
                edges.append(place)
        if not edges and _in_unseen_group(situation, groups, standing):
            waits.unseen.add(node)


class _Known:
    """What holds for a group whoever of its members is asked about, found out once."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._twins: dict[int, dict[int, int]] = {}
        self._finished: dict[int, int] = {}

    def twins(self, groups: Sequence[Group]) -> list[int]:
        """Members of those of the groups whose members run one program, by how far they have come."""
        found: dict[int, int] = {}
        for group in groups:
            if id(group) not in self._twins:
                few = group.seen[:: 1 + len(group.seen) // _TWINS_MAX] if self._one_program(group) else ()
                self._twins[id(group)] = {place: _reached(self._situation.traces[place]) for place, _ in few}
            found |= self._twins[id(group)]
        return sorted(found, key=lambda place: (found[place], place))

    def finished(self, group: Group) -> int:
        """The newest operation that somebody has finished, and so all have entered."""
        if id(group) not in self._finished:
            newest = max((part.completed for _, part in group.seen if part.counted), default=0)
            self._finished[id(group)] = newest
        return self._finished[id(group)]

    def _one_program(self, group: Group) -> bool:
        few = [self._situation.traces[place] for place, _ in group.seen[:: max(1, len(group.seen) // _SAMPLE)]]
        return len(few) > 1 and all(_same_program(few[0], other) for other in few[1:])


def _same_program(one: RankTrace, other: RankTrace) -> bool:
    """Whether the operations that both have in their records stand at the same places, with at least one of them."""
    agree = False
    theirs = _by_description(other)
    for description, part in _by_description(one).items():
        like = theirs.get(description)
        if like is None or not part.counted or not like.counted:
            continue
        for seq in {min(part.completed, like.completed), min(part.enqueued, like.enqueued)}:
            first, second = operation_at(part, seq), operation_at(like, seq)
            if first is not None and second is not None:
                if first.order != second.order:
                    return False
                agree = True
    return agree


def _by_description(trace: RankTrace) -> dict[str, GroupTrace]:
    parts = {part.description: part for part in trace.groups}
    return parts if len(parts) == len(trace.groups) else _without_doubles(trace)


def _without_doubles(trace: RankTrace) -> dict[str, GroupTrace]:
    counts = Counter(part.description for part in trace.groups)
    return {part.description: part for part in trace.groups if counts[part.description] == 1}


def _reached(trace: RankTrace) -> int:
    """The place where it stands: what it has enqueued behind that has not begun."""
    if trace.blocked_order >= 0:
        return trace.blocked_order
    orders = [part.tail[-1].order for part in trace.groups if part.tail]
    orders += [max(channel.order, channel.done_order) for channel in trace.channels]
    return max(orders, default=-1)


def _collectives(
    waits: Waits,
    known: _Known,
    node: int,
    groups: Sequence[Group],
    standing: _Standing,
    missed: Sequence[int],
    waiting: Sequence[Pair],
) -> list[int]:
    """Nodes of the collectives that it may be in; narrows down where it stands on the way.

    It is not past any collective that has not ended, so of those whose place is known only the first can hold it.
    """
    situation = waits.situation
    for group in groups:
        standing.after = max(standing.after, _finished(situation, standing.twin, group, known.finished(group)))
    unplaced, places = [], []
    for number in missed:
        stuck = waits.stuck[number]
        alone = stuck.keeping == [node]
        place = _place(situation, standing.twin, stuck.group, stuck.seq)
        if place is not None and place > standing.after:
            places.append((place, alone, number))
        elif not alone:
            unplaced.append(number)
    for place, _, _ in places:
        standing.before = min(standing.before, place)
    rank = waits.rank_of(node)
    bound = min((_message_bound(situation, standing.twin, pair, rank, groups) for pair in waiting), default=_LATER)
    held = [number for place, alone, number in places if place == standing.before and not alone]
    if standing.after < bound < standing.before:
        standing.before, held = bound, []
    return [waits.first_stuck + number for number in (*unplaced, *held)]


def _finished(situation: Situation, twin: int, group: Group, seq: int) -> int:
    """The place of an operation that somebody has finished; those that can end before all have come say nothing."""
    op = _twins_operation(situation, twin, group, seq)
    return op.order if op is not None and op.kind not in ONE_WAY else _EARLIER


def _place(situation: Situation, twin: int, group: Group, seq: int) -> int | None:
    part = _twins_part(situation, twin, group)
    if part is None:
        return None
    op = operation_at(part, seq)
    return op.order if op is not None else _LATER if seq > part.enqueued else None


def _twins_operation(situation: Situation, twin: int, group: Group, seq: int) -> Operation | None:
    part = _twins_part(situation, twin, group)
    return operation_at(part, seq) if part is not None else None


def _twins_part(situation: Situation, twin: int, group: Group) -> GroupTrace | None:
    """The twin's own part of the group, or of the sister group that is to it what this one is to the silent rank."""
    if twin < 0:
        return None
    parts = situation.traces[twin].groups
    for part in parts:
        if (part.name, part.members) == (group.name, group.members):
            return part
    sisters = [part for part in parts if part.description == group.description and group.description]
    if len(sisters) != 1:
        return None
    sister = sisters[0]
    for _, part in group.seen[:_SAMPLE]:
        seq = min(part.completed, sister.completed)
        mine, theirs = operation_at(part, seq), operation_at(sister, seq)
        if mine is not None and theirs is not None:
            return sister if mine.order == theirs.order else None
    return None


# --- messages


def _peers(situation: Situation, rank: Rank, groups: Sequence[Group], standing: _Standing) -> Iterator[Rank]:
    """Ranks whose messages it may wait for."""
    if standing.twin < 0:
        for group in groups:
            if group.messages:
                yield from (one for one in group.ranks if one != rank)
        return
    twin = situation.traces[standing.twin]
    for channel in twin.channels:
        if not any(standing.after < at < standing.before for at in (channel.done_order, channel.order)):
            continue
        peer = _counterpart(situation, twin, channel, rank, groups)
        if peer is not None and not _has_posted(situation, twin, channel, peer, standing):
            yield peer


def _in_unseen_group(situation: Situation, groups: Sequence[Group], standing: _Standing) -> bool:
    """Whether it may stand in an operation of a group of which no member left a dump."""
    if standing.twin < 0:
        return False
    seen = {group.description for group in groups}
    twin = situation.traces[standing.twin]
    unseen = {part.name for part in twin.groups if part.description not in seen}
    places = [op.order for part in twin.groups if part.name in unseen for op in part.tail]
    places += [at for one in twin.channels if one.group in unseen for at in (one.done_order, one.order)]
    return any(standing.after < place <= standing.before for place in places)


def _counterpart(
    situation: Situation, twin: RankTrace, channel: ChannelTrace, rank: Rank, groups: Sequence[Group]
) -> Rank | None:
    """Who is to the silent rank what the channel's peer is to its twin: the same place in the sister group."""
    part = next((one for one in twin.groups if one.name == channel.group), None)
    if part is None:
        return None
    own = situation.groups[(part.name, part.members)]
    for group in groups:
        alike = group.description == own.description and len(group.ranks) == len(own.ranks)
        if alike and channel.peer in own.ranks:
            peer = group.ranks[own.ranks.index(channel.peer)]
            return peer if peer != rank else None
    return None


def _has_posted(situation: Situation, twin: RankTrace, channel: ChannelTrace, peer: Rank, standing: _Standing) -> bool:
    """Whether the peer is past its end of the messages that the twin has had since: then nobody waits for it there."""
    if standing.after < channel.order < standing.before:
        return False
    theirs = _opposite(situation, channel.peer, twin.rank, channel)
    place, like = situation.index.get(peer), situation.index.get(channel.peer)
    if place is None or like is None or theirs is None or theirs.done_order < 0:
        return False
    newest = max(theirs.done_order, theirs.order)
    traces = situation.traces
    if _reached(traces[place]) <= newest or not _same_program(traces[place], traces[like]):
        return False
    collective, _ = situation.blocked[place]
    return collective is None or _place(situation, like, *collective) not in (None, _LATER)


def _opposite(situation: Situation, rank: Rank, peer: Rank, channel: ChannelTrace) -> ChannelTrace | None:
    place = situation.index.get(rank)
    if place is None:
        return None
    wanted = (channel.group, peer, not channel.sends)
    return next((one for one in situation.traces[place].channels if (one.group, one.peer, one.sends) == wanted), None)


def _message_bound(situation: Situation, twin: int, pair: Pair, rank: Rank, groups: Sequence[Group]) -> int:
    """The place that a silent rank is not past, since a peer still waits for its message there.

    The twin's peer has had that message, by its place in the peer's program; so the twin's newest one of that
    channel is that message or a later one.
    """
    if twin < 0 or len(situation.blocked[pair.waiting][1]) > 1:  # of a batch it may have had this part
        return _LATER
    waiting = situation.traces[pair.waiting]
    trace = situation.traces[twin]
    for channel in trace.channels:
        if channel.sends == pair.channel.sends or channel.peer not in situation.index:
            continue
        if _counterpart(situation, trace, channel, rank, groups) != waiting.rank:
            continue
        like = situation.traces[situation.index[channel.peer]]
        theirs = _opposite(situation, channel.peer, trace.rank, channel)
        if theirs is not None and pair.channel.order <= theirs.done_order and _same_program(waiting, like):
            return max(channel.done_order, channel.order)
    return _LATER
