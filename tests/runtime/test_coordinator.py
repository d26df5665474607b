"""The coordinator records, then acts: nothing is sent that is not in the ledger, and on disk, before."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from everstep.domain.commands import Command, FinishJob, HostCommand, StartWorkers
from everstep.domain.errors import ExitCode, WorldError
from everstep.domain.events import (
    Event,
    EvidenceCollected,
    HostJoined,
    RunStarted,
    StepsFinished,
    StopRequested,
    Ticked,
    WorkerExited,
    WorkersStopped,
)
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.policy.recovery import Job, RecoveryConfig
from everstep.runtime.coordinator import Coordinator, CoordinatorPorts
from everstep.sim.clock import SimClock
from everstep.sim.ledger import MemoryLedger

HOSTS = (HostId("h0"), HostId("h1"))
OPENING = RunStarted(at_s=0.0, run=RunId("r"), everstep="0", command=(), world_size=2, host_count=2)


@dataclass
class World:
    """Ledger, channel and listener in one, with a diary of what was done to them in which order."""

    batches: list[list[Event]] = field(default_factory=list)
    diary: list[tuple[str, Event | Command]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    disk_is_full: bool = False
    memory: MemoryLedger = field(default_factory=MemoryLedger)

    def read(self) -> Sequence[object]:
        return self.memory.read()

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        if self.disk_is_full:
            raise WorldError("cannot write ledger.jsonl: the disk is full")
        self.memory.append(bodies, wall=wall, durable=durable)
        self.diary += [("durably" if durable else "written", body) for body in bodies]

    def receive(self, timeout_s: float) -> Sequence[Event]:
        self.waits.append(timeout_s)
        return self.batches.pop(0) if self.batches else ()

    def send(self, command: HostCommand, *, host: HostId) -> None:
        self.diary.append((f"sent to {host}", command))

    def hear(self, body: Event | Command) -> None:
        self.diary.append(("heard", body))

    def verbs(self, kind: type) -> list[str]:
        return [verb for verb, body in self.diary if isinstance(body, kind)]


def coordinator(world: World) -> Coordinator:
    ports = CoordinatorPorts(ledger=world, channel=world, clock=SimClock(), listen=world.hear)  # type: ignore[arg-type]
    return Coordinator(Job(RecoveryConfig()), ports)


def joined(host: HostId) -> HostJoined:
    return HostJoined(at_s=0.1, host=host, worker_count=1, address="a")


def died(rank: int) -> WorkerExited:
    return WorkerExited(
        at_s=1.0,
        attempt=Attempt(1),
        host=HOSTS[rank],
        rank=Rank(rank),
        pid=1,
        exit_code=-9,
        phase=Phase.TRAINING,
        step=4,
    )


def evidence(host: HostId) -> EvidenceCollected:
    return EvidenceCollected(
        at_s=1.1,
        attempt=Attempt(1),
        host=host,
        incident=IncidentId("a0001-1"),
        snapshot=1,
        summaries=(),
        files=(),
        took_s=0.1,
    )


def stopped(host: HostId) -> WorkersStopped:
    return WorkersStopped(at_s=1.3, attempt=Attempt(1), host=host, killed=())


def started(world: World) -> Coordinator:
    found = coordinator(world)
    assert found.take([OPENING, *map(joined, HOSTS)]) is None
    return found


def test_a_command_is_on_disk_before_it_is_heard_of_and_sent_to_every_host_of_its_own() -> None:
    world = World()
    started(world)
    assert world.verbs(StartWorkers) == ["durably", "heard", "sent to h0", "sent to h1"]
    assert world.verbs(HostJoined)[:2] == ["durably", "durably"]  # the events that it follows from, in the same write


def test_every_command_of_a_whole_recovery_is_on_disk_before_it_is_sent() -> None:
    world = World()
    found = started(world)
    for batch in ([died(0)], [evidence(HOSTS[0]), evidence(HOSTS[1])], [stopped(HOSTS[0]), stopped(HOSTS[1])]):
        found.take(batch)
    durable: list[object] = []
    for verb, body in world.diary:
        if verb == "durably":
            durable.append(body)
        if verb.startswith("sent"):
            assert body in durable
    sent = [type(body).__name__ for verb, body in world.diary if verb.startswith("sent")]
    assert sent == ["StartWorkers"] * 2 + ["CollectEvidence"] * 2 + ["StopWorkers"] * 2 + ["StartWorkers"] * 2


def test_events_stand_before_the_commands_that_follow_from_them() -> None:
    world = World()
    started(world).take([died(0)])
    names = [type(entry.body).__name__ for entry in world.memory.entries]
    assert names == [
        "RunStarted",
        "HostJoined",
        "HostJoined",
        "StartWorkers",
        "WorkerExited",
        "CollectEvidence",
        "CollectEvidence",
    ]


def test_news_that_asks_for_nothing_is_recorded_without_waiting_for_the_disk() -> None:
    world = World()
    found = started(world)
    steps = StepsFinished(at_s=1.0, attempt=Attempt(1), host=HOSTS[0], first_step=1, ended_at_s=(0.9,))
    assert found.take([steps, Ticked(at_s=1.0)]) is None
    assert world.verbs(StepsFinished) == ["written", "heard"]


def test_a_tick_that_asks_for_nothing_leaves_no_trace() -> None:
    world = World()
    found = started(world)
    before = len(world.diary)
    assert found.take([Ticked(at_s=2.0)]) is None
    assert len(world.diary) == before


def test_a_tick_that_asks_for_something_is_recorded_with_it() -> None:
    world = World()
    found = started(world)
    found.take([died(0)])
    found.take([Ticked(at_s=100.0)])  # the evidence was waited for long enough
    assert world.verbs(Ticked) == ["durably", "heard"]


def test_when_the_ledger_cannot_be_written_nothing_is_sent_or_heard() -> None:
    world = World()
    found = started(world)
    before = list(world.diary)
    world.disk_is_full = True
    with pytest.raises(WorldError, match="the disk is full"):
        found.take([died(0)])
    assert world.diary == before


def test_the_end_is_given_once_it_is_on_disk_and_sent_to_nobody() -> None:
    world = World()
    found = coordinator(world)
    end = found.take([OPENING, StopRequested(at_s=0.5, by="SIGTERM")])
    assert end is not None
    assert end.exit_code is ExitCode.PREEMPTED
    assert world.verbs(FinishJob) == ["durably", "heard"]


def test_nothing_stands_behind_the_end_so_that_a_job_that_is_done_is_known_by_its_last_entry() -> None:
    world = World()
    late = StepsFinished(at_s=0.6, attempt=Attempt(1), host=HOSTS[0], first_step=1, ended_at_s=(0.5,))
    assert coordinator(world).take([OPENING, StopRequested(at_s=0.5, by="SIGTERM"), late, joined(HOSTS[1])]) is not None
    assert isinstance(world.memory.entries[-1].body, FinishJob)


def test_the_loop_takes_what_comes_and_ticks_until_the_end() -> None:
    world = World(batches=[[joined(HOSTS[0])], [], [joined(HOSTS[1])], [died(1)], [StopRequested(at_s=2.0, by="x")]])
    world.batches.append([stopped(HOSTS[0]), stopped(HOSTS[1])])
    end = coordinator(world).run([OPENING])
    assert end.exit_code is ExitCode.PREEMPTED
    assert world.batches == []
    quiet, urgent = max(world.waits), min(world.waits)
    assert world.waits == [quiet, quiet, quiet, quiet, urgent, quiet]  # while a death is judged, time matters


def test_replaying_what_was_recorded_gives_the_recorded_commands() -> None:
    world = World()
    found = started(world)
    for batch in ([died(0), Ticked(at_s=1.0)], [evidence(HOSTS[0])], [Ticked(at_s=50.0)], [stopped(HOSTS[1])]):
        found.take(batch)
    bodies = [entry.body for entry in world.memory.entries]
    job = Job(RecoveryConfig())
    replayed: list[object] = []
    commands: list[object] = []
    for body in bodies:
        if type(body).__module__.endswith("commands"):
            commands.append(body)
        else:
            replayed += job.handle(body)  # type: ignore[arg-type]
    assert replayed == commands
