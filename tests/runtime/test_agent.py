"""The agent's loop over a simulated host: what it tells and in which order, and which orders it obeys."""

import random
from collections.abc import Callable, Sequence

import pytest

from everstep.domain.causes import FaultKind
from everstep.domain.commands import (
    CollectEvidence,
    DismissSuspicion,
    HostCommand,
    HostShare,
    InjectFault,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.errors import ConfigError, WorldError
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
    WorkerReady,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.phases import Phase
from everstep.policy.stall import StallConfig
from everstep.ports import Started
from everstep.runtime.agent import Agent, AgentConfig, AgentPorts
from everstep.sim.clock import SimClock
from everstep.sim.host import SimHost, SimHostView
from everstep.sim.job import SimLine, SimSwitchboard
from everstep.sim.training import SimTraining, TrainingConfig

HOST = HostId("h")
TURN_S = 0.05
STALL = StallConfig(floor_s=1.5, learn_from=5, unlearned_s=20.0)
KILL = PlannedFault(number=1, kind=FaultKind.KILL, rank=Rank(1), step=10)


class NotedHostView(SimHostView):
    """Its workers write notes, too."""

    unread: list[Event]

    def notes(self) -> Sequence[Event]:
        read, self.unread = self.unread, []
        return read


class World:
    """One simulated host with its agent; `play` lets time go by, `heard` is all that the coordinator was told."""

    def __init__(self, *, report_s: float = 5.0, host: type[SimHost] = SimHost, gloo: bool = True) -> None:
        self.clock = SimClock()
        self.training = SimTraining(TrainingConfig(steps=10_000, gloo=gloo), world_size=2, rng=random.Random(3))
        switchboard = SimSwitchboard()
        self.line = switchboard.lines[HOST] = SimLine(switchboard.events)
        self.switchboard = switchboard
        self.workers = host(HOST, training=self.training, clock=self.clock)
        self.view = view = NotedHostView(HOST, workers=self.workers, clock=self.clock)
        view.unread = []
        config = AgentConfig(host=HOST, address="a", worker_count=2, report_s=report_s, stall=STALL)
        ports = AgentPorts(workers=self.workers, pages=view, evidence=view, channel=self.line, clock=self.clock)
        self.agent = Agent(config, ports)
        self.heard: list[Event] = []

    def order(self, *commands: HostCommand) -> None:
        self.line.commands.extend(commands)

    def start(self, attempt: int = 1, faults: tuple[PlannedFault, ...] = ()) -> "World":
        self.order(
            StartWorkers(
                at_s=self.clock.now_s(),
                attempt=Attempt(attempt),
                shares=(HostShare(host=HOST, first_rank=Rank(0), count=2),),
                world_size=2,
                restart_count=attempt - 1,
                faults=faults,
                rung=None,
                why="test",
            )
        )
        return self

    def play(self, for_s: float) -> list[Event]:
        """What the agent tells in the meantime."""
        told: list[Event] = []
        for _ in range(round(for_s / TURN_S)):
            self.clock.advance(TURN_S)
            self.training.advance(self.clock.now_s())
            self.agent.turn()
            told += self.switchboard.receive(0.0)
        self.heard += told
        return told

    def at_once(self, *commands: HostCommand) -> list[Event]:
        """What the agent tells in the very next turn."""
        self.order(*commands)
        return self.play(TURN_S)

    def of(self, *kinds: type) -> list[Event]:
        return [event for event in self.heard if isinstance(event, kinds)]

    def collect(self, attempt: int = 1, snapshot: int = 1) -> CollectEvidence:
        return CollectEvidence(
            at_s=self.clock.now_s(),
            attempt=Attempt(attempt),
            host=HOST,
            incident=IncidentId("a0001-1"),
            snapshot=snapshot,
        )

    def stop(self, attempt: int = 1) -> StopWorkers:
        return StopWorkers(at_s=0.0, attempt=Attempt(attempt), host=HOST, kill_ranks=(), grace_s=1.0)

    def dismiss(self, attempt: int = 1, factor: float = 2.0) -> DismissSuspicion:
        return DismissSuspicion(
            at_s=0.0,
            attempt=Attempt(attempt),
            host=HOST,
            incident=IncidentId("i"),
            reason="r",
            deadline_factor=factor,
        )


def ready(rank: int, part: str, at_s: float) -> WorkerReady:
    return WorkerReady(at_s=at_s, attempt=Attempt(1), rank=Rank(rank), part=part, after_s=at_s)


def names(events: Sequence[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


class WaitingHost(SimHost):
    """Its starts wait for another host, for ever."""

    is_called_off: Callable[[], bool]

    def start(self, command: StartWorkers) -> Started:
        assert self.is_called_off(), "nothing else is wanted"
        raise WorldError("called off", retryable=True)


# --- telling


def test_it_reports_for_duty_with_its_places() -> None:
    world = World()
    world.agent.report_for_duty()
    assert list(world.switchboard.receive(0.0)) == [HostJoined(at_s=0.0, host=HOST, worker_count=2, address="a")]
    assert world.play(1.0) == []  # and waits for orders


def test_a_start_is_told_with_its_pids_and_then_the_phases_as_they_come() -> None:
    world = World().start()
    told = world.play(1.0)
    assert isinstance(told[0], WorkersStarted)
    assert len(set(told[0].pids)) == 2
    assert [event.phase for event in told if isinstance(event, PhaseChanged)] == [Phase.STARTING, Phase.TRAINING]


def test_finished_steps_are_told_in_batches_without_a_gap_and_each_once() -> None:
    world = World(report_s=2.0).start()
    world.play(10.0)
    batches = [event for event in world.heard if isinstance(event, StepsFinished)]
    assert 4 <= len(batches) <= 7
    numbers = [batch.first_step + n for batch in batches for n in range(len(batch.ended_at_s))]
    assert numbers == list(range(1, len(numbers) + 1))
    times = [at_s for batch in batches for at_s in batch.ended_at_s]
    assert times == sorted(times)


@pytest.mark.parametrize("news", ["evidence", "stop", "exit", "fault", "phase"])
def test_steps_are_told_before_any_other_news(news: str) -> None:
    world = World(report_s=1000.0).start()
    world.play(3.0)
    last_step = world.training.ranks[Rank(0)].step
    match news:
        case "evidence":
            told = world.at_once(world.collect())
        case "stop":
            told = world.at_once(world.stop())
        case "exit":
            world.training.cause(Rank(1), FaultKind.KILL, world.clock.now_s())
            told = world.at_once()
        case "fault":
            fault = PlannedFault(number=1, kind=FaultKind.FREEZE, rank=Rank(1), after_s=1.0)
            told = world.at_once(InjectFault(at_s=0.0, attempt=Attempt(1), host=HOST, fault=fault))
        case _:
            saving = world.training.ranks[Rank(0)]
            saving.phase = Phase.SAVING
            saving.mark(world.clock.now_s() + 0.01, is_step=False)
            told = world.at_once()
    assert names(told)[0] == "StepsFinished"
    assert len(told) >= 2
    assert isinstance(told[0], StepsFinished)
    assert told[0].last_step >= last_step


def test_an_agent_that_looks_late_tells_notes_and_steps_in_the_order_in_which_they_happened() -> None:
    world = World(report_s=1000.0).start()
    world.play(TURN_S)
    for _ in range(60):  # the host is busy: the agent gets no turn
        world.clock.advance(TURN_S)
        world.training.advance(world.clock.now_s())
    first_step_at_s = next(mark.at_s for mark in world.training.ranks[Rank(0)].marks if mark.is_step)
    world.view.unread += [ready(1, "restored", first_step_at_s - 0.01), ready(0, "attached", first_step_at_s - 0.02)]
    world.view.unread += [ready(0, "first_step", first_step_at_s + 0.01)]
    told = [event for event in world.at_once(world.stop()) if isinstance(event, WorkerReady | StepsFinished)]
    assert [event.part if isinstance(event, WorkerReady) else event.first_step for event in told] == [
        "attached", "restored", 1, "first_step", 2
    ]  # fmt: skip


def test_an_exit_is_told_once_with_where_its_page_stood() -> None:
    world = World(gloo=False).start()
    world.play(2.0)
    world.training.cause(Rank(1), FaultKind.KILL, world.clock.now_s())
    world.play(1.0)
    (end,) = world.of(WorkerExited)
    assert isinstance(end, WorkerExited)
    assert (end.rank, end.exit_code, end.phase, end.attempt) == (1, -9, Phase.TRAINING, 1)
    assert end.step == world.training.ranks[Rank(1)].step > 0


def test_evidence_is_told_with_a_summary_for_each_rank() -> None:
    world = World().start()
    world.play(2.0)
    told = world.at_once(world.collect(snapshot=2))
    (evidence,) = [event for event in told if isinstance(event, EvidenceCollected)]
    assert ([summary.rank for summary in evidence.summaries], evidence.snapshot) == ([0, 1], 2)
    assert evidence.incident == "a0001-1"


def test_a_stop_is_told_when_no_worker_is_left_and_after_it_nothing_more() -> None:
    world = World().start()
    world.play(2.0)
    assert names(world.at_once(world.stop()))[-1] == "WorkersStopped"
    assert world.training.ranks == {}
    assert world.play(2.0) == []


class WithoutRoom(SimHost):
    """A host that can start nothing."""

    problem: Exception = WorldError("shared memory is full")

    def start(self, command: StartWorkers) -> Started:
        raise self.problem


class WithWrongPath(WithoutRoom):
    problem = ConfigError("port 80 cannot be used")


@pytest.mark.parametrize(("host", "final"), [(WithoutRoom, False), (WithWrongPath, True)])
def test_a_start_that_fails_is_told_with_whether_it_is_final(host: type[WithoutRoom], final: bool) -> None:
    world = World(host=host).start()
    (told,) = world.at_once()
    assert isinstance(told, StartFailed)
    assert (told.final, told.reason, told.attempt) == (final, str(host.problem), 1)
    assert names(world.at_once(world.stop())) == ["WorkersStopped"]


class WithLostStore(SimHost):
    """A host whose rendezvous store has ended."""

    def store_loss(self) -> str:
        return "the rendezvous store ended with -9" if self.ranks() else ""


def test_the_loss_of_the_store_is_told_once_for_each_attempt() -> None:
    world = World(host=WithLostStore).start()
    world.play(1.0)
    world.order(world.stop())
    world.start(2)
    world.play(1.0)
    assert [event.attempt for event in world.of(StoreLost) if isinstance(event, StoreLost)] == [1, 2]


# --- obeying


def test_orders_about_an_old_attempt_are_not_obeyed() -> None:
    world = World().start()
    world.play(1.0)
    world.order(world.stop(1))
    world.start(2)
    world.play(2.0)
    fault = PlannedFault(number=1, kind=FaultKind.KILL, rank=Rank(1), after_s=1.0)
    inject = InjectFault(at_s=0.0, attempt=Attempt(1), host=HOST, fault=fault)
    before = len(world.heard)
    world.order(world.collect(1), world.stop(1), inject, world.dismiss(1))
    world.play(2.0)
    later = world.heard[before:]
    assert not [event for event in later if not isinstance(event, StepsFinished)]
    assert {rank.exit_code for rank in world.training.ranks.values()} == {None}


def test_an_attempt_that_nobody_has_stopped_is_ended_before_the_next_one_starts() -> None:
    """A host that was lost and has joined again may have been started by an order from before its loss was known."""
    ended_before: list[int] = []

    class Telling(SimHost):
        def start(self, command: StartWorkers) -> Started:
            ended_before.append(len(self.ranks()))
            return super().start(command)

    world = World(host=Telling).start()
    world.play(1.0)
    world.start(2)
    world.play(2.0)
    assert ended_before == [0, 0]
    assert world.of(WorkerExited) == []


def test_news_of_the_next_attempt_carries_its_number_and_counts_its_own_steps() -> None:
    world = World(report_s=0.5).start()
    world.play(2.0)
    world.order(world.stop(1))
    world.start(2)
    before = len(world.heard)
    world.play(2.0)
    later = world.heard[before:]
    stopped = next(n for n, event in enumerate(later) if isinstance(event, WorkersStopped))
    assert {event.attempt for event in later[: stopped + 1]} == {1}  # type: ignore[union-attr]
    assert {event.attempt for event in later[stopped + 1 :]} == {2}  # type: ignore[union-attr]


def test_a_fault_that_waits_for_a_step_is_caused_once_and_told_before() -> None:
    world = World().start(faults=(KILL,))
    world.play(5.0)
    (injected,) = world.of(FaultInjected)
    assert isinstance(injected, FaultInjected)
    assert (injected.fault, injected.step >= 10) == (KILL, True)
    order = [event for event in names(world.heard) if event in ("FaultInjected", "WorkerExited")]
    assert order[0] == "FaultInjected"
    assert order[1:].count("WorkerExited") == 2  # the killed rank and its victim


# --- silences


def frozen(world: World) -> float:
    """Freeze the job after a while of training; gives since when nothing moves."""
    world.play(3.0)
    world.training.cause(Rank(1), FaultKind.FREEZE, world.clock.now_s())
    return max(rank.changed_at_s for rank in world.training.ranks.values())


def test_a_silence_is_suspected_after_its_deadline_and_not_before_and_once() -> None:
    world = World().start()
    since_s = frozen(world)
    world.play(since_s + STALL.floor_s - world.clock.now_s() - TURN_S)
    assert world.of(StallSuspected) == []
    world.play(10.0)
    (suspected,) = world.of(StallSuspected)
    assert isinstance(suspected, StallSuspected)
    assert suspected.since_s == since_s
    assert suspected.deadline_s == STALL.floor_s
    assert STALL.floor_s < suspected.at_s - since_s < STALL.floor_s + 3 * TURN_S
    assert suspected.phase is Phase.TRAINING


def test_a_dismissed_silence_is_suspected_again_after_a_longer_time() -> None:
    world = World().start()
    since_s = frozen(world)
    world.play(2.0)
    world.order(world.dismiss(factor=3.0))
    world.play(10.0)
    first, second = world.of(StallSuspected)
    assert second.at_s - since_s == pytest.approx(3 * STALL.floor_s, abs=3 * TURN_S)
    assert first.at_s < second.at_s


def test_a_host_that_moves_again_says_so_once() -> None:
    world = World().start()
    frozen(world)
    world.play(3.0)
    assert world.of(StallEnded) == []
    for rank in world.training.ranks.values():
        rank.mark(world.clock.now_s(), is_step=False)
    world.play(0.5)
    assert len(world.of(StallEnded)) == 1


def test_before_the_steps_are_known_a_silence_may_last_as_long_as_a_start() -> None:
    world = World().start()
    world.play(0.2)
    world.training.ranks[Rank(0)].health = world.training.ranks[Rank(0)].health.FROZEN
    world.play(STALL.unlearned_s - 1.0)
    assert world.of(StallSuspected) == []
    world.play(2.0)
    assert len(world.of(StallSuspected)) == 1


def test_workers_that_nobody_observes_are_never_suspected() -> None:
    world = World().start()
    world.play(0.1)
    for rank in world.training.ranks.values():
        rank.phase, rank.marks = Phase.UNOBSERVED, []
        rank.health = rank.health.FROZEN
    world.play(100.0)
    assert world.of(StallSuspected) == []


# --- the loop itself


class Failing(SimHost):
    """A host on which waiting goes wrong."""

    problem: Exception = WorldError("processes [7] cannot be killed")

    def wait(self, timeout_s: float) -> None:
        raise self.problem


class Buggy(Failing):
    problem = KeyError("a slip of ours")


@pytest.mark.parametrize(("host", "defect"), [(Failing, False), (Buggy, True)])
def test_what_goes_wrong_in_the_loop_is_told_as_the_loss_of_the_host(host: type[Failing], defect: bool) -> None:
    world = World(host=host)
    world.agent.run()
    joined, lost = world.switchboard.receive(0.0)
    assert isinstance(joined, HostJoined)
    assert isinstance(lost, HostLost)
    assert lost.defect == defect
    assert str(host.problem) in lost.reason
    assert ("Traceback" in lost.reason) == defect


def test_an_agent_that_hangs_in_something_stands_still_after_what_it_may_take_for_it() -> None:
    seen: dict[str, list[bool]] = {"start": [], "stop": [], "wait": []}

    def hang(what: str, for_s: float) -> None:
        world.clock.advance(for_s)
        seen[what].append(world.agent.stands_still)

    class Hanging(SimHost):
        def start(self, command: StartWorkers) -> Started:
            for for_s in (7000.0, 1000.0):
                hang("start", for_s)
            return super().start(command)

        def stop(self, kill_ranks: Sequence[Rank], grace_s: float) -> tuple[Rank, ...]:
            for for_s in (300.5, 1.0):
                hang("stop", for_s)
            return super().stop(kill_ranks, grace_s)

        def wait(self, timeout_s: float) -> None:
            for for_s in (299.0, 2.0):
                hang("wait", for_s)
            world.agent.finish()

    world = World(host=Hanging)
    world.order(world.stop(0))
    assert not world.agent.stands_still
    world.start().at_once()
    world.agent.run()
    assert seen == {"start": [False, True], "stop": [False, True], "wait": [False, True]}


class Finishing(SimHost):
    """A host whose wait ends the agent's loop, as another thread would."""

    agents: list[Agent] = []  # noqa: RUF012 - filled by the test

    def wait(self, timeout_s: float) -> None:
        self.agents.pop().finish()


def test_the_loop_ends_when_it_is_told_to() -> None:
    world = World(host=Finishing)
    Finishing.agents.append(world.agent)
    world.agent.run()
    assert names(world.switchboard.receive(0.0)) == ["HostJoined"]


def test_a_start_that_waits_hears_of_an_order_behind_it_even_one_that_came_with_it() -> None:
    world = World(host=WaitingHost)
    assert isinstance(world.workers, WaitingHost)
    world.workers.is_called_off = world.agent.is_called_off
    assert not world.agent.is_called_off()
    told = world.start().at_once(world.stop())
    assert names(told) == ["StartFailed", "WorkersStopped"]
