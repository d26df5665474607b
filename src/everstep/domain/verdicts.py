"""Verdicts: what went wrong, which ranks did it, and the sentence that says so to the person on call."""

from dataclasses import dataclass
from enum import StrEnum

from everstep.domain.causes import Cause
from everstep.domain.ids import HostId, Rank


class Trouble(StrEnum):
    """The class of a failure or hang; the names are DESIGN.md's."""

    DEAD = "dead"
    """The process ended: a signal, an exit code, or silently with 0 while the others still trained."""
    SCRIPT_ERROR = "script_error"
    """An exception left the script."""
    DISK_FULL = "disk_full"
    """The script raised because a disk is full."""
    LOST_CONNECTION = "lost_connection"
    """Ranks lost their peers, and no rank shows a failure of its own."""
    FROZEN = "frozen"
    """The process is there but runs no Python: stopped, in D state, or the GIL is held."""
    NEVER_ENTERED = "never_entered"
    """The rank is busy or asleep elsewhere and has not entered the collective that the others wait in."""
    INSIDE_OP = "inside_op"
    """Every rank is inside the same collective and none comes out."""
    HOST_LOST = "host_lost"
    STORE_LOST = "store_lost"
    """The rendezvous store of the attempt ended."""
    START_FAILED = "start_failed"
    """Workers could not be started."""
    SLOW = "slow"
    """Something moved between the snapshots: no hang."""
    MISMATCH = "mismatch"
    """Ranks met in one collective with different operations, shapes, dtypes or order."""
    LOOP_BOUND = "loop_bound"
    """A rank left the loop earlier than the others: uneven data, an early stop, a normal end."""
    EXTRA_COLLECTIVE = "extra_collective"
    """A rank issued one collective more than the others."""
    ORDER_DEADLOCK = "order_deadlock"
    """Ranks wait for each other in a circle over several groups or channels."""
    GROUP_CREATION = "group_creation"
    """Ranks do not agree about a process group: one skipped creating it, or gave other members."""
    GPU_SIDE = "gpu_side"
    """The rank's GPU, or the thread that watches it, stopped: its work never starts, or is never seen to end."""
    HEALTHY = "healthy"
    """Nobody waits for anybody."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A finding with its reason.

    Attributes:
        trouble: the class.
        ranks: the ranks at fault, ascending; never one that was waiting for others; empty when unknown.
        hosts: their hosts, sorted.
        reason: one sentence that names ranks, hosts, steps and seconds.
        evidence: the facts it rests on, one sentence each.
        where: the Python line at which the culprit stands or raised, `file:line in function`; empty when unknown.
        cause: the row of the interruption table.
        signature: equal for two failures that are the same failure again; says nothing about steps.
    """

    trouble: Trouble
    ranks: tuple[Rank, ...]
    hosts: tuple[HostId, ...]
    reason: str
    evidence: tuple[str, ...] = ()
    where: str = ""
    cause: Cause
    signature: str
