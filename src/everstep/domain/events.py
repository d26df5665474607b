"""Everything that can happen to a job, in the past tense. One JSON line of the ledger each.

`at_s` is seconds on the coordinator's monotonic clock since the run began, continued over restarts of the coordinator.
"""

from dataclasses import dataclass
from typing import ClassVar

from everstep.domain.evidence import EvidenceFile, RankSummary
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The first entry of a ledger. `faults` is not empty when the injector is on."""

    at_s: float
    run: RunId
    everstep: str
    command: tuple[str, ...]
    world_size: int
    host_count: int
    faults: tuple[PlannedFault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """A new coordinator took over the ledger of one that died. `gap_s` is the wall time in which none was there."""

    at_s: float
    gap_s: float
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined:
    """An agent reported for duty with places for `worker_count` workers.

    Attributes:
        members: the hosts that this agent speaks for, with equal parts of the places; empty: itself alone. An agent may
            join again with more members, which were repaired.
        place: where it wants to stand among the agents, the lowest first; those without one come last, by name.
    """

    at_s: float
    host: HostId
    worker_count: int
    address: str
    members: tuple[HostId, ...] = ()
    place: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost:
    """An agent is gone, or ended with an error of its own. `defect` means that the error is everstep's.

    `host` may also be a member of an agent that is still there.
    """

    at_s: float
    host: HostId
    reason: str
    defect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted:
    """A host has started its workers. `pids` are in the order of the ranks that the command gave.

    Attributes:
        warm: forked from a standby that had everything imported.
        spawn_s: seconds from the command to the last process.
    """

    at_s: float
    attempt: Attempt
    host: HostId
    pids: tuple[int, ...]
    warm: bool
    spawn_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """A host could not start its workers. `final` means that trying again is useless: a flag or path is wrong."""

    at_s: float
    attempt: Attempt
    host: HostId
    reason: str
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged:
    """The host's ranks as a group entered another phase (`domain.phases.phase_of_group`)."""

    at_s: float
    attempt: Attempt
    host: HostId
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsFinished:
    """Every rank of the host has finished these steps.

    Attributes:
        first_step: number of the first of them; the others follow without a gap.
        ended_at_s: when each ended on its slowest rank; ascending, one per step.
        loss: the newest loss that rank 0 logged; None when the script logs none.
    """

    at_s: float
    attempt: Attempt
    host: HostId
    first_step: int
    ended_at_s: tuple[float, ...]
    loss: float | None = None

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.ended_at_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """Parts of one rank's start, in seconds since the order to start it: what recovery is measured by.

    Attributes:
        part: `imported`, `group_ready`, `attached`, `restored`, `rehearsed` or `first_step`.
    """

    at_s: float
    attempt: Attempt
    rank: Rank
    part: str
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete and durable. `path` is relative to the run directory where it lies inside it."""

    at_s: float
    attempt: Attempt
    step: int
    path: str
    size_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRestored:
    at_s: float
    attempt: Attempt
    step: int
    path: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRefused:
    """A checkpoint was damaged or incomplete and not used; `reason` names the file, its size and what was expected."""

    at_s: float
    attempt: Attempt
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A save did not work out; training goes on, and older checkpoints are untouched."""

    at_s: float
    attempt: Attempt
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDelayed:
    """A step is not durable yet because storage, or the mirror, does not answer or refuses.

    Attributes:
        attempt: 0 where it is the mirror, which knows of none.
        step: the one that waits.
        waited_s: for how long so far.
    """

    at_s: float
    attempt: Attempt
    step: int
    waited_s: float
    reason: str

    @property
    def sentence(self) -> str:
        where = "durable" if self.attempt else "in the mirror"
        return f"step {self.step} is not {where} yet: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMirrored:
    """A checkpoint is complete in the mirror. `url` is its folder there; `attempt` is 0: the mirror knows of none."""

    at_s: float
    attempt: Attempt
    step: int
    url: str
    size_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker process ended.

    Attributes:
        exit_code: as the shell knows it, negative for a signal.
        phase, step: where its progress page stood.
        error_type, error_message, error_where: the exception that left the script; empty when none did.
        error_at_s: when it left, which may be well before the exit; None when none did.
        traceback: the script's own, without everstep's frames.
        last_lines: the end of its log.
        oom_killed: whether the kernel's memory killer acted on this host meanwhile.
    """

    at_s: float
    attempt: Attempt
    host: HostId
    rank: Rank
    pid: int
    exit_code: int
    phase: Phase
    step: int
    error_type: str = ""
    error_message: str = ""
    error_where: str = ""
    error_at_s: float | None = None
    traceback: str = ""
    last_lines: str = ""
    oom_killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost:
    """The process that holds the attempt's rendezvous store ended."""

    at_s: float
    attempt: Attempt
    host: HostId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSuspected:
    """No rank of the host has made progress for longer than the deadline of its phase.

    Attributes:
        since_s: when the last rank's page last changed.
        deadline_s: what was allowed, and `learned_from` what it was learned from.
    """

    at_s: float
    attempt: Attempt
    host: HostId
    phase: Phase
    since_s: float
    deadline_s: float
    learned_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StallEnded:
    """A host under suspicion moved again."""

    at_s: float
    attempt: Attempt
    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceCollected:
    """A host's answer to CollectEvidence: everything is on disk now.

    Attributes:
        summaries: one per rank of the host.
        files: what was written.
        took_s: seconds it took.
    """

    at_s: float
    attempt: Attempt
    host: HostId
    incident: IncidentId
    snapshot: int
    summaries: tuple[RankSummary, ...]
    files: tuple[EvidenceFile, ...]
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    """No worker of the attempt lives on the host any more. `killed` had to be killed after the grace."""

    at_s: float
    attempt: Attempt
    host: HostId
    killed: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    at_s: float
    attempt: Attempt
    fault: PlannedFault
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Someone wants the job to end: `SIGTERM`, `SIGINT`, or a caller's word."""

    at_s: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time went by. In the ledger only when it led to a command."""

    at_s: float
    unrecorded: ClassVar[bool] = True


Event = (
    RunStarted
    | RunResumed
    | HostJoined
    | HostLost
    | WorkersStarted
    | StartFailed
    | PhaseChanged
    | StepsFinished
    | WorkerReady
    | CheckpointSaved
    | CheckpointRestored
    | CheckpointRefused
    | CheckpointFailed
    | CheckpointDelayed
    | CheckpointMirrored
    | WorkerExited
    | StoreLost
    | StallSuspected
    | StallEnded
    | EvidenceCollected
    | WorkersStopped
    | FaultInjected
    | StopRequested
    | Ticked
)
