"""Reduces the operation rings of one host's ranks to their traces; it knows no files, and judges nothing.

The ring knows for each operation whether the host has seen its end. For a message that nobody waited for yet that is
less than is true: it is through as soon as both ends have posted it, which shows when both ranks are on this host.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from everstep.adapters.evidence.operation_names import (
    RECEIVE_ANY,
    SEND,
    SIZES_MAY_DIFFER,
    dtype_name,
    operation_name,
    reduce_name,
)
from everstep.adapters.evidence.operation_ring import RingGroup, RingRecord, RingView
from everstep.domain.evidence import Frame, ProcessState
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import ChannelTrace, GroupTrace, HostState, Membership, Operation, OpState, RankTrace
from everstep.policy.group_creation import CREATION
from everstep.policy.trace_summary import identity_of

_WAITING_FILES = "torch/distributed/"
_HISTORY_MAX = 12
_TAIL_MAX = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What other sources say of a rank.

    Attributes:
        in_lock: whether the kernel has its main thread wait for a lock; None when it does not tell.
        drained: groups that PyTorch's recorder knows to have ended all they were given, though Python can't say so.
    """

    process: ProcessState
    exit_code: int | None = None
    stack: tuple[Frame, ...] = ()
    in_lock: bool | None = None
    gil_free: bool | None = None
    drained: frozenset[str] = frozenset()


_Key = tuple[int, int, bool]  # group number, peer's group rank, sends


def reduce_rings(
    host: HostId, rings: Mapping[Rank, RingView], facts: Mapping[Rank, RankFacts]
) -> tuple[dict[Rank, RankTrace], tuple[Membership, ...]]:
    """The traces of the ranks that have recorded anything, and the member lists that they name."""
    lists: dict[str, Membership] = {}
    posted = {rank: _posted(view) for rank, view in rings.items()}
    creating_any = any(view.creating for view in rings.values())
    traces = {}
    for rank, view in sorted(rings.items()):
        if view.groups:
            traces[rank] = _Reduction(view, facts[rank], posted, lists).trace(host, creating_any=creating_any)
    return traces, tuple(lists[identity] for identity in sorted(lists))


def _posted(view: RingView) -> dict[tuple[str, Rank, bool], int]:
    """Messages posted so far by (group, peer, sends): the newest record of a channel carries its count."""
    counts = {}
    for record in view.records:
        if record.kind >= SEND and (peer := _global(view.groups.get(record.group), record.peer)) is not None:
            counts[view.groups[record.group].name, peer, record.kind == SEND] = record.seq
    return counts


def _global(group: RingGroup | None, member: int) -> Rank | None:
    return group.ranks[member] if group is not None and 0 <= member < len(group.ranks) else None


class _Reduction:
    """One rank's."""

    def __init__(
        self,
        view: RingView,
        facts: RankFacts,
        posted: Mapping[Rank, Mapping[tuple[str, Rank, bool], int]],
        lists: dict[str, Membership],
    ) -> None:
        self._view = view
        self._facts = facts
        self._posted = posted
        self._lists = lists
        self._last = view.records[-1].number if view.records else -1
        self._in_torch = bool(facts.stack) and _WAITING_FILES in facts.stack[0].file

    def trace(self, host: HostId, *, creating_any: bool) -> RankTrace:
        """The trace, with group creations when any rank is at one."""
        collectives: dict[int, list[RingRecord]] = defaultdict(list)
        messages: dict[_Key, list[RingRecord]] = defaultdict(list)
        for record in self._view.records:
            if record.kind < SEND:
                collectives[record.group].append(record)
            else:
                messages[record.group, record.peer, record.kind == SEND].append(record)
        groups = [self._group(group, collectives.get(number, [])) for number, group in self._view.groups.items()]
        channels = [self._channel(key, records) for key, records in sorted(messages.items())]
        pending = [op.order for group in groups for op in group.tail if op.state is not OpState.DONE]
        pending += [channel.order for channel in channels if channel.order >= 0]
        state = self._host_state(pending)
        return RankTrace(
            rank=self._view.rank,
            host=host,
            groups=tuple(groups) + ((creations,) if creating_any and (creations := self._creations()) else ()),
            channels=tuple(channels),
            host_state=HostState.IN_OPERATION if self._view.creating else state,
            blocked_order=self._blocked(pending, state),
            stack=tuple(map(str, self._facts.stack)),
            exit_code=self._facts.exit_code,
            last_ns=self._view.records[-1].at_ns if self._view.records else 0,
            wrapped=self._view.wrapped,
        )

    def _blocked(self, pending: Sequence[int], state: HostState) -> int:
        if self._view.creating:
            return self._last + 1
        return min(pending, default=-1) if state is not HostState.ELSEWHERE else -1

    def _members(self, ranks: Sequence[Rank]) -> str:
        identity = identity_of(ranks)
        self._lists.setdefault(identity, Membership(identity=identity, ranks=tuple(ranks)))
        return identity

    def _done(self, record: RingRecord, group: RingGroup) -> bool:
        returned = record.number < self._last or (self._facts.stack and not self._in_torch)
        return record.done_ns > 0 or bool(record.unseen and returned) or group.name in self._facts.drained

    def _group(self, group: RingGroup, records: Sequence[RingRecord]) -> GroupTrace:
        operations = [self._operation(record, group) for record in records]
        newest = operations[-1].seq if operations else 0
        active = [place for place, operation in enumerate(operations) if operation.state is not OpState.DONE]
        first = active[0] if active else len(operations)
        completed = operations[first].seq - 1 if active else newest
        return GroupTrace(
            name=group.name,
            description=group.description,
            members=self._members(group.ranks),
            enqueued=newest,
            started=newest,  # gloo begins at once
            completed=completed,
            tail=tuple(operations[max(0, first - _HISTORY_MAX) : first + _TAIL_MAX]),
            created=group.created,
            ordered=False,
        )

    def _operation(self, record: RingRecord, group: RingGroup) -> Operation:
        return Operation(
            seq=record.seq,
            kind=operation_name(record.kind),
            signature=_signature(record, group),
            state=OpState.DONE if self._done(record, group) else OpState.STARTED,
            stack=self._view.sites.get(record.site, ""),
            order=record.number,
            at_ns=record.at_ns,
        )

    def _channel(self, key: _Key, records: Sequence[RingRecord]) -> ChannelTrace:
        number, member, sends = key
        group = self._view.groups[number]
        peer = _global(group, member)
        posted = records[-1].seq
        done = posted - sum(record.done_ns == 0 for record in records)
        if peer is not None and peer in self._posted and records[-1].kind != RECEIVE_ANY:
            other_end = self._posted[peer].get((group.name, self._view.rank, not sends), 0)
            done = max(done, min(posted, other_end))
        waiting = next((record for record in records if record.seq > done), None)
        newest = waiting or records[-1]
        return ChannelTrace(
            group=group.name,
            peer=peer if peer is not None else Rank(-1),
            sends=sends,
            posted=posted,
            started=posted,
            done=done,
            order=waiting.number if waiting else -1,
            done_order=max((record.number for record in records if record.seq <= done), default=-1),
            stack=self._view.sites.get(newest.site, ""),
            at_ns=newest.at_ns,
            whole=True,
        )

    def _host_state(self, pending: Sequence[int]) -> HostState:
        facts = self._facts
        if facts.exit_code is not None or facts.process is ProcessState.GONE:
            return HostState.ENDED
        if facts.process in (ProcessState.STOPPED, ProcessState.BLOCKED):
            return HostState.FROZEN
        if not pending:
            return HostState.FROZEN if facts.gil_free is False else HostState.ELSEWHERE
        if not facts.stack:
            return HostState.UNKNOWN
        return HostState.IN_OPERATION if self._in_torch or facts.in_lock is not False else HostState.ELSEWHERE

    def _creations(self) -> GroupTrace | None:
        """The creations of groups as collectives of everybody; those of groups without this rank have no signature."""
        view = self._view
        everyone = next((group.ranks for group in view.groups.values() if group.created == 1), ())
        if not everyone or not view.creations:
            return None
        made = {group.created: group for group in view.groups.values() if group.created > 0}
        tail = [
            self._creation(seq, made.get(seq), OpState.DONE)
            for seq in range(max(1, view.creations - _HISTORY_MAX), view.creations + 1)
        ]
        if view.creating:
            tail[-1] = self._creation(view.creations, view.creating, OpState.STARTED)
        return GroupTrace(
            name=CREATION,
            members=self._members(everyone),
            enqueued=view.creations,
            started=view.creations,
            completed=view.creations - bool(view.creating),
            tail=tuple(tail),
        )

    def _creation(self, seq: int, group: RingGroup | None, state: OpState) -> Operation:
        signature = f"new_group of ranks {list(group.ranks)}" if group else ""
        return Operation(seq=seq, kind="new_group", signature=signature, state=state, order=self._last + 1)


def _signature(record: RingRecord, group: RingGroup) -> str:
    """Equal on all members when the operation matches: name, reduce op, root, sizes, dtype."""
    name = operation_name(record.kind)
    if name.endswith("barrier"):
        return name
    root = f" root {_global(group, record.peer)}" if record.peer >= 0 else ""
    if record.reduce_op:
        name = f"{name} {reduce_name(record.reduce_op)}"
    if operation_name(record.kind) in SIZES_MAY_DIFFER:
        return f"{name} {dtype_name(record.dtype)}{root}"
    sizes = str(list(record.dims)) if record.tensors == 1 else f"{record.tensors} tensors, {record.numel} elements"
    return f"{name} of {sizes} {dtype_name(record.dtype)}{root}"


def drained_groups(counts: Collection[tuple[str, int, int]]) -> frozenset[str]:
    """Groups, by (label, enqueued, completed) of PyTorch's recorder, in which nothing is on its way."""
    return frozenset(label.partition(" (")[0] for label, enqueued, completed in counts if enqueued == completed)
