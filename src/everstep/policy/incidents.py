"""The incidents of a run, folded from its ledger: what broke, how long each part of the recovery took, its evidence.

What an incident cost comes from the account (`policy.accounting`), so the two never disagree. It reads no files.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.domain.causes import LLAMA3, Cause
from everstep.domain.commands import (
    Command,
    DismissSuspicion,
    FinishJob,
    RecordVerdict,
    Rung,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.events import (
    CheckpointDelayed,
    CheckpointFailed,
    CheckpointRefused,
    CheckpointRestored,
    Event,
    EvidenceCollected,
    FaultInjected,
    HostLost,
    RunResumed,
    StallSuspected,
    StartFailed,
    StepsFinished,
    StopRequested,
    StoreLost,
    WorkerExited,
    WorkerReady,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.evidence import EvidenceFile
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.verdicts import Verdict
from everstep.policy.accounting import Account

TIMELINE_MOMENTS_MAX = 60
"""Of each incident. On a large job thousands of ranks exit, and the first ones tell."""
EXITS_TOLD_MAX = 10
_START_PARTS = (
    ("imported", "import"),
    ("group_ready", "init"),
    ("attached", "build"),
    ("restored", "restore"),
    ("rehearsed", "rehearse"),
)
"""The parts of a start in `WorkerReady`, in their order, and what they are called here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened, as a sentence."""

    at_s: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPart:
    """A part of the time from the last progress to the next; of a start, the slowest rank counts.

    `name` is `detect`, `diagnose`, `teardown`, `wait`, `spawn`, `import`, `init` (of the process group), `build` (from
    there to `attach`), `restore`, `rehearse` or `first_step`. What nobody told is in the part after it.
    """

    name: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure and what followed. Times are on the run's clock; None where the ledger does not go that far.

    Attributes:
        since_s: the last progress before it.
        detected_at_s: the first sign.
        verdict_at_s: when the verdict was recorded.
        stopped_at_s: the last host had no worker any more.
        restarted_at_s: the next attempt was ordered, by `rung` and for the reason `why`.
        recovered_at_s: that attempt finished its first step on every rank; None when it failed before.
        lost_s: everything that it cost, replayed steps included (`Account.lost_s`).
        parts: one after the other, without a gap, from `since_s` to `recovered_at_s` or as far as it came.
        injected: the fault that the injector had caused in this attempt; None for a real failure.
    """

    id: IncidentId
    attempt: Attempt
    verdict: Verdict
    planned: bool
    step: int
    since_s: float
    detected_at_s: float
    verdict_at_s: float
    stopped_at_s: float | None
    restarted_at_s: float | None
    recovered_at_s: float | None
    rung: Rung | None
    why: str
    lost_s: float
    parts: tuple[RecoveryPart, ...]
    injected: PlannedFault | None
    evidence_files: tuple[EvidenceFile, ...]
    timeline: tuple[Moment, ...]

    @property
    def cause(self) -> Cause:
        """The row of the interruption table: what an injected fault stands for, else the verdict's own word."""
        return self.injected.cause if self.injected and self.injected.cause else self.verdict.cause

    @property
    def names_the_injected_rank(self) -> bool:
        return self.injected is not None and self.injected.rank in self.verdict.ranks

    @property
    def is_unexpected(self) -> bool:
        """Whether it counts as an interruption: a planned one does only when it was injected to stand for a cause."""
        return not self.planned or bool(self.injected and self.injected.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionRow:
    """A row of the interruption table.

    Attributes:
        share: of all counted interruptions.
        llama3_share: the share in Llama 3's published table, from its counts; None where that has no such row.
    """

    component: str
    category: str
    count: int
    share: float
    lost_s: float
    llama3_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictAccuracy:
    """How the verdicts did against the injector's plan.

    Attributes:
        injected_count: faults that were caused.
        found_count: of these, in attempts that ended in an incident.
        named_count: of these, by a verdict that names the injected rank.
    """

    injected_count: int
    found_count: int
    named_count: int


@dataclass(slots=True, kw_only=True)
class _Draft:
    """An incident while its story goes on."""

    record: RecordVerdict
    injected: PlannedFault | None
    timeline: list[Moment]
    files: list[EvidenceFile]
    stop_at_s: float | None = None
    stopped_at_s: float | None = None
    restart: StartWorkers | None = None
    recovered_at_s: float | None = None
    spawn_s: float = 0.0
    born_at_s: float = 0.0
    """When the last process of the next attempt began, in the ranks' own words; 0 without an observer."""
    ready_at_s: dict[str, float] = field(default_factory=dict)

    def tell(self, at_s: float, sentence: str) -> None:
        if len(self.timeline) < TIMELINE_MOMENTS_MAX:
            self.timeline.append(Moment(at_s=at_s, sentence=sentence))


class IncidentLog:
    """Folds events and commands; `incidents` and `accuracy` may be asked at any time."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._told: list[_Draft] = []
        """Those of the attempt that is ending or, once the next has started, recovering: the story goes on."""
        self._attempt = Attempt(0)
        self._hosts: set[HostId] = set()
        self._running: set[HostId] = set()
        self._awaited: set[HostId] = set()
        """Hosts whose first step of a recovering attempt has not been reported yet."""
        self._first_step_at_s = 0.0
        self._before: list[Moment] = []
        """What happened in this attempt before a verdict, newest last; it opens the timeline of the next incident."""
        self._files: dict[IncidentId, list[EvidenceFile]] = {}
        self._due: list[PlannedFault] = []
        """Injected in this attempt and not yet matched to an incident."""
        self._injected_count = 0
        self._exit_count = 0

    def handle(self, body: Event | Command) -> None:
        """Take the next entry of the ledger."""
        match body:
            case StepsFinished():
                if self._awaited:
                    self._recover(body)
            case StartWorkers():
                self._restart(body)
            case RecordVerdict():
                self._open(body)
            case StopWorkers() if body.attempt == self._attempt:
                for draft in self._told:
                    draft.stop_at_s = body.at_s if draft.stop_at_s is None else draft.stop_at_s
            case WorkersStopped() if body.attempt == self._attempt:
                if body.killed:
                    self._tell(body.at_s, f"{_ranks(body.killed)} on {body.host} had to be killed")
                self._leave(body.host, body.at_s)
            case HostLost():
                self._tell(body.at_s, f"host {body.host} was lost: {body.reason}")
                self._leave(body.host, body.at_s)
            case WorkersStarted() if body.attempt == self._attempt:
                for draft in self._recovering():
                    draft.spawn_s = max(draft.spawn_s, body.spawn_s)
            case WorkerReady() if body.attempt == self._attempt:
                for draft in self._recovering():
                    draft.born_at_s = max(draft.born_at_s, body.at_s - body.after_s)
                    draft.ready_at_s[body.part] = max(draft.ready_at_s.get(body.part, 0.0), body.at_s)
            case FaultInjected():
                self._injected_count += 1
                self._due.append(body.fault)
                self._tell(body.at_s, f"injected: {body.fault.kind} on rank {body.fault.rank} after step {body.step}")
            case EvidenceCollected():
                self._keep_evidence(body)
            case WorkerExited():
                self._tell_exit(body)
            case _:
                if sentence := _sentence(body):
                    self._tell(body.at_s, sentence)

    def incidents(self, account: Account) -> tuple[Incident, ...]:
        """All incidents so far, in order, with their cost from the account of the same run."""
        return tuple(_incident(draft, account) for draft in self._drafts)

    def accuracy(self) -> VerdictAccuracy | None:
        """None when nothing was injected."""
        if not self._injected_count:
            return None
        found = [draft for draft in self._drafts if draft.injected is not None]
        named = [d for d in found if d.injected is not None and d.injected.rank in d.record.verdict.ranks]
        return VerdictAccuracy(injected_count=self._injected_count, found_count=len(found), named_count=len(named))

    def _recovering(self) -> list[_Draft]:
        return [draft for draft in self._told if draft.restart is not None]

    def _tell(self, at_s: float, sentence: str) -> None:
        for draft in self._told:
            draft.tell(at_s, sentence)
        if not self._told or self._awaited:
            self._before.append(Moment(at_s=at_s, sentence=sentence))
            del self._before[: -TIMELINE_MOMENTS_MAX // 2]

    def _tell_exit(self, body: WorkerExited) -> None:
        """The first exits of an attempt; those after the order to stop say nothing."""
        self._exit_count += 1
        was_told_to = any(draft.stop_at_s is not None and draft.restart is None for draft in self._told)
        if body.attempt == self._attempt and not was_told_to and self._exit_count <= EXITS_TOLD_MAX:
            self._tell(body.at_s, _exit_sentence(body))

    def _open(self, body: RecordVerdict) -> None:
        self._told = [draft for draft in self._told if draft.restart is None]  # what recovered until now did not
        injected = next((fault for fault in self._due if fault.rank in body.verdict.ranks), None)
        if injected is None and self._due:
            injected = self._due[0]
        if injected is not None:
            self._due.remove(injected)
        draft = _Draft(
            record=body, injected=injected, timeline=list(self._before), files=self._files.setdefault(body.incident, [])
        )
        draft.tell(body.at_s, f"verdict: {body.verdict.reason}")
        self._before.clear()
        self._awaited.clear()
        self._drafts.append(draft)
        self._told.append(draft)

    def _keep_evidence(self, body: EvidenceCollected) -> None:
        self._files.setdefault(body.incident, []).extend(body.files)
        self._tell(
            body.at_s,
            f"evidence of {len(body.summaries)} ranks on {body.host} (snapshot {body.snapshot}) in {body.took_s:.1f} s",
        )

    def _leave(self, host: HostId, at_s: float) -> None:
        if host in self._running:
            self._running.discard(host)
            if not self._running:
                for draft in self._told:
                    draft.stopped_at_s = at_s if draft.stopped_at_s is None else draft.stopped_at_s
                self._tell(at_s, "no worker of the attempt lives any more")

    def _restart(self, body: StartWorkers) -> None:
        for draft in self._told:
            if draft.restart is None:
                draft.restart = body
        self._tell(body.at_s, f"attempt {body.attempt} is started" + (f": {body.why}" if body.why else ""))
        self._attempt = body.attempt
        self._hosts = {share.host for share in body.shares}
        self._running = set(self._hosts)
        self._awaited = set(self._hosts) if self._told else set()
        self._first_step_at_s, self._exit_count = 0.0, 0
        self._before.clear()
        self._due.clear()

    def _recover(self, body: StepsFinished) -> None:
        """The first step of a recovering attempt on one host; with the last host the job has recovered."""
        if body.attempt != self._attempt or body.host not in self._awaited:
            return
        self._awaited.discard(body.host)
        self._first_step_at_s = max(self._first_step_at_s, body.ended_at_s[0])
        if self._awaited:
            return
        for draft in self._told:
            draft.recovered_at_s = self._first_step_at_s
        self._tell(self._first_step_at_s, f"step {body.first_step} is finished: the job has recovered")
        self._told.clear()
        self._before.clear()


def interruption_table(incidents: Iterable[Incident]) -> tuple[InterruptionRow, ...]:
    """Unexpected interruptions by cause, most frequent first; an injected fault counts under what it stands for."""
    counts: Counter[Cause] = Counter()
    lost_s: dict[Cause, float] = {}
    for incident in incidents:
        if incident.is_unexpected:
            counts[incident.cause] += 1
            lost_s[incident.cause] = lost_s.get(incident.cause, 0.0) + incident.lost_s
    llama3 = {row.cause: row.share for row in LLAMA3}
    rows = [
        InterruptionRow(
            component=cause.component,
            category=cause.category,
            count=count,
            share=count / counts.total(),
            lost_s=lost_s[cause],
            llama3_share=llama3.get(cause),
        )
        for cause, count in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.count, -row.lost_s, row.component)))


def _incident(draft: _Draft, account: Account) -> Incident:
    record, restart = draft.record, draft.restart
    return Incident(
        id=record.incident,
        attempt=record.attempt,
        verdict=record.verdict,
        planned=record.planned,
        step=record.step,
        since_s=record.since_s,
        detected_at_s=record.detected_at_s,
        verdict_at_s=record.at_s,
        stopped_at_s=draft.stopped_at_s,
        restarted_at_s=None if restart is None else restart.at_s,
        recovered_at_s=draft.recovered_at_s,
        rung=None if restart is None else restart.rung,
        why="" if restart is None else restart.why,
        lost_s=account.lost_s(record.incident),
        parts=_parts(draft),
        injected=draft.injected,
        evidence_files=tuple(draft.files),
        timeline=tuple(sorted(draft.timeline, key=lambda moment: moment.at_s)),
    )


def _parts(draft: _Draft) -> tuple[RecoveryPart, ...]:
    """The boundaries that are known, in order, as parts along one cursor."""
    ends: list[tuple[str, float | None]] = [
        ("detect", draft.record.detected_at_s),
        ("diagnose", draft.stop_at_s),
        ("teardown", draft.stopped_at_s),
        ("wait", None if draft.restart is None else draft.restart.at_s),
    ]
    if draft.restart is not None:
        ends.append(("spawn", draft.born_at_s or draft.restart.at_s + draft.spawn_s))
        ends += [(name, draft.ready_at_s[part]) for part, name in _START_PARTS if part in draft.ready_at_s]
        ends.append(("first_step", draft.recovered_at_s))
    cursor_s = draft.record.since_s
    parts = []
    for name, end_s in ends:
        if end_s is not None:
            if draft.recovered_at_s is not None:
                end_s = min(end_s, draft.recovered_at_s)  # noqa: PLW2901 - a slow rank's own word can't outlast the job's
            parts.append(RecoveryPart(name=name, duration_s=max(0.0, end_s - cursor_s)))
            cursor_s = max(cursor_s, end_s)
    return tuple(parts)


def _sentence(body: Event | Command) -> str:
    """What an entry says on a timeline; empty for those that say nothing there."""
    match body:
        case StallSuspected():
            return (
                f"no progress on {body.host} for {body.at_s - body.since_s:.1f} s while {body.phase.name.lower()}; "
                f"{body.deadline_s:.1f} s were allowed ({body.learned_from})"
            )
        case DismissSuspicion():
            return f"no hang on {body.host}: {body.reason}"
        case StoreLost():
            return f"the rendezvous store on {body.host} was lost: {body.reason}"
        case StartFailed():
            return f"{body.host} could not start its workers: {body.reason}"
        case RunResumed():
            return f"a new coordinator took over after {body.gap_s:.1f} s without one"
        case StopRequested():
            return f"a stop was requested by {body.by}"
        case CheckpointRestored():
            return f"restored step {body.step} from {body.path} in {body.duration_s:.1f} s"
        case CheckpointRefused():
            return f"checkpoint {body.path} was refused: {body.reason}"
        case CheckpointFailed():
            return f"the save of step {body.step} failed: {body.reason}"
        case CheckpointDelayed():
            return body.sentence
        case FinishJob():
            return f"the job ended: {body.summary}"
        case _:
            return ""


def _exit_sentence(body: WorkerExited) -> str:
    how = f"signal {-body.exit_code}" if body.exit_code < 0 else f"exit code {body.exit_code}"
    error = f" after {body.error_type}: {body.error_message}" if body.error_type else ""
    memory = "; the kernel's memory killer was at work" if body.oom_killed else ""
    return f"rank {body.rank} on {body.host} ended with {how} at step {body.step}{error}{memory}"


def _ranks(ranks: tuple[Rank, ...]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
