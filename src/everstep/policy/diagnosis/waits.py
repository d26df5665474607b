"""Who waits for whom: a graph from ranks to the operations they wait in, and from those to the ranks that keep them.

Bipartite for collectives, so that its size is the sum of memberships, never of pairs (flight_recorder.md, 4.3 step 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.domain.ids import Rank
from everstep.domain.recorder import ChannelTrace, HostState
from everstep.policy.diagnosis.components import components
from everstep.policy.diagnosis.situation import (
    Group,
    Situation,
    absent_members,
    is_through,
    operation_at,
    silent_members,
    unstarted_members,
)


class Why(StrEnum):
    """Why a member keeps an operation from ending, strongest first."""

    STOPPED = "stopped"
    ABSENT = "absent"
    DIFFERS = "differs"
    SILENT = "silent"
    BEHIND = "behind"
    INSIDE = "inside"


_TOGETHER = frozenset(((Why.ABSENT, Why.STOPPED), (Why.SILENT, Why.BEHIND), (Why.SILENT, Why.INSIDE)))
"""In a batch of messages: a peer without a dump may be done with its part, and then another one holds the batch."""


@dataclass(slots=True)
class Stuck:
    """A collective that somebody waits in.

    Attributes:
        waiting: traces whose oldest unfinished operation it is.
        keeping: nodes of the ranks that keep it from ending.
    """

    group: Group
    seq: int
    waiting: list[int] = field(default_factory=list)
    keeping: list[int] = field(default_factory=list)
    why: Why = Why.INSIDE


@dataclass(slots=True)
class Pair:
    """One rank that waits for another in a point-to-point operation; nodes."""

    waiting: int
    keeping: int
    channel: ChannelTrace
    why: Why


@dataclass(slots=True)
class Waits:
    """The graph. Nodes: traces by index, then silent ranks, then stuck collectives.

    Attributes:
        edges: node to nodes.
        stuck: the collectives, by node minus `first_stuck`.
        pairs: point-to-point waits.
        sinks: components that lead nowhere else and that somebody waits for.
        waited_for: for each node whether anything leads to it.
        kept_by: for each rank's node the collectives that it keeps from ending.
        doubtful: for ranks in a batch of which one peer shows nothing, the rest of the batch. That peer may as well be
            done: the members of a batch show as unfinished until the last one ends.
        blind: traces that wait for something the recorder does not show.
        unseen: nodes of ranks without a dump that may wait for others without one, in a group that nobody shows.
        differing: traces that called another operation than their peers, who wait for them.
    """

    situation: Situation
    edges: list[list[int]]
    stuck: list[Stuck]
    pairs: list[Pair]
    blind: set[int]
    first_stuck: int
    sinks: list[list[int]] = field(default_factory=list)
    waited_for: bytearray = field(default_factory=bytearray)
    kept_by: dict[int, list[Stuck]] = field(default_factory=dict)
    doubtful: dict[int, list[Pair]] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)

    def rank_of(self, node: int) -> Rank:
        count = len(self.situation.traces)
        return self.situation.traces[node].rank if node < count else self.situation.silent[node - count]

    def is_silent(self, node: int) -> bool:
        return len(self.situation.traces) <= node < self.first_stuck


def trace_waits(situation: Situation) -> Waits:
    """Build the graph; `find_sinks` comes when it is whole."""
    count = len(situation.traces)
    first_stuck = count + len(situation.silent)
    waits = Waits(
        situation=situation,
        edges=[[] for _ in range(first_stuck)],
        stuck=[],
        pairs=[],
        blind=set(),
        first_stuck=first_stuck,
    )
    silent_node = {rank: count + place for place, rank in enumerate(situation.silent)}
    _wait_in_collectives(waits)
    for stuck in waits.stuck:
        _keep(waits, stuck, silent_node)
    _wait_for_peers(waits, silent_node)
    _let_those_elsewhere_go(waits)
    for stuck in waits.stuck:
        for node in stuck.keeping:
            waits.kept_by.setdefault(node, []).append(stuck)
    waits.edges += [stuck.keeping for stuck in waits.stuck]
    return waits


def drop_doubts(waits: Waits) -> bool:
    """Take the doubtful waits out of circles, and look for sinks again; False when there was none.

    For circles that nothing else explains: a peer that is further on has rather finished its part of the batch.
    """
    doubted = [node for sink in waits.sinks if len(sink) > 1 for node in sink if node in waits.doubtful]
    for place in doubted:
        waits.pairs = [pair for pair in waits.pairs if pair.waiting != place] + waits.doubtful[place]
        waits.edges[place] = [pair.keeping for pair in waits.doubtful[place]]
    if doubted:
        find_sinks(waits)
    return bool(doubted)


def point_at(waits: Waits, group: Group, culprits: Sequence[int]) -> None:
    """Those who met at the frontier of a group wait for the members that called another operation there."""
    for number, stuck in enumerate(waits.stuck):
        if stuck.group is group and stuck.seq == group.frontier and stuck.why is Why.INSIDE and not stuck.keeping:
            node = waits.first_stuck + number
            stuck.keeping, stuck.why = list(culprits), Why.DIFFERS
            stuck.waiting = [place for place in stuck.waiting if place not in culprits]
            waits.edges[node] = stuck.keeping
            for place in culprits:
                waits.edges[place] = [head for head in waits.edges[place] if head != node]
                waits.kept_by.setdefault(place, []).append(stuck)
            waits.differing.update(culprits)
            find_sinks(waits)
            return


def _wait_in_collectives(waits: Waits) -> None:
    situation = waits.situation
    nodes: dict[tuple[int, int], int] = {}
    for place, (collective, channels) in enumerate(situation.blocked):
        if place in situation.stopped:
            continue
        if collective is None:
            trace = situation.traces[place]
            if not channels and (trace.blocked_order >= 0 or trace.host_state is HostState.IN_OPERATION):
                waits.blind.add(place)
            continue
        group, seq = collective
        key = (id(group), seq)
        number = nodes.get(key)
        if number is None:
            number = nodes[key] = len(waits.stuck)
            waits.stuck.append(Stuck(group=group, seq=seq))
        waits.stuck[number].waiting.append(place)
        waits.edges[place].append(waits.first_stuck + number)


def _keep(waits: Waits, stuck: Stuck, silent_node: dict[Rank, int]) -> None:
    situation, group, seq = waits.situation, stuck.group, stuck.seq
    stopped = situation.stopped
    if is_through(group, seq):
        return
    halted = [p for p, part in group.seen if p in stopped and part.completed < seq] if stopped else []
    absent = [place for place in absent_members(situation, group, seq) if place not in stopped]
    if halted or absent:
        unseen = [p for p in absent_members(situation, group, seq) if p in stopped and p not in halted]
        stuck.keeping, stuck.why = halted + unseen + absent, Why.ABSENT if absent else Why.STOPPED
        return
    if unstarted_members(group, seq, stuck.waiting):
        return
    if behind := _behind(situation, stuck):
        stuck.keeping, stuck.why = behind, Why.BEHIND
    elif silent := silent_members(situation, group):
        stuck.keeping, stuck.why = [silent_node[rank] for rank in silent], Why.SILENT


def _behind(situation: Situation, stuck: Stuck) -> list[int]:
    """Members that have enqueued it behind an older operation, which holds them up."""
    waiting = set(stuck.waiting)
    behind = []
    for place, part in stuck.group.seen:
        if place in waiting or part.completed >= stuck.seq:
            continue
        op = operation_at(part, stuck.seq)
        blocked_order = situation.traces[place].blocked_order
        if blocked_order >= 0 and (op is None or blocked_order < op.order):
            behind.append(place)
    return behind


def _wait_for_peers(waits: Waits, silent_node: dict[Rank, int]) -> None:
    situation = waits.situation
    open_channels: dict[tuple[str, Rank, Rank, bool], ChannelTrace] = {}
    for trace in situation.traces:
        for one in trace.channels:
            if one.whole or one.posted > one.done:
                open_channels[(one.group, trace.rank, one.peer, one.sends)] = one
    for place, (_, channels) in enumerate(situation.blocked):
        if not channels or place in situation.stopped:
            continue
        rank = situation.traces[place].rank
        pairs = []
        for channel in channels:
            peer = situation.index.get(channel.peer, silent_node.get(channel.peer, -1))
            if peer < 0:
                continue
            other = open_channels.get((channel.group, channel.peer, rank, not channel.sends))
            pairs.append(Pair(place, peer, channel, _why_of_peer(waits, peer, channel, other)))
        for why in (Why.ABSENT, Why.SILENT, Why.BEHIND, Why.INSIDE):
            chosen = [p for p in pairs if p.why is why or (why, p.why) in _TOGETHER]
            if chosen:
                waits.pairs += chosen
                rest = [pair for pair in pairs if pair.why in (Why.SILENT, Why.BEHIND, Why.INSIDE)]
                if why is Why.ABSENT and rest and not any(pair.channel.whole for pair in chosen):
                    waits.doubtful[place] = rest
                waits.edges[place] += [pair.keeping for pair in chosen]
                break
        else:
            waits.blind.add(place)


def _why_of_peer(waits: Waits, peer: int, channel: ChannelTrace, other: ChannelTrace | None) -> Why:
    situation = waits.situation
    if waits.is_silent(peer):
        return Why.SILENT
    if peer in situation.stopped:
        return Why.STOPPED
    if other is None:
        return Why.ABSENT
    if other.whole and channel.whole:
        if other.posted <= channel.done:
            return Why.ABSENT
    elif other.posted <= other.done:
        return Why.ABSENT
    blocked_order = situation.traces[peer].blocked_order
    return Why.BEHIND if 0 <= blocked_order < other.order else Why.INSIDE


def _let_those_elsewhere_go(waits: Waits) -> None:
    """A rank that others miss and whose host is outside of communication is not held up by its own work."""
    missed: set[int] = set()
    for stuck in waits.stuck:
        if stuck.why is Why.ABSENT:
            missed.update(stuck.keeping)
    missed.update(pair.keeping for pair in waits.pairs if pair.why is Why.ABSENT)
    for place in missed:
        if waits.situation.traces[place].host_state is HostState.ELSEWHERE:
            waits.edges[place] = []
            waits.blind.discard(place)


def find_sinks(waits: Waits) -> None:
    """The components of the graph that lead nowhere else."""
    found = components(waits.edges)
    number = [0] * len(waits.edges)
    for place, component in enumerate(found):
        for node in component:
            number[node] = place
    waits.waited_for = waited_for = bytearray(len(waits.edges))
    leads_on = bytearray(len(found))
    for node, heads in enumerate(waits.edges):
        for head in heads:
            waited_for[head] = 1
            if number[head] != number[node]:
                leads_on[number[node]] = 1
    waits.sinks = [
        component
        for place, component in enumerate(found)
        if not leads_on[place] and (len(component) > 1 or waited_for[component[0]])
    ]


def blocked_by(waits: Waits, nodes: Sequence[int], back: Sequence[Sequence[int]]) -> dict[int, int]:
    """Every node that waits for these, directly or through others, with its distance."""
    distance = dict.fromkeys(nodes, 0)
    edge = list(nodes)
    while edge:
        farther = []
        for node in edge:
            step = distance[node] + 1
            for tail in back[node]:
                if tail not in distance:
                    distance[tail] = step
                    farther.append(tail)
        edge = farther
    return distance


def backward(waits: Waits) -> list[list[int]]:
    """The edges turned around."""
    back: list[list[int]] = [[] for _ in waits.edges]
    for node, heads in enumerate(waits.edges):
        for head in heads:
            back[head].append(node)
    return back
