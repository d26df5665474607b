"""What is known of one rank at one moment, small enough to travel: the only input of a hang verdict.

Knows nothing of files, pickles or processes: adapters reduce those to this.
"""

from dataclasses import dataclass
from enum import StrEnum

from everstep.domain.ids import HostId, Rank
from everstep.domain.phases import Phase
from everstep.domain.recorder import Membership, RankTrace


class ProcessState(StrEnum):
    """The kernel's word on the process."""

    RUNNING = "running"
    """On a CPU or ready for one."""
    SLEEPING = "sleeping"
    """Waits for something, interruptibly."""
    STOPPED = "stopped"
    """SIGSTOP, or a debugger."""
    BLOCKED = "blocked"
    """D state: inside the kernel, usually a disk or driver, and unkillable."""
    GONE = "gone"
    """No such process, or a zombie."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """How far one rank has come in one process group, in the group's own sequence numbers.

    Attributes:
        group: the group's name, `0` for the default group.
        ranks: its members as global ranks; empty when the recorder does not say.
        enqueued: sequence number of the newest collective that this rank has entered.
        completed: of the newest that has ended on this rank.
        newest: name of the newest one, such as `all_reduce`, with its sizes; empty when unknown.
    """

    group: str
    ranks: tuple[Rank, ...] = ()
    enqueued: int
    completed: int
    newest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of Python on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile:
    """Bulk evidence that stays in the run directory; the ledger only points at it.

    Attributes:
        path: relative to the run directory.
        digest: `blake2b-128:` and hexadecimal digits.
    """

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank in one snapshot.

    Attributes:
        process: the kernel's word on it.
        exit_code: how it ended, negative for a signal; None while it lives.
        phase, step: from the progress page, which is readable even when the process is frozen or dead.
        silence_s: seconds since its page last changed.
        cpu_s: CPU seconds it has used so far; two snapshots tell spinning from waiting. None when unknown.
        answers: whether the worker server answered, which needs no Python; None when there is no server.
        gil_free: whether the server could run Python code; None when not asked.
        stack: frames of the main thread, innermost first; empty when none could be had.
        groups: progress in each process group; empty when there is no recorder.
        trace: its operations, from the ring; None without one.
        memberships: member lists that traces name and no earlier summary of the same host and snapshot has brought.
        missing: sources that gave nothing, each with why: itself evidence.
    """

    rank: Rank
    host: HostId
    process: ProcessState
    exit_code: int | None = None
    phase: Phase
    step: int
    silence_s: float
    cpu_s: float | None = None
    answers: bool | None = None
    gil_free: bool | None = None
    stack: tuple[Frame, ...] = ()
    groups: tuple[GroupCounts, ...] = ()
    trace: RankTrace | None = None
    memberships: tuple[Membership, ...] = ()
    missing: tuple[str, ...] = ()
