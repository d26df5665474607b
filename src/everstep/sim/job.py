"""The real coordinator, agents and policy over a simulated world, in one thread: the same code that runs a job."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep.domain.commands import FinishJob, HostCommand
from everstep.domain.events import Event, RunStarted, Ticked
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import HostId, RunId
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.stall import StallConfig
from everstep.sim.clock import SimClock
from everstep.sim.host import SimHost, SimHostView
from everstep.sim.ledger import MemoryLedger
from everstep.sim.training import SimTraining, TrainingConfig

_TURN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Attributes:
    faults: when and where the injector acts.
    until_s: the simulation gives up here.
    """

    training: TrainingConfig
    host_count: int = 1
    ranks_per_host: int = 4
    faults: tuple[PlannedFault, ...] = ()
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    stall: StallConfig = field(default_factory=StallConfig)
    until_s: float = 600.0

    @property
    def world_size(self) -> int:
        return self.host_count * self.ranks_per_host


class SimLine:
    """Both ends of the channel to one host."""

    def __init__(self, events: deque[Event]) -> None:
        self._events = events
        self.commands: deque[HostCommand] = deque()

    def send(self, event: Event) -> None:
        self._events.append(event)

    def receive(self) -> Sequence[HostCommand]:
        received = tuple(self.commands)
        self.commands.clear()
        return received


class SimSwitchboard:
    """The coordinator's end of all lines."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.lines: dict[HostId, SimLine] = {}

    def receive(self, timeout_s: float) -> Sequence[Event]:
        received = tuple(self.events)
        self.events.clear()
        return received

    def send(self, command: HostCommand, *, host: HostId) -> None:
        self.lines[host].commands.append(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorld:
    """Everything that the loops meet, for `cli` or a test to wire to them."""

    clock: SimClock
    ledger: MemoryLedger
    switchboard: SimSwitchboard
    training: SimTraining
    hosts: dict[HostId, tuple[SimHost, SimHostView, SimLine]]


def make_world(config: SimConfig, *, seed: int) -> SimWorld:
    """A world of `host_count` hosts, the same for the same seed."""
    clock = SimClock()
    training = SimTraining(config.training, world_size=config.world_size, rng=random.Random(seed))
    switchboard = SimSwitchboard()
    hosts = {}
    for number in range(config.host_count):
        host = HostId(f"host{number:04d}")
        workers = SimHost(host, training=training, clock=clock)
        line = switchboard.lines[host] = SimLine(switchboard.events)
        hosts[host] = (workers, SimHostView(host, workers=workers, clock=clock), line)
    return SimWorld(clock=clock, ledger=MemoryLedger(), switchboard=switchboard, training=training, hosts=hosts)


def play(
    world: SimWorld,
    config: SimConfig,
    *,
    take: Callable[[Sequence[Event]], FinishJob | None],
    turns: Sequence[Callable[[], None]],
) -> FinishJob | None:
    """Play until the job ends; None when it does not within `until_s`.

    Args:
        take: the coordinator's `take`.
        turns: each agent's `turn`.
    """
    opening = RunStarted(
        at_s=0.0,
        run=RunId("simulated"),
        everstep="simulated",
        command=(),
        world_size=config.world_size,
        host_count=config.host_count,
        faults=config.faults,
    )
    end = take([opening])
    while end is None and world.clock.now_s() < config.until_s:
        world.clock.advance(_TURN_S)
        world.training.advance(world.clock.now_s())
        for turn in turns:
            turn()
        end = take([*world.switchboard.receive(0.0), Ticked(at_s=world.clock.now_s())])
    return end
