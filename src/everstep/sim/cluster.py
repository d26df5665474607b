"""A simulated cluster of thousands of hosts as a discrete-event world, behind the channel and clock of the real one.

The coarse world beside `sim.job`: few agents speak for all hosts, a step is a block of work, and time jumps from event
to event. It decides nothing: the real coordinator and policy answer every event. Knows no statistics.
"""

import heapq
from collections.abc import Callable, Sequence
from random import Random

from everstep.domain.commands import (
    CollectEvidence,
    Command,
    DismissSuspicion,
    FinishJob,
    HostCommand,
    ReplaceHost,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.events import (
    CheckpointRestored,
    CheckpointSaved,
    Event,
    EvidenceCollected,
    FaultInjected,
    HostLost,
    PhaseChanged,
    RunStarted,
    StepsFinished,
    StopRequested,
    Ticked,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, RunId
from everstep.domain.phases import Phase
from everstep.sim.clock import SimClock
from everstep.sim.coarse_training import CoarseTraining
from everstep.sim.failures import Fault, draw_faults
from everstep.sim.fleet import Duty, Fleet
from everstep.sim.power import heat_factor
from everstep.sim.scenario import Scenario
from everstep.sim.symptoms import exits_of, is_silent, summaries_of, suspicion_of

_TICK_S = 1.0
_LATE_S = 20.0
_EPSILON_S = 1e-6

Take = Callable[[Sequence[Event]], FinishJob | None]


class Cluster:
    """One run. `play` is the loop; `send` and `receive` make it a coordinator's channel.

    Args:
        seed: draws the failures and the delays; equal seeds give equal runs.
    """

    def __init__(self, scenario: Scenario, *, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        self.clock = SimClock()
        self._rng = Random(seed)
        self._fleet = Fleet(scenario)
        self._duty = Duty(self._fleet)
        self._training = CoarseTraining(
            block_s=scenario.block_s, blocks=scenario.blocks_per_checkpoint, slowness=self._slowness
        )
        self._events: list[tuple[float, int, Callable[[], list[Event]]]] = []
        self._count = 0
        self._orders: list[HostCommand] = []
        self._attempt = Attempt(0)
        self._lives = False
        """Workers of the attempt are there, well or not."""
        self._is_between = False
        """No attempt runs or has been ordered: the job waits for hosts, or out a backoff."""
        self._progress = 0
        """Fences the attempt's own future: what was planned before a fault does not happen."""
        self._phase = Phase.STARTING
        self._struck: Fault | None = None
        self._struck_at_s = 0.0
        self._pending: list[tuple[int, Fault]] = []
        self._broken: list[tuple[HostId, float]] = []
        """To be taken out for repair once their workers are stopped, and for how long."""
        self._slow: list[tuple[float, float, HostId]] = []
        self._answered: set[str] = set()
        self._tick_at_s = -1.0

    # --- the channel

    def send(self, command: HostCommand, *, host: HostId) -> None:
        self._orders.append(command)

    def receive(self, timeout_s: float) -> Sequence[Event]:
        """Events are pushed by `play`."""
        return ()

    def hear(self, body: Event | Command) -> None:
        """The ledger's word on who is in use."""
        if isinstance(body, ReplaceHost):
            self._duty.replace(body.host, body.spare)

    # --- the loop

    def play(self, take: Take, *, wants_ticks: Callable[[], bool]) -> FinishJob | None:
        """Play until the job ends; None when nothing can happen any more.

        Args:
            take: the coordinator's `take`.
            wants_ticks: the job's word on whether time alone may lead to a decision.
        """
        end = take(self._opening())
        self._obey()
        while end is None and self._events:
            at_s, _, act = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at_s - self.clock.now_s()))
            if events := act():
                end = take(events)
                self._obey()
            if wants_ticks() and self._tick_at_s <= self.clock.now_s() + _EPSILON_S:
                self._tick_at_s = self.clock.now_s() + _TICK_S
                self._after(_TICK_S, lambda: [Ticked(at_s=self._now_s)])
        return end

    @property
    def _now_s(self) -> float:
        return round(self.clock.now_s(), 3)

    def _after(self, delay_s: float, act: Callable[[], list[Event]]) -> None:
        self._count += 1
        at_s = round(self.clock.now_s() + delay_s, 3)
        heapq.heappush(self._events, (at_s, self._count, act))

    def _opening(self) -> list[Event]:
        one = self._scenario
        faults = one.faults
        if faults is None:
            rng = Random(self._rng.random())
            faults = draw_faults(
                one.failures, host_count=one.host_count + one.spares, duration_s=one.duration_s, rng=rng
            )
        for number, fault in enumerate(faults, start=1):
            if fault.at_s < one.duration_s and max(fault.hosts) < len(self._fleet.hosts):  # a trace may have more hosts
                self._after(fault.at_s, lambda number=number, fault=fault: self._strike(number, fault))  # type: ignore[misc]
        self._after(one.duration_s, self._end_of_time)
        started = RunStarted(
            at_s=0.0,
            run=RunId(f"simulated-{one.name}-{self._seed}".replace(" ", "-").replace(",", "")),
            everstep="simulated",
            command=("everstep", "simulate", one.name, "--seed", str(self._seed)),
            world_size=one.gpus,
            host_count=one.host_count,
        )
        return [started, *self._fleet.joins()]

    def _end_of_time(self) -> list[Event]:
        self._progress += 1
        return [*self._finished_steps(), StopRequested(at_s=self._now_s, by="the end of the simulated time")]

    # --- orders

    def _obey(self) -> None:
        """Carry out what the policy ordered. Each order goes to all agents; the first one speaks for the rest."""
        orders, self._orders = self._orders, []
        for order in orders:
            match order:
                case StartWorkers() if order.attempt != self._attempt:
                    self._start(order)
                case CollectEvidence():
                    key = f"{order.incident}/{order.snapshot}"
                    if key not in self._answered:
                        self._answered.add(key)
                        took_s = self._draw("evidence")
                        self._after(took_s, lambda o=order, t=took_s: self._answer(o, t))  # type: ignore[misc]
                case StopWorkers() if order.attempt == self._attempt and "stop" not in self._answered:
                    self._answered.add("stop")
                    self._stop()
                case DismissSuspicion() if order.host == self._duty.working[0]:
                    progress = self._progress
                    again_s = self._draw("detect_silence") * order.deadline_factor
                    self._after(again_s, lambda p=progress: self._suspect(p))  # type: ignore[misc]

    def _draw(self, part: str) -> float:
        delay = getattr(self._scenario.delays, part)
        return round(float(delay.draw_s(self._rng)), 3)

    def _start(self, order: StartWorkers) -> None:
        self._attempt = order.attempt
        self._is_between = False
        self._progress += 1
        self._struck = None
        self._phase = Phase.STARTING
        self._answered.clear()
        self._duty.rank_shares(order.shares)
        self._training.resume()
        spawn_s = self._draw("requeue") + self._draw("spawn")
        self._step_on(spawn_s, lambda: self._started(spawn_s))

    def _step_on(self, delay_s: float, act: Callable[[], list[Event]]) -> None:
        """Let the attempt go on after a delay, unless something happens to it before."""
        progress = self._progress
        self._after(delay_s, lambda: act() if progress == self._progress else [])

    def _stop(self) -> None:
        self._lives = False
        self._progress += 1
        self._training.halt()
        attempt, teardown_s = self._attempt, self._draw("teardown")
        for host, repair_s in self._broken:
            self._after(0.0, lambda h=host, r=repair_s: self._lose(h, r))  # type: ignore[misc]
        self._broken.clear()
        self._after(teardown_s, lambda: self._stopped(attempt))
        if self._rng.random() < self._scenario.late_news_share:
            self._after(teardown_s + _LATE_S * self._rng.random(), lambda: self._late_news(attempt))

    def _stopped(self, attempt: Attempt) -> list[Event]:
        self._is_between = True
        return [
            WorkersStopped(at_s=self._now_s, attempt=attempt, host=agent, killed=()) for agent in self._duty.working
        ]

    # --- an attempt

    def _started(self, spawn_s: float) -> list[Event]:
        self._lives = True
        started: list[Event] = [
            WorkersStarted(
                at_s=self._now_s, attempt=self._attempt, host=agent, pids=(), warm=True, spawn_s=round(spawn_s, 3)
            )
            for agent in self._duty.working
        ]
        while self._pending and self._struck is None:
            started += self._strike(*self._pending.pop(0))
        if self._struck is None:
            self._step_on(self._draw("group_init"), self._restore)
        return started

    def _restore(self) -> list[Event]:
        if self._training.newest is None:
            return self._warm_up()
        took_s = round(self._draw("restore") + self._scenario.restore_storage_s, 3)
        self._step_on(took_s, lambda: self._restored(took_s))
        return [self._enter(Phase.RESTORING, self._duty.working[0])]

    def _restored(self, took_s: float) -> list[Event]:
        newest = self._training.newest
        assert newest is not None
        restored = CheckpointRestored(
            at_s=self._now_s,
            attempt=self._attempt,
            step=newest.step,
            path=f"step-{newest.step:08d}",
            duration_s=took_s,
        )
        return [restored, *self._warm_up()]

    def _warm_up(self) -> list[Event]:
        self._phase = Phase.WARMING_UP
        ends_s = self._training.begin_segment(self._now_s, extra_s=self._draw("first_step"))
        self._step_on(ends_s[0] - self._now_s, lambda: self._warmed_up(ends_s[-1]))
        return [self._enter(Phase.WARMING_UP, agent) for agent in self._duty.working]

    def _warmed_up(self, checkpoint_at_s: float) -> list[Event]:
        steps = self._finished_steps()
        self._phase = Phase.TRAINING
        self._step_on(checkpoint_at_s - self._now_s, self._save)
        return [*steps, *(self._enter(Phase.TRAINING, agent) for agent in self._duty.working)]

    def _save(self) -> list[Event]:
        """One agent enters the phase: a rank that saves explains why the others wait."""
        steps = self._finished_steps()
        self._phase = Phase.SAVING
        self._step_on(self._scenario.checkpoint_pause_s, self._saved)
        return [*steps, self._enter(Phase.SAVING, self._duty.working[0])]

    def _saved(self) -> list[Event]:
        checkpoint = self._training.save(self._now_s)
        self._phase = Phase.TRAINING
        ends_s = self._training.begin_segment(self._now_s)
        self._step_on(ends_s[-1] - self._now_s, self._save)
        saved = CheckpointSaved(
            at_s=self._now_s,
            attempt=self._attempt,
            step=checkpoint.step,
            path=f"step-{checkpoint.step:08d}",
            size_bytes=0,
            duration_s=self._scenario.checkpoint_pause_s,
        )
        return [saved, self._enter(Phase.TRAINING, self._duty.working[0])]

    def _enter(self, phase: Phase, agent: HostId) -> PhaseChanged:
        return PhaseChanged(at_s=self._now_s, attempt=self._attempt, host=agent, phase=phase, step=self._training.step)

    def _finished_steps(self) -> list[Event]:
        first, ends_s = self._training.take_finished(self._now_s)
        if not ends_s:
            return []
        return [
            StepsFinished(at_s=self._now_s, attempt=self._attempt, host=agent, first_step=first, ended_at_s=ends_s)
            for agent in self._duty.working
        ]

    def _slowness(self, at_s: float) -> float:
        self._slow = [one for one in self._slow if one[0] > at_s]
        slowest = max((factor for _, factor, host in self._slow if self._duty.is_in_use(host)), default=1.0)
        return slowest * heat_factor(at_s, self._scenario.heat_dip_share)

    # --- faults

    def _strike(self, number: int, fault: Fault) -> list[Event]:
        """A fault happens. On an idle host it takes the spare away at most; while no workers live it waits for them."""
        host = self._fleet.host(fault.hosts[0])
        if fault.slow_factor > 1:
            self._slow.append((self._now_s + fault.down_s, fault.slow_factor, host))
            return []
        if not self._duty.is_in_use(host):
            return self._hit_idle(fault)
        if self._is_between and fault.down_s:
            return self._hit_idle(fault)
        if self._struck is not None or not self._lives:
            self._pending.append((number, fault))
            return []
        steps = self._finished_steps()
        self._training.halt()
        self._progress += 1
        self._struck, self._struck_at_s = fault, self._now_s
        if fault.rollback_s:
            self._training.distrust(self._now_s - fault.rollback_s)
        if fault.down_s:
            hosts = [self._fleet.host(number) for number in fault.hosts]
            self._broken = [(host, fault.down_s) for host in hosts]
        progress = self._progress
        if is_silent(fault.kind):
            self._after(self._draw("detect_silence"), lambda: self._suspect(progress))
        else:
            self._after(self._draw("detect_death"), lambda: self._exit(fault, number, progress))
        return steps if fault.planned else [*steps, self._told(number, fault)]

    def _told(self, number: int, fault: Fault) -> FaultInjected:
        planned = PlannedFault(
            number=number,
            kind=fault.kind,
            rank=self._duty.rank(fault.hosts[0]),
            after_s=self._now_s,
            cause=fault.cause,
        )
        return FaultInjected(at_s=self._now_s, attempt=self._attempt, fault=planned, step=self._training.step)

    def _hit_idle(self, fault: Fault) -> list[Event]:
        lost: list[Event] = []
        for number in fault.hosts:
            host = self._fleet.host(number)
            if fault.down_s and (self._duty.is_idle(host) or (self._is_between and self._duty.is_in_use(host))):
                lost += self._lose(host, fault.down_s)
        return lost

    def _lose(self, host: HostId, repair_s: float) -> list[Event]:
        if not self._duty.leave(host):
            return []
        self._after(repair_s, lambda: self._repaired(host))
        return [HostLost(at_s=self._now_s, host=host, reason=f"taken out for a repair of {repair_s / 3600:.1f} h")]

    def _repaired(self, host: HostId) -> list[Event]:
        self._duty.come_back(host)
        return [self._fleet.join(self._fleet.agent_of(host), (host,), at_s=self._now_s)]

    def _exit(self, fault: Fault, number: int, progress: int) -> list[Event]:
        if progress != self._progress:
            return []
        return list(
            exits_of(fault, number, duty=self._duty, attempt=self._attempt, at_s=self._now_s, step=self._training.step)
        )

    def _suspect(self, progress: int) -> list[Event]:
        if progress != self._progress or self._struck is None:
            return []
        return [
            suspicion_of(agent, attempt=self._attempt, at_s=self._now_s, since_s=self._struck_at_s, phase=self._phase)
            for agent in self._duty.working
        ]

    def _answer(self, order: CollectEvidence, took_s: float) -> list[Event]:
        if order.attempt != self._attempt:
            return []
        found = summaries_of(
            self._struck,
            duty=self._duty,
            phase=self._phase,
            step=self._training.step,
            silence_s=self._now_s - self._struck_at_s,
        )
        return [
            EvidenceCollected(
                at_s=self._now_s,
                attempt=self._attempt,
                host=agent,
                incident=order.incident,
                snapshot=order.snapshot,
                summaries=found.get(agent, ()),
                files=(),
                took_s=took_s,
            )
            for agent in self._duty.working
        ]

    def _late_news(self, attempt: Attempt) -> list[Event]:
        """What an agent of an old attempt had still to say: nobody may act on it."""
        if attempt == self._attempt:
            return []  # the next one has not begun: no news of this one is late
        agent = self._fleet.agents[0]
        return [
            WorkersStopped(at_s=self._now_s, attempt=attempt, host=agent, killed=()),
            suspicion_of(agent, attempt=attempt, at_s=self._now_s, since_s=0.0, phase=Phase.TRAINING),
            StepsFinished(at_s=self._now_s, attempt=attempt, host=agent, first_step=10**9, ended_at_s=(self._now_s,)),
            WorkerExited(
                at_s=self._now_s,
                attempt=attempt,
                host=agent,
                rank=self._duty.rank(0),
                pid=1,
                exit_code=-9,
                phase=Phase.TRAINING,
                step=0,
            ),
        ]
