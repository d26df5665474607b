"""Everything that the policy can order. A command is in the ledger, on disk, before it is carried out."""

from dataclasses import dataclass
from enum import IntEnum

from everstep.domain.errors import ExitCode
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.verdicts import Verdict


class Rung(IntEnum):
    """The recovery ladder of DESIGN.md, from the gentlest to the last."""

    REPLACE_WORKER = 1
    RESTART_ALL = 2
    EXCLUDE_HOST = 3
    SHRINK = 4
    GIVE_BACK = 5
    ASK_A_PERSON = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """The ranks that one host gets: `count` of them from `first_rank`."""

    host: HostId
    first_rank: Rank
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Start an attempt. To every host; the first one's agent holds the attempt's fresh rendezvous store.

    Attributes:
        shares: every host of the attempt, so that each can tell its neighbours' ranks.
        faults: injected faults that are still due.
        why: the sentence that the ladder gives for this attempt.
    """

    at_s: float
    attempt: Attempt
    shares: tuple[HostShare, ...]
    world_size: int
    restart_count: int
    faults: tuple[PlannedFault, ...]
    rung: Rung | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectEvidence:
    """Take a snapshot of every rank of the host and write it to disk. Comes before anything is killed."""

    at_s: float
    attempt: Attempt
    host: HostId
    incident: IncidentId
    snapshot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordVerdict:
    """Put a verdict into the ledger: the incident exists from here on.

    Attributes:
        since_s: when the last progress was made, so that detection is the time between the two.
        detected_at_s: when the first sign came.
    """

    at_s: float
    attempt: Attempt
    incident: IncidentId
    verdict: Verdict
    since_s: float
    detected_at_s: float
    step: int
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissSuspicion:
    """Not a hang: the reason says what moved. The host goes on with a longer deadline."""

    at_s: float
    attempt: Attempt
    host: HostId
    incident: IncidentId
    reason: str
    deadline_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """End every worker of the attempt on the host: `kill_ranks` at once, the others by SIGTERM and a grace."""

    at_s: float
    attempt: Attempt
    host: HostId
    kill_ranks: tuple[Rank, ...]
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectFault:
    """Cause a fault now."""

    at_s: float
    attempt: Attempt
    host: HostId
    fault: PlannedFault


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceHost:
    """From the next attempt on, `spare` is used in the place of `host`: rung 3. Comes before that StartWorkers."""

    at_s: float
    attempt: Attempt
    host: HostId
    spare: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishJob:
    """The job is over. `summary` is the sentence shown last; `detail` the failing rank's own traceback or log."""

    at_s: float
    exit_code: ExitCode
    rung: Rung | None
    summary: str
    detail: str = ""


Command = (
    StartWorkers
    | CollectEvidence
    | RecordVerdict
    | DismissSuspicion
    | StopWorkers
    | InjectFault
    | ReplaceHost
    | FinishJob
)
HostCommand = StartWorkers | CollectEvidence | DismissSuspicion | StopWorkers | InjectFault
"""Commands that an agent carries out; the others are done by being in the ledger."""
