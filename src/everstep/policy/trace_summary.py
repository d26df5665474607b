"""Reduces one rank's flight recorder dump to a trace of a few kilobytes; knows no files and no other ranks.

The ring is scanned from its newest entry backwards and no further than needed (flight_recorder.md, section 4.2). What
counts as done differs (1.4): NCCL says `completed`, and for members of a batch their marker says it; gloo only ever
says `retired`. Dumps of active entries alone leave the counts to `pg_status` (section 2).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import ChannelTrace, GroupTrace, HostState, Membership, Operation, OpState, RankTrace
from everstep.domain.recorder_dump import Dump, Entry

_POINT_TO_POINT = re.compile(r"(\w+):(send|recv) (\d+)(?:->|<-)(\S+)")
_SIZES_MAY_DIFFER = re.compile(r"all_?to_?all|scatter$|^gather|_v$|_oop$|^all_gather$|coalesced")
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python|<frozen ")
_TAIL_MAX = 96
_HISTORY_MAX = 24
_SCAN_MIN = 128
_FRAMES_MAX = 6
NO_MEMBERS = "?"
"""The identity of a member list that the recorder does not give."""


class MemberLists:
    """The member lists met so far, each once."""

    def __init__(self) -> None:
        self._by_text: dict[str, Membership] = {}

    def of(self, ranks: str | list[int]) -> Membership | None:
        """The membership that a `ranks` of `pg_config` stands for; None when it is empty or torn."""
        text = ranks if isinstance(ranks, str) else str(ranks)
        if text not in self._by_text:
            try:
                numbers = json.loads(text)
            except ValueError:
                return None
            if not isinstance(numbers, list) or not numbers or not all(type(one) is int for one in numbers):
                return None
            self.add(tuple(map(Rank, numbers)), text)
        return self._by_text[text]

    def add(self, ranks: tuple[Rank, ...], text: str = "") -> Membership:
        """Take in a member list."""
        membership = Membership(identity=identity_of(ranks), ranks=ranks)
        return self._by_text.setdefault(text or str(list(ranks)), membership)

    def memberships(self) -> tuple[Membership, ...]:
        """All of them, sorted by identity."""
        return tuple(sorted(set(self._by_text.values()), key=lambda one: one.identity))


def identity_of(ranks: Sequence[int]) -> str:
    """The identity of an ordered member list."""
    text = ",".join(map(str, ranks)).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass(slots=True)
class _Group:
    """What the scan has seen of a group, newest first."""

    name: str
    description: str
    newest: int = -1
    done: int = -1
    oldest_active: int = -1
    history: int = 0
    settled: bool = False
    tail: list[Operation] = field(default_factory=list)


@dataclass(slots=True)
class _Channel:
    pending: int = 0
    started: int = 0
    done: int = 0
    order: int = -1
    done_order: int = -1
    stack: str = ""
    at_ns: int = 0


class _Scan:
    """One pass over a ring, from the newest entry on."""

    def __init__(self, dump: Dump) -> None:
        self.groups: dict[str, _Group] = {}
        self.channels: dict[tuple[str, int, bool], _Channel] = {}
        self.names: dict[str, str] = {}
        self.newest_ns = 0
        self.any_done = self.gloo = self.from_start = False
        self._batches: dict[tuple[str, bool, int], tuple[OpState, int]] = {}
        self._status = dump.pg_status
        self._run(dump.entries)

    def _run(self, entries: Sequence[Entry]) -> None:
        left = self._stuck_by_status()
        for count, position in enumerate(range(len(entries) - 1, -1, -1)):
            entry = entries[position]
            self._take(entry)
            local = str(entry.pg_id)
            if local in left and self.groups[entry.process_group[0]].settled:
                left.discard(local)
            if count >= _SCAN_MIN and not left and not self.gloo and all(one.settled for one in self.groups.values()):
                return
        self.from_start = len(entries) > 0 and entries[0].record_id == 0

    def _stuck_by_status(self) -> set[str]:
        return {
            key
            for key, status in self._status.items()
            if int(status.last_enqueued_collective) > int(status.last_completed_collective)
        }

    def _take(self, entry: Entry) -> None:
        self.newest_ns = self.newest_ns or entry.time_created_ns or 0
        name, description = entry.process_group
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = _Group(name=name, description=description)
            self.names[str(entry.pg_id)] = name
        library, _, kind = entry.profiling_name.partition(":")
        self.gloo = self.gloo or library == "gloo"
        state = _state(entry, library)
        if entry.is_p2p:
            self._take_message(entry, group, state)
        else:
            self._take_collective(entry, group, kind, state)

    def _take_message(self, entry: Entry, group: _Group, state: OpState) -> None:
        group.newest = max(group.newest, entry.collective_seq_id)
        batch = (group.name, True, entry.p2p_seq_id)
        parsed = _POINT_TO_POINT.fullmatch(entry.profiling_name)
        if parsed is None:
            self._batches[batch] = (state, entry.record_id)
            return
        state, order = self._batches.get(batch, (state, entry.record_id))
        peer = int(parsed[4]) if parsed[4].isdigit() else -1
        channel = self.channels.setdefault((group.name, peer, parsed[2] == "send"), _Channel())
        if state is OpState.DONE:
            self.any_done = group.settled = True
            channel.done += 1
            channel.done_order = max(channel.done_order, order)
            return
        channel.pending += 1
        channel.started += state is OpState.STARTED
        channel.order = order
        channel.stack = stack_identity(entry.frames)
        channel.at_ns = entry.time_created_ns or 0

    def _take_collective(self, entry: Entry, group: _Group, kind: str, state: OpState) -> None:
        seq = entry.collective_seq_id
        group.newest = max(group.newest, seq)
        if kind.endswith("coalesced"):
            self._batches[(group.name, False, seq)] = (state, entry.record_id)
        if group.done >= 0 and seq <= group.done:
            state = OpState.DONE
        state, _ = self._batches.get((group.name, False, seq), (state, 0))
        if state is OpState.DONE:
            self.any_done = group.settled = True
            group.done = max(group.done, seq)
            group.history += 1
            if group.history > _HISTORY_MAX:
                return
        else:
            group.oldest_active = seq
        tail = group.tail
        if tail and tail[-1].seq == seq:
            tail[-1] = _joined(tail[-1], entry, kind)
            return
        tail.append(
            Operation(
                seq=seq,
                kind=kind,
                signature=signature_of(kind, entry),
                state=state,
                stack=stack_identity(entry.frames),
                order=entry.record_id,
                at_ns=entry.time_created_ns or 0,
            )
        )


def _joined(marker: Operation, entry: Entry, kind: str) -> Operation:
    """A coalesced collective is one operation: its marker's name with its members' signatures; it starts with them."""
    return Operation(
        seq=marker.seq,
        kind=marker.kind,
        signature=f"{marker.signature} {signature_of(kind, entry)}",
        state=marker.state,
        stack=marker.stack or stack_identity(entry.frames),
        order=min(marker.order, entry.record_id),
        at_ns=marker.at_ns,
    )


def _state(entry: Entry, library: str) -> OpState:
    if entry.state == "completed" or (library == "gloo" and entry.retired and not entry.time_discovered_started_ns):
        return OpState.DONE
    return OpState.STARTED if entry.state == "started" else OpState.ENQUEUED


def signature_of(kind: str, entry: Entry) -> str:
    """What has to be equal on all members."""
    if _sizes_may_differ(kind):
        return f"{kind} {_dtypes(entry)}"
    return f"{kind} of {entry.input_sizes} {_dtypes(entry)}"


@lru_cache(maxsize=256)
def _sizes_may_differ(kind: str) -> bool:
    return _SIZES_MAY_DIFFER.search(kind) is not None


def _dtypes(entry: Entry) -> str:
    return " ".join(map(str, dict.fromkeys(entry.input_dtypes or ())))


def stack_identity(frames: Any) -> str:
    """The innermost lines that are the script's own, else the library's; empty without frames."""
    if not frames:
        return ""
    own: list[str] = []
    for frame in frames:
        if isinstance(frame, dict) and not _is_library(str(frame.get("filename", "?"))):
            own.append(_line(frame))
            if len(own) == _FRAMES_MAX:
                break
    return " < ".join(own or [_line(frame) for frame in frames[:_FRAMES_MAX] if isinstance(frame, dict)])


def call_lines(frames: Any) -> list[str]:
    """All lines of a recorded stack, innermost first."""
    return [_line(frame) for frame in frames or () if isinstance(frame, dict)]


@lru_cache(maxsize=4096)
def _is_library(filename: str) -> bool:
    return _LIBRARY.search(filename) is not None


def _line(frame: dict[str, Any]) -> str:
    return f"{frame.get('filename', '?')}:{frame.get('line', 0)} in {frame.get('name', '?')}"


def reduce_dump(
    dump: Dump,
    members: MemberLists,
    *,
    rank: Rank,
    host: HostId,
    host_state: HostState = HostState.UNKNOWN,
    stack: Sequence[str] = (),
    exit_code: int | None = None,
) -> RankTrace:
    """Reduce a dump.

    Args:
        members: collects the member lists, so that each travels once.
        rank, host: whose dump it is; an empty host when unknown.
        host_state, stack, exit_code: what other sources say of the process.

    Raises:
        ValueError, TypeError, msgspec.ValidationError: entries are not what PyTorch writes.
    """
    scan = _Scan(dump)
    names = _names_by_number(dump, scan.names)
    lists = {name: members.of(config.ranks) for name, config in dump.pg_config.items()}
    groups = _groups(dump, scan, names, lists)
    channels = _channels(scan, lists)
    active = [op.order for group in groups for op in group.tail if op.state is not OpState.DONE]
    active += [channel.order for channel in channels if channel.order >= 0]
    if scan.gloo and not active and _in_something(dump) and host_state is HostState.UNKNOWN:
        host_state = HostState.IN_OPERATION
    if active and not scan.gloo and host_state is HostState.ELSEWHERE:
        host_state = HostState.UNKNOWN  # a host that waits for its GPU stands anywhere
    return RankTrace(
        rank=rank,
        host=host,
        groups=groups,
        channels=channels,
        host_state=host_state,
        blocked_order=min(active, default=-1),
        stack=tuple(stack),
        exit_code=exit_code,
        last_ns=scan.newest_ns,
        wrapped=bool(dump.entries) and dump.entries[0].record_id > 0,
    )


def _in_something(dump: Dump) -> bool:
    """gloo records no point-to-point operation, and still counts it in `pg_status` (1.4)."""
    return any(
        int(status.last_enqueued_collective) > int(status.last_completed_collective)
        for status in dump.pg_status.values()
    )


def _groups(
    dump: Dump, scan: _Scan, names: dict[str, str], lists: dict[str, Membership | None]
) -> tuple[GroupTrace, ...]:
    created = {name: place for place, name in enumerate(sorted(dump.pg_config, key=_by_number), start=1)}
    groups = []
    for name, seen in scan.groups.items():
        config = dump.pg_config.get(name)
        membership = lists.get(name)
        completed = max(seen.done, seen.oldest_active - 1) if seen.oldest_active >= 0 else seen.newest
        tail = _without_gaps(seen.tail)
        started = max([completed, *(op.seq for op in tail if op.state is not OpState.ENQUEUED)])
        groups.append(
            GroupTrace(
                name=name,
                description=seen.description or (config.desc if config else ""),
                members=membership.identity if membership else NO_MEMBERS,
                enqueued=seen.newest,
                started=started,
                completed=completed,
                tail=tail,
                created=created.get(name, 0),
                ordered=not scan.gloo,
            )
        )
    for number, name in names.items():
        status = dump.pg_status.get(number)
        if name in scan.groups or status is None:
            continue
        membership = lists.get(name)
        completed = int(status.last_completed_collective)
        groups.append(
            GroupTrace(
                name=name,
                description=dump.pg_config[name].desc if name in dump.pg_config else "",
                members=membership.identity if membership else NO_MEMBERS,
                enqueued=int(status.last_enqueued_collective),
                started=completed,
                completed=completed,
                created=created.get(name, 0),
                counted=False,
            )
        )
    return tuple(groups)


def _without_gaps(newest_first: list[Operation]) -> tuple[Operation, ...]:
    """The oldest stretch of active operations is what matters, with the newest done ones before it."""
    oldest_first = newest_first[::-1]
    first_active = next((i for i, op in enumerate(oldest_first) if op.state is not OpState.DONE), len(oldest_first))
    kept = oldest_first[max(0, first_active - _HISTORY_MAX) : first_active + _TAIL_MAX]
    start = len(kept)
    while start > 0 and (start == len(kept) or kept[start - 1].seq == kept[start].seq - 1):
        start -= 1
    return tuple(kept[start:])


def _names_by_number(dump: Dump, seen: dict[str, str]) -> dict[str, str]:
    """Which group a number of `pg_status` is: by its entries; and as both count creations, by order.

    The order is used only when it agrees with every group that has entries.
    """
    names = sorted((name for name in dump.pg_config if name), key=_by_number)
    numbers = sorted(dump.pg_status, key=_by_number)
    if len(names) != len(numbers) or not all(name.isdigit() for name in names):
        return seen
    by_order = dict(zip(numbers, names, strict=True))
    return by_order if all(by_order.get(number) == name for number, name in seen.items()) else seen


def _by_number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (1 << 62, text)


def _channels(scan: _Scan, lists: dict[str, Membership | None]) -> tuple[ChannelTrace, ...]:
    channels = []
    for (group, peer, sends), seen in sorted(scan.channels.items()):
        membership = lists.get(group)
        known = membership is not None and 0 <= peer < len(membership.ranks)
        channels.append(
            ChannelTrace(
                group=group,
                peer=membership.ranks[peer] if known and membership else Rank(peer),
                sends=sends,
                posted=seen.done + seen.pending,
                started=seen.done + seen.started,
                done=seen.done,
                order=seen.order,
                done_order=seen.done_order,
                stack=seen.stack,
                at_ns=seen.at_ns,
                whole=scan.from_start and scan.any_done,
            )
        )
    return tuple(channels)
