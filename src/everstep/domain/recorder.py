"""What one rank's flight recorder amounts to: a few kilobytes that travel, whatever the size of the dump.

The reduction makes these from decoded entries, the analyser judges thousands of them, and neither
knows where they came from: PyTorch's recorder of any version, or the ring in shared memory.
"""

from dataclasses import dataclass
from enum import StrEnum

from everstep.domain.ids import HostId, Rank


class OpState(StrEnum):
    """How far an operation has come on one rank."""

    ENQUEUED = "enqueued"
    STARTED = "started"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective on one rank.

    Attributes:
        seq: its number in the group.
        kind: `all_reduce`, `broadcast`, …, without the library's name.
        signature: equal on all ranks when the operation matches: kind, reduce op, root, sizes and dtypes as
            text, sizes left out where they may differ between ranks (all_to_all and its like).
        state: how far it came.
        stack: identity of the Python stack it was called from, innermost lines joined; empty when unknown.
        order: place in this rank's program, over all groups.
        at_ns: wall time at which it was enqueued, by the rank's own clock; 0 when unknown.
    """

    seq: int
    kind: str
    signature: str
    state: OpState
    stack: str = ""
    order: int
    at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTrace:
    """One rank's progress in one process group.

    Attributes:
        name, description: as PyTorch calls it.
        members: identity of the ordered member list (a hash), the same on every rank that agrees about it.
        enqueued, started, completed: newest sequence numbers of collectives; `started` equals `completed` when
            the recorder cannot tell.
        tail: the operations from `completed` on, and a few before, oldest first, without gaps in `seq`.
        created: this group's place among the groups that this rank created; 0 when unknown.
        counted: False when the numbers are PyTorch's `pg_status` alone, which may count point-to-point operations
            too and so can't be compared with other ranks' where there are any.
        ordered: its operations end in the order in which they began, as on NCCL's one stream.
    """

    name: str
    description: str = ""
    members: str
    enqueued: int
    started: int
    completed: int
    tail: tuple[Operation, ...] = ()
    created: int = 0
    counted: bool = True
    ordered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTrace:
    """One rank's point-to-point traffic with one peer in one direction of one group, in counts.

    Attributes:
        peer: the peer as global rank.
        sends: True for send, False for receive.
        posted, started, done: operations so far.
        order: place in the rank's program of the oldest one that is not done, the same for all members of a
            batch; -1 when all are done.
        done_order: place in the rank's program of the newest one that is done; -1 when none is known.
        whole: the counts start with the group. False when older ones were lost: then only `posted - done` counts.
    """

    group: str
    peer: Rank
    sends: bool
    posted: int
    started: int
    done: int
    order: int = -1
    done_order: int = -1
    stack: str = ""
    at_ns: int = 0
    whole: bool = False


class HostState(StrEnum):
    """What the rank's host thread does."""

    IN_OPERATION = "in_operation"
    """Blocked in the operation that `blocked_order` names."""
    ELSEWHERE = "elsewhere"
    """Running or asleep outside of communication."""
    ENDED = "ended"
    """The process is gone."""
    FROZEN = "frozen"
    """The process is there and runs nothing: stopped, D state, or its GIL is held."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Everything that the analyser knows of one rank.

    Attributes:
        groups, channels: its traffic.
        host_state: the host thread, when something outside of the recorder tells.
        blocked_order: program order of the operation it is blocked in: the oldest that is not done, or what the
            host waits for where that is recorded; -1 when there is none.
        stack: the host's Python stack, innermost first, one `file:line in function` each; empty when unknown.
        exit_code: how it ended; None while it lives or when unknown.
        last_ns: wall time of its newest entry by its own clock; 0 when it has none.
        wrapped: the ring has lost older entries.
    """

    rank: Rank
    host: HostId
    groups: tuple[GroupTrace, ...]
    channels: tuple[ChannelTrace, ...] = ()
    host_state: HostState = HostState.UNKNOWN
    blocked_order: int = -1
    stack: tuple[str, ...] = ()
    exit_code: int | None = None
    last_ns: int = 0
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A member list, shipped once for all ranks that have it: O(N) for a job, not O(N²).

    Attributes:
        identity: what `GroupTrace.members` names.
        ranks: global ranks in the group's order.
    """

    identity: str
    ranks: tuple[Rank, ...]
