"""The job's state machine: membership, attempts, failures, the recovery ladder. One door, `handle`.

    WAITING --all hosts--> RUNNING --exit or hang--> JUDGING --verdict--> STOPPING --all stopped--> PAUSING --> RUNNING
                                                                             '--no further attempt--> OVER

Evidence comes before any kill: a failure is judged when every host has written its snapshot. Who is at fault is
`blame`'s (ends) and `hang`'s (silences) question, whether to go on is `restarts`'.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from everstep.domain.causes import Cause
from everstep.domain.commands import (
    Command,
    DismissSuspicion,
    FinishJob,
    HostShare,
    InjectFault,
    RecordVerdict,
    ReplaceHost,
    Rung,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointDelayed,
    CheckpointFailed,
    CheckpointMirrored,
    CheckpointRefused,
    CheckpointRestored,
    CheckpointSaved,
    Event,
    EvidenceCollected,
    FaultInjected,
    HostJoined,
    HostLost,
    PhaseChanged,
    RunResumed,
    RunStarted,
    StallEnded,
    StallSuspected,
    StartFailed,
    StepsFinished,
    StopRequested,
    StoreLost,
    Ticked,
    WorkerExited,
    WorkerReady,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.blame import Blame, blame
from everstep.policy.inquiry import Inquiry, InquiryConfig
from everstep.policy.patience import Patience
from everstep.policy.restarts import Decision, RestartBudget, RestartConfig
from everstep.policy.second_opinion import opinion_on_ends
from everstep.policy.spares import HostPool, SpareConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Attributes:
    grace_s: what healthy workers get between SIGTERM and SIGKILL when an attempt is torn down.
    stop_grace_s: the same when the job is ended from outside.
    settle_s: how long to wait for a better suspect when only victims have ended.
    slow_factor: a dismissed suspicion stretches the deadline by this.
    unsure_s, excused_s, ending_s: see `patience.Patience`.
    steps_before_fault: timed faults wait until an attempt has finished so many steps.
    """

    grace_s: float = 3.0
    stop_grace_s: float = 30.0
    settle_s: float = 1.0
    slow_factor: float = 2.0
    unsure_s: float = 15.0
    excused_s: float = 300.0
    ending_s: float = 1800.0
    steps_before_fault: int = 8
    restarts: RestartConfig = field(default_factory=RestartConfig)
    inquiry: InquiryConfig = field(default_factory=InquiryConfig)
    spares: SpareConfig = field(default_factory=SpareConfig)


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    JUDGING = auto()
    STOPPING = auto()
    PAUSING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """What follows once all workers have stopped: the next attempt, or the end with an exit code."""

    decision: Decision
    summary: str
    detail: str = ""


class Job:
    """The machine. Replaying a ledger's events through a new one gives the ledger's commands again."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._state = _State.WAITING
        self._budget = RestartBudget(config.restarts)
        self._patience = Patience(unsure_s=config.unsure_s, excused_s=config.excused_s, ending_s=config.ending_s)
        self._world_size = 0
        self._pool = HostPool(config.spares, need=0)
        self._hosts: set[HostId] = set()
        """The agents of the present attempt: all of them are asked, and waited for."""
        self._faults: dict[int, PlannedFault] = {}
        self._attempt = Attempt(0)
        self._shares: tuple[HostShare, ...] = ()
        self._why = "first start"
        self._rung: Rung | None = None
        self._reset_attempt(0.0)
        self._ending: _Ending | None = None
        self._start_at_s = 0.0
        self._waiting_since_s = 0.0
        self._best_step = 0

    def _reset_attempt(self, at_s: float) -> None:
        self._exits: list[WorkerExited] = []
        self._suspected: dict[HostId, StallSuspected] = {}
        self._inquiry: Inquiry | None = None
        self._incidents = 0
        self._first_sign_s = at_s
        self._progress_s = at_s
        self._step = 0
        self._first_step: int | None = None
        self._steps_in_attempt = 0
        self._stopped: set[HostId] = set()

    @property
    def over(self) -> bool:
        return self._state is _State.OVER

    @property
    def attempt(self) -> Attempt:
        return self._attempt

    @property
    def wants_ticks(self) -> bool:
        """Whether something waits for time to pass."""
        return self._state in (_State.JUDGING, _State.PAUSING) or self._inquiry is not None or bool(self._faults)

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take one event, give the commands that follow from it."""
        match event:
            case RunStarted():
                self._world_size = event.world_size
                self._pool = HostPool(self._config.spares, need=event.host_count)
                self._faults = {fault.number: fault for fault in event.faults}
                return ()
            case RunResumed():
                return self._resume(event)
            case HostJoined():
                return self._join(event)
            case HostLost():
                return self._lose(event)
            case StopRequested():
                return self._stop_for_good(event)
            case Ticked():
                return self._tick(event.at_s)
        if event.attempt != self._attempt:
            return ()  # late news of an old attempt
        match event:
            case WorkersStarted():
                self._progress_s = event.at_s
                return ()
            case StartFailed():
                return self._start_failed(event)
            case PhaseChanged():
                self._progress_s = max(self._progress_s, event.at_s)
                return ()
            case StepsFinished():
                return self._take_steps(event)
            case WorkerReady() | CheckpointSaved() | CheckpointRestored() | CheckpointRefused() | CheckpointFailed():
                return ()
            case CheckpointDelayed() | CheckpointMirrored():
                return ()
            case WorkerExited():
                return self._take_exit(event)
            case StoreLost() if self._state is not _State.RUNNING:
                return ()  # its clients' ends are being judged, or all are being stopped
            case StoreLost():
                cause = Cause(component="Rendezvous Store", category="Software")
                return self._fail_simply(Trouble.STORE_LOST, event.host, event.reason, cause, event.at_s)
            case StallSuspected():
                return self._suspect(event)
            case StallEnded() if self._inquiry is None:
                self._suspected.pop(event.host, None)  # the other hosts are as silent as before
                return ()
            case StallEnded():
                return self._dismiss(event.at_s, "it moves again", factor=1.0)
            case EvidenceCollected():
                if self._inquiry is not None:
                    self._inquiry.take(event)
                return self._judge(event.at_s)
            case WorkersStopped():
                return self._take_stopped(event)
            case FaultInjected():
                self._faults.pop(event.fault.number, None)
                return ()
        assert_never(event)

    # --- membership and starts

    def _join(self, event: HostJoined) -> tuple[Command, ...]:
        self._pool.join(event.host, event.members or (event.host,), event.worker_count, place=event.place)
        return self._start(event.at_s) if self._state is _State.WAITING else ()

    def _start(self, at_s: float) -> tuple[Command, ...]:
        """Start an attempt, or wait for the hosts that it takes."""
        if not self._pool.fill(at_s):
            self._await_hosts(at_s)
            return ()
        self._shares = self._pool.shares()
        self._hosts = {share.host for share in self._shares}
        self._world_size = sum(share.count for share in self._shares)
        self._attempt = Attempt(self._attempt + 1)
        self._state = _State.RUNNING
        self._reset_attempt(at_s)
        replaced = tuple(
            ReplaceHost(at_s=at_s, attempt=self._attempt, host=one.host, spare=one.spare)
            for one in self._pool.replacements
        )
        if replaced and self._rung is Rung.RESTART_ALL:
            self._rung = Rung.EXCLUDE_HOST
        return (
            *replaced,
            StartWorkers(
                at_s=at_s,
                attempt=self._attempt,
                shares=self._shares,
                world_size=self._world_size,
                restart_count=self._attempt - 1,
                faults=tuple(fault for fault in self._faults.values() if fault.step is not None),
                rung=self._rung,
                why="; ".join((self._why, *(f"{one.spare} is used for {one.host}" for one in replaced))),
            ),
        )

    def _await_hosts(self, at_s: float) -> None:
        if self._state is not _State.WAITING:
            self._waiting_since_s = at_s
        self._state = _State.WAITING

    def _resume(self, event: RunResumed) -> tuple[Command, ...]:
        self._state = _State.WAITING
        self._waiting_since_s = event.at_s
        self._hosts.clear()
        self._pool.clear()
        self._inquiry = None
        self._suspected.clear()
        self._ending = None
        self._budget = RestartBudget(self._config.restarts)
        self._budget.saw_step(self._best_step)
        self._rung = None
        self._why = f"the run is continued after {event.gap_s:.1f} s without a coordinator"
        return ()

    def _lose(self, event: HostLost) -> tuple[Command, ...]:
        self._hosts.discard(event.host)
        was_in_use = self._pool.lose(event.host)
        if self._state is _State.OVER:
            return ()
        if not event.defect and (self._pool.is_enough or self._config.spares.waits_for_hosts):
            return self._go_on_without(event, was_in_use=was_in_use)
        decision = Decision(rung=Rung.GIVE_BACK, exit_code=ExitCode.RETRY_ELSEWHERE, why="too few hosts are left")
        if event.defect:
            decision = Decision(rung=Rung.ASK_A_PERSON, exit_code=ExitCode.INTERNAL, why="please report this")
        if not self._end_is_decided:
            self._ending = _Ending(decision=decision, summary=f"host {event.host} is lost: {event.reason}")
        if self._state in (_State.WAITING, _State.PAUSING) or not self._hosts:
            return self._finish(event.at_s)
        return self._stop_workers(event.at_s, kill_ranks=(), grace_s=self._config.grace_s)

    def _go_on_without(self, event: HostLost, *, was_in_use: bool) -> tuple[Command, ...]:
        """A host is lost, and spares are there or will come.

        The state changes here and not at a tick: a tick without a command is not in the ledger.
        """
        if self._state is _State.PAUSING and not self._pool.is_enough:
            self._await_hosts(event.at_s)
        if self._state is _State.STOPPING:
            return self._when_all_have_stopped(event.at_s)
        if not was_in_use:
            return ()
        cause = Cause(component="Lost Host", category="Host")
        return self._fail_simply(Trouble.HOST_LOST, event.host, event.reason, cause, event.at_s)

    def _wait_no_longer(self, at_s: float) -> tuple[Command, ...]:
        decision = Decision(rung=Rung.GIVE_BACK, exit_code=ExitCode.RETRY_ELSEWHERE, why="too few hosts have come")
        summary = f"only {self._pool.lack} after {self._config.spares.wait_s:g} s"
        self._ending = _Ending(decision=decision, summary=summary)
        return self._finish(at_s)

    def _start_failed(self, event: StartFailed) -> tuple[Command, ...]:
        if not event.final:
            cause = Cause(component="Start of Workers", category="Host")
            return self._fail_simply(Trouble.START_FAILED, event.host, event.reason, cause, event.at_s)
        if self._end_is_decided:
            return ()  # another host has said so already
        decision = Decision(rung=Rung.ASK_A_PERSON, exit_code=ExitCode.USAGE, why="nothing was started")
        self._ending = _Ending(decision=decision, summary=event.reason)
        if self._state not in (_State.RUNNING, _State.JUDGING):
            return ()  # all are being stopped, since a host could not start for want of this one
        return self._stop_workers(event.at_s, kill_ranks=(), grace_s=0.0)

    # --- progress

    def _take_steps(self, event: StepsFinished) -> tuple[Command, ...]:
        self._progress_s = max(self._progress_s, event.ended_at_s[-1])
        first = event.first_step if self._first_step is None else min(self._first_step, event.first_step)
        self._first_step = first
        self._step = max(self._step, event.last_step)
        self._steps_in_attempt = self._step - first + 1
        self._best_step = max(self._best_step, event.last_step)
        self._budget.saw_step(event.last_step)
        self._patience.saw_step(event.ended_at_s[0])
        return ()

    def _tick(self, at_s: float) -> tuple[Command, ...]:
        if self._state is _State.PAUSING and at_s >= self._start_at_s:
            return self._start(at_s)
        if self._state is _State.WAITING and at_s >= self._waiting_since_s + self._config.spares.wait_s:
            return self._wait_no_longer(at_s)
        if self._inquiry is not None:
            if self._inquiry.due(at_s):
                return self._inquiry.collect(at_s)
            return self._judge(at_s)
        return self._inject_timed_fault(at_s)

    def _inject_timed_fault(self, at_s: float) -> tuple[Command, ...]:
        if self._state is not _State.RUNNING or self._steps_in_attempt < self._config.steps_before_fault:
            return ()
        due = (
            f
            for f in self._faults.values()
            if f.after_s is not None and f.after_s <= at_s and f.rank < self._world_size
        )
        fault = min(due, key=lambda fault: fault.number, default=None)
        if fault is None:
            return ()
        del self._faults[fault.number]
        host = next(s.host for s in self._shares if s.first_rank <= fault.rank < s.first_rank + s.count)
        return (InjectFault(at_s=at_s, attempt=self._attempt, host=host, fault=fault),)

    # --- signs of trouble

    def _take_exit(self, event: WorkerExited) -> tuple[Command, ...]:
        self._exits.append(event)
        if self._state not in (_State.RUNNING, _State.JUDGING):
            return ()
        if len(self._exits) == self._world_size and all(end.exit_code == 0 for end in self._exits):
            return self._done(event.at_s)
        if self._state is _State.JUDGING:
            return self._judge(event.at_s)
        if self._blame() is None:
            return ()
        self._state = _State.JUDGING
        self._first_sign_s = event.at_s
        return self._open_inquiry(event.at_s, snapshot_count=1)

    def _suspect(self, event: StallSuspected) -> tuple[Command, ...]:
        if self._state is not _State.RUNNING or self._inquiry is not None:
            return ()
        self._suspected[event.host] = event
        if len(self._suspected) < len(self._hosts):
            return ()
        self._first_sign_s = event.at_s
        return self._open_inquiry(event.at_s, snapshot_count=2)

    def _open_inquiry(self, at_s: float, *, snapshot_count: int) -> tuple[Command, ...]:
        self._incidents += 1
        self._inquiry = Inquiry(
            incident=IncidentId(f"a{self._attempt:04d}-{self._incidents}"),
            attempt=self._attempt,
            hosts=sorted(self._hosts),
            snapshot_count=snapshot_count,
            config=self._config.inquiry,
        )
        return self._inquiry.collect(at_s)

    def _dismiss(self, at_s: float, reason: str, *, factor: float) -> tuple[Command, ...]:
        inquiry, hosts = self._inquiry, sorted(self._suspected)
        if self._state is not _State.RUNNING or inquiry is None:
            self._suspected.clear()
            return ()
        self._inquiry = None
        self._suspected.clear()
        return tuple(
            DismissSuspicion(
                at_s=at_s,
                attempt=self._attempt,
                host=host,
                incident=inquiry.incident,
                reason=reason,
                deadline_factor=factor,
            )
            for host in hosts
        )

    # --- judgement

    def _blame(self) -> Blame | None:
        return blame(self._exits, world_size=self._world_size)

    def _judge(self, at_s: float) -> tuple[Command, ...]:
        if self._inquiry is None or not self._inquiry.complete(at_s):
            return ()
        if self._state is _State.JUDGING:
            return self._judge_exits(at_s)
        if self._state is _State.RUNNING:
            return self._judge_silence(at_s)
        return ()

    def _judge_exits(self, at_s: float) -> tuple[Command, ...]:
        found = self._blame()
        assert found is not None
        assert self._inquiry is not None
        found = opinion_on_ends(found, self._exits, self._inquiry.summaries(1))
        if not found.certain and at_s < self._first_sign_s + self._config.settle_s:
            return ()
        end = found.culprit
        return self._fail(
            found.verdict, at_s, kill_ranks=(), planned=found.planned, detail=end.traceback or end.last_lines
        )

    def _judge_silence(self, at_s: float) -> tuple[Command, ...]:
        assert self._inquiry is not None
        finding = self._inquiry.finding()
        verdict = finding.verdict
        since_s = min(suspicion.since_s for suspicion in self._suspected.values())
        if verdict.trouble is Trouble.SLOW:
            return self._dismiss(at_s, verdict.reason, factor=self._config.slow_factor)
        borne_s = self._patience.with_finding(
            finding, repeats=self._budget.repeats(verdict, steps=self._steps_in_attempt)
        )
        if at_s - since_s < borne_s:
            self._patience.bear(verdict.signature, since_s)
            reason = f"{verdict.reason} This is borne for up to {borne_s:.0f} s."
            return self._dismiss(at_s, reason, factor=self._config.slow_factor)
        return self._fail(verdict, at_s, kill_ranks=verdict.ranks, detail=verdict.where)

    def _fail_simply(
        self, trouble: Trouble, host: HostId, reason: str, cause: Cause, at_s: float
    ) -> tuple[Command, ...]:
        if self._state not in (_State.RUNNING, _State.JUDGING):
            return ()
        self._first_sign_s = at_s
        self._incidents += 1
        verdict = Verdict(
            trouble=trouble, ranks=(), hosts=(host,), reason=f"{reason}.", cause=cause, signature=f"{trouble} {reason}"
        )
        return self._fail(verdict, at_s, kill_ranks=())

    def _fail(
        self,
        verdict: Verdict,
        at_s: float,
        *,
        kill_ranks: tuple[Rank, ...],
        planned: bool = False,
        detail: str = "",
    ) -> tuple[Command, ...]:
        self._patience.forget_borne()
        decision = self._budget.decide(verdict, planned=planned, at_s=at_s, steps=self._steps_in_attempt)
        if not planned:
            decision = self._exclude_suspect(verdict, decision, at_s)
        self._ending = _Ending(decision=decision, summary=f"{verdict.reason} {decision.why}".strip(), detail=detail)
        record = RecordVerdict(
            at_s=at_s,
            attempt=self._attempt,
            incident=IncidentId(f"a{self._attempt:04d}-{self._incidents}"),
            verdict=verdict,
            since_s=min(self._progress_s, self._first_sign_s),
            detected_at_s=self._first_sign_s,
            step=self._step,
            planned=planned,
        )
        return (record, *self._stop_workers(at_s, kill_ranks=kill_ranks, grace_s=self._config.grace_s))

    def _exclude_suspect(self, verdict: Verdict, decision: Decision, at_s: float) -> Decision:
        """Rung 3, when one host fails again and again, or would end the job, and a better one is idle."""
        if len(verdict.hosts) != 1 or verdict.trouble in (Trouble.SCRIPT_ERROR, Trouble.DISK_FULL):
            return decision
        host = verdict.hosts[0]
        failures = self._pool.failed(host, at_s)
        gives_up = decision.exit_code is ExitCode.RETRY_ELSEWHERE
        if decision.exit_code is not None and not gives_up:
            return decision
        if not (gives_up or self._pool.is_lemon(host, at_s)) or not self._pool.exclude(host, at_s):
            return decision
        times = "once" if failures == 1 else f"{failures} times"
        days = self._config.spares.lemon_window_s / 86_400
        why = f"{host} has failed {times} within {days:.0f} days: a spare takes its place"
        return Decision(rung=Rung.EXCLUDE_HOST, delay_s=decision.delay_s, why=why)

    # --- ends

    def _stop_workers(self, at_s: float, *, kill_ranks: tuple[Rank, ...], grace_s: float) -> tuple[Command, ...]:
        self._state = _State.STOPPING
        self._inquiry = None
        self._stopped.clear()
        return tuple(
            StopWorkers(at_s=at_s, attempt=self._attempt, host=host, kill_ranks=kill_ranks, grace_s=grace_s)
            for host in sorted(self._hosts)
        )

    def _take_stopped(self, event: WorkersStopped) -> tuple[Command, ...]:
        self._stopped.add(event.host)
        return self._when_all_have_stopped(event.at_s) if self._state is _State.STOPPING else ()

    def _when_all_have_stopped(self, at_s: float) -> tuple[Command, ...]:
        if not self._stopped >= self._hosts:
            return ()
        assert self._ending is not None
        decision = self._ending.decision
        if decision.exit_code is not None:
            return self._finish(at_s)
        if self._pool.is_enough:
            self._state = _State.PAUSING
        else:
            self._await_hosts(at_s)
        self._start_at_s = at_s + decision.delay_s
        self._rung, self._why = decision.rung, decision.why
        return self._start(at_s) if decision.delay_s == 0 else ()

    def _done(self, at_s: float) -> tuple[Command, ...]:
        decision = Decision(rung=Rung.RESTART_ALL, exit_code=ExitCode.DONE, why="")
        steps = f" after {self._step} steps" if self._step else ""
        attempts = "" if self._attempt == 1 else f" in attempt {self._attempt}"
        self._ending = _Ending(
            decision=decision, summary=f"all {self._world_size} ranks have ended well{steps}{attempts}"
        )
        return self._stop_workers(at_s, kill_ranks=(), grace_s=self._config.grace_s)

    @property
    def _end_is_decided(self) -> bool:
        """Whether the job is on its way out for a reason that what happens meanwhile does not change."""
        if self._state is not _State.STOPPING or self._ending is None:
            return self._state is _State.OVER
        return self._ending.decision.exit_code is not None

    def _stop_for_good(self, event: StopRequested) -> tuple[Command, ...]:
        if self._end_is_decided:
            return ()
        decision = Decision(rung=Rung.GIVE_BACK, exit_code=ExitCode.PREEMPTED, why="")
        self._ending = _Ending(decision=decision, summary=f"stopped by {event.by} after step {self._step}")
        if self._state in (_State.WAITING, _State.PAUSING):
            return self._finish(event.at_s)
        if self._state is _State.STOPPING:
            return ()
        return self._stop_workers(event.at_s, kill_ranks=(), grace_s=self._config.stop_grace_s)

    def _finish(self, at_s: float) -> tuple[Command, ...]:
        assert self._ending is not None
        self._state = _State.OVER
        code = self._ending.decision.exit_code
        assert code is not None
        return (
            FinishJob(
                at_s=at_s,
                exit_code=code,
                rung=None if code is ExitCode.DONE else self._ending.decision.rung,
                summary=self._ending.summary,
                detail=self._ending.detail,
            ),
        )
