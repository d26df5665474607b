"""The agent's loop: one per host. Starts, watches and ends this host's workers, and tells the coordinator what it sees.

It decides nothing but when a silence is worth an inquiry (`policy.stall`), and meets the world through `ports` alone.
"""

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter

from everstep.domain.commands import (
    CollectEvidence,
    DismissSuspicion,
    HostCommand,
    InjectFault,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.errors import ConfigError, EverstepError, WorldError
from everstep.domain.events import (
    Event,
    EvidenceCollected,
    FaultInjected,
    HostJoined,
    HostLost,
    PhaseChanged,
    StallEnded,
    StallSuspected,
    StartFailed,
    StepsFinished,
    StoreLost,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, Rank
from everstep.domain.phases import Phase
from everstep.domain.progress import PageView
from everstep.policy.host_progress import FinishedStep, GroupPhase, HostProgress
from everstep.policy.stall import StallConfig, StallWatch
from everstep.ports import AgentChannel, Clock, Evidence, Exit, Pages, Workers

_at_s = attrgetter("at_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Attributes:
    host, address, worker_count, place: what this agent reports for duty.
    poll_s: how often the progress pages are read. Exits and commands wake the agent at once.
    report_s: finished steps are told at least this often, and before any other news.
    act_s, start_s: an agent that takes longer for anything, or for a start, stands still. A start may have to wait for
        memory that is brought back from other hosts.
    """

    host: HostId
    address: str
    worker_count: int
    place: int | None = None
    poll_s: float = 0.05
    report_s: float = 5.0
    act_s: float = 300.0
    start_s: float = 7200.0
    stall: StallConfig = field(default_factory=StallConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPorts:
    """The world as the agent meets it."""

    workers: Workers
    pages: Pages
    evidence: Evidence
    channel: AgentChannel
    clock: Clock


class Agent:
    """`run` is the loop; `report_for_duty` comes before its first round, `turn`."""

    def __init__(self, config: AgentConfig, ports: AgentPorts) -> None:
        self._config = config
        self._workers = ports.workers
        self._pages = ports.pages
        self._evidence = ports.evidence
        self._channel = ports.channel
        self._clock = ports.clock
        self._stall = StallWatch(config.stall)
        self._attempt = Attempt(0)
        self._running = False
        self._over = False
        self._due_s = float("inf")
        self._suspicious = False
        self._store_told = False
        self._orders: deque[HostCommand] = deque()
        self._faults: list[PlannedFault] = []
        self._progress = HostProgress(())
        self._views: dict[Rank, PageView] = {}
        self._steps: list[FinishedStep] = []
        self._changed_at_s = 0.0
        self._reported_at_s = 0.0

    def finish(self) -> None:
        """End the loop after the present round; safe from another thread."""
        self._over = True

    @property
    def stands_still(self) -> bool:
        """Whether the loop hangs in something: a disk that is gone, a console that takes nothing. For other threads."""
        return self._clock.now_s() > self._due_s

    def run(self) -> None:
        """Report for duty, then serve until `finish`. Whatever goes wrong with the agent itself is told as HostLost."""
        self.report_for_duty()
        try:
            while not self._over:
                self.turn()
                if not self._over:
                    self._workers.wait(self._config.poll_s if self._running else self._config.report_s)
        except Exception as error:  # outermost frame
            defect = not isinstance(error, EverstepError)
            reason = "".join(traceback.format_exception(error)) if defect else str(error)
            self._channel.send(HostLost(at_s=self._clock.now_s(), host=self._config.host, reason=reason, defect=defect))

    def is_called_off(self) -> bool:
        """Whether something else is wanted of this host than what it does now; what takes long asks this, in `run`."""
        self._orders.extend(self._channel.receive())
        return self._over or bool(self._orders)

    def report_for_duty(self) -> None:
        config = self._config
        self._channel.send(
            HostJoined(
                at_s=self._clock.now_s(),
                host=config.host,
                worker_count=config.worker_count,
                address=config.address,
                place=config.place,
            )
        )

    def turn(self) -> None:
        """Obey, look, tell."""
        self._may_take()
        self._orders.extend(self._channel.receive())
        while self._orders:
            self._obey(self._orders.popleft())
            self._may_take()
        if self._running:
            self._read_pages()
            self._tell_exits()
            self._watch_silence()
            self._cause_faults()

    def _may_take(self, more_s: float = 0.0) -> None:
        self._due_s = self._clock.now_s() + self._config.act_s + more_s

    # --- obeying

    def _obey(self, command: HostCommand) -> None:
        match command:
            case StartWorkers() if command.attempt > self._attempt:
                self._start(command)
            case StopWorkers(attempt=self._attempt):
                self._stop(command)
            case CollectEvidence(attempt=self._attempt):
                self._collect(command)
            case DismissSuspicion(attempt=self._attempt):
                self._suspicious = False
                self._stall.be_patient(command.deadline_factor)
            case InjectFault(attempt=self._attempt):
                self._cause(command.fault)
            case _:
                return  # an order about an old attempt

    def _start(self, command: StartWorkers) -> None:
        self._may_take(self._config.start_s)
        share = next(share for share in command.shares if share.host == self._config.host)
        if self._running:  # this host was lost and has joined again before an old order to start reached it
            self._workers.stop((), 0.0)
            self._running = False
        self._attempt = command.attempt
        self._progress = HostProgress([Rank(share.first_rank + n) for n in range(share.count)])
        self._views.clear()
        self._steps.clear()
        self._suspicious = self._store_told = False
        self._faults = list(command.faults)
        try:
            started = self._workers.start(command)
        except (ConfigError, WorldError) as problem:
            reason, final = str(problem), isinstance(problem, ConfigError)
            self._tell(
                lambda at_s: StartFailed(
                    at_s=at_s,
                    attempt=self._attempt,
                    host=self._config.host,
                    reason=reason,
                    final=final,
                )
            )
            return
        now_s = self._clock.now_s()
        self._running = True
        self._stall.begin_attempt(now_s)
        self._changed_at_s = self._reported_at_s = now_s
        self._channel.send(
            WorkersStarted(
                at_s=now_s,
                attempt=self._attempt,
                host=self._config.host,
                pids=started.pids,
                warm=started.warm,
                spawn_s=max(0.0, now_s - command.at_s),
            )
        )

    def _stop(self, command: StopWorkers) -> None:
        self._may_take(command.grace_s)
        if self._running:
            self._read_pages()
        self._flush_steps()
        killed = self._workers.stop(command.kill_ranks, command.grace_s)
        self._running = False
        self._tell(lambda at_s: WorkersStopped(at_s=at_s, attempt=self._attempt, host=self._config.host, killed=killed))

    def _collect(self, command: CollectEvidence) -> None:
        started_s = self._clock.now_s()
        summaries, files = self._evidence.collect(
            attempt=self._attempt, incident=command.incident, snapshot=command.snapshot
        )
        self._tell(
            lambda at_s: EvidenceCollected(
                at_s=at_s,
                attempt=self._attempt,
                host=self._config.host,
                incident=command.incident,
                snapshot=command.snapshot,
                summaries=tuple(summaries),
                files=tuple(files),
                took_s=at_s - started_s,
            )
        )

    def _tell(self, make: Callable[[float], Event]) -> None:
        """Send an event, after the steps that came before it."""
        self._flush_steps()
        self._channel.send(make(self._clock.now_s()))

    # --- looking

    def _read_pages(self) -> None:
        views = self._pages.views()
        self._views = {view.rank: view for view in views}
        self._changed_at_s = max((view.changed_at_s for view in views), default=self._changed_at_s)
        progress = self._progress.take([mark for view in views for mark in view.marks])
        notes = sorted(self._pages.notes(), key=_at_s)  # read after the marks: none that led to one is missing
        for item in merge(progress, notes, key=_at_s):
            self._tell_news(item)
        if self._clock.now_s() - self._reported_at_s >= self._config.report_s:
            self._flush_steps()

    def _tell_news(self, item: FinishedStep | GroupPhase | Event) -> None:
        match item:
            case FinishedStep():
                self._steps.append(item)
                self._stall.finish_step(item.at_s)
            case GroupPhase():
                self._flush_steps()
                self._stall.enter(item.phase, item.at_s)
                self._channel.send(
                    PhaseChanged(
                        at_s=item.at_s,
                        attempt=self._attempt,
                        host=self._config.host,
                        phase=item.phase,
                        step=item.step,
                    )
                )
            case _:
                self._flush_steps()
                self._channel.send(item)

    def _flush_steps(self) -> None:
        self._reported_at_s = now_s = self._clock.now_s()
        while self._steps:
            run = [self._steps.pop(0)]
            while self._steps and self._steps[0].step == run[-1].step + 1:
                run.append(self._steps.pop(0))
            loss = next((view.loss for view in self._views.values() if view.loss is not None), None)
            self._channel.send(
                StepsFinished(
                    at_s=now_s,
                    attempt=self._attempt,
                    host=self._config.host,
                    first_step=run[0].step,
                    ended_at_s=tuple(round(item.at_s, 6) for item in run),
                    loss=loss,
                )
            )

    def _tell_exits(self) -> None:
        for end in self._workers.exits():
            self._read_pages()  # the last marks that the process left behind
            view = self._views[end.rank]
            self._tell(lambda _, end=end, view=view: self._exit_event(end, view))  # type: ignore[misc]
        if (loss := self._workers.store_loss()) and not self._store_told:
            self._store_told = True
            self._tell(lambda at_s: StoreLost(at_s=at_s, attempt=self._attempt, host=self._config.host, reason=loss))

    def _exit_event(self, end: Exit, view: PageView) -> WorkerExited:
        return WorkerExited(
            at_s=end.at_s,
            attempt=self._attempt,
            host=self._config.host,
            rank=end.rank,
            pid=end.pid,
            exit_code=end.exit_code,
            phase=view.phase,
            step=view.step,
            error_type=end.error_type,
            error_message=end.error_message,
            error_where=end.error_where,
            error_at_s=end.error_at_s,
            traceback=end.traceback,
            last_lines=end.last_lines,
            oom_killed=end.oom_killed,
        )

    def _watch_silence(self) -> None:
        if all(view.phase is Phase.UNOBSERVED for view in self._views.values()):
            return  # nothing to see: --no-python, or not there yet
        deadline = self._stall.deadline()
        silence_s = self._clock.now_s() - self._changed_at_s
        if self._suspicious and silence_s < deadline.allowed_s / 2:
            self._suspicious = False
            self._tell(lambda at_s: StallEnded(at_s=at_s, attempt=self._attempt, host=self._config.host))
        elif not self._suspicious and silence_s > deadline.allowed_s:
            self._suspicious = True
            self._tell(
                lambda at_s: StallSuspected(
                    at_s=at_s,
                    attempt=self._attempt,
                    host=self._config.host,
                    phase=self._progress.phase,
                    since_s=self._changed_at_s,
                    deadline_s=deadline.allowed_s,
                    learned_from=deadline.learned_from,
                )
            )

    # --- the injector

    def _cause_faults(self) -> None:
        for fault in list(self._faults):
            view = self._views.get(fault.rank)
            if view is not None and fault.step is not None and view.step >= fault.step:
                self._faults.remove(fault)
                self._cause(fault)

    def _cause(self, fault: PlannedFault) -> None:
        if not self._running or fault.rank not in self._views:
            return
        step = self._views[fault.rank].step
        self._tell(lambda at_s: FaultInjected(at_s=at_s, attempt=self._attempt, fault=fault, step=step))
        self._workers.signal(fault.rank, fault.kind)
