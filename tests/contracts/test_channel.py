"""The line between coordinator and agents: in one process, between hosts, and simulated."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.contracts.hosts import center

from everstep.adapters.channel import LocalChannel
from everstep.domain.commands import StopWorkers
from everstep.domain.events import StopRequested
from everstep.domain.ids import Attempt, HostId
from everstep.ports import AgentChannel, CoordinatorChannel
from everstep.sim.job import SimLine, SimSwitchboard

HOSTS = (HostId("h0"), HostId("h1"))


@dataclass
class Lines:
    """Both ends, and how often the agents were woken."""

    coordinator: CoordinatorChannel
    agents: dict[HostId, AgentChannel]
    wakes: list[int] = field(default_factory=list)
    takes_time: bool = False
    """What was sent comes a moment later, in order for each host."""

    def events(self, count: int) -> list[object]:
        """The next `count` events, and no more than have come by then."""
        received: list[object] = []
        ends_s = time.monotonic() + 20.0
        while len(received) < count and time.monotonic() < ends_s:
            received += self.coordinator.receive(1.0 if self.takes_time else 0.0)
        return received

    def commands(self, host: HostId, count: int) -> list[float]:
        """When the next `count` commands were given."""
        received: list[float] = []
        ends_s = time.monotonic() + 20.0
        while len(received) < count and time.monotonic() < ends_s:
            received += [command.at_s for command in self.agents[host].receive()]
        return received


def real(_: ExitStack, __: Path) -> Lines:
    wakes: list[int] = []
    channel = LocalChannel(wake=lambda: wakes.append(1))
    return Lines(channel, {host: channel.agent_end(host) for host in HOSTS}, wakes)


def between_hosts(stack: ExitStack, folder: Path) -> Lines:
    made = stack.enter_context(center(folder))
    first, second = HOSTS
    local = made.channel.agent_end(first)
    other = made.join(second)
    stack.callback(other.end.close)
    return Lines(made.channel, {first: local, second: other.end}, made.wakes, takes_time=True)


def simulated(_: ExitStack, __: Path) -> Lines:
    switchboard = SimSwitchboard()
    for host in HOSTS:
        switchboard.lines[host] = SimLine(switchboard.events)
    return Lines(switchboard, dict(switchboard.lines))


@pytest.fixture(params=[real, between_hosts, simulated])
def lines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lines]:
    make: Callable[[ExitStack, Path], Lines] = request.param
    with ExitStack() as stack:
        yield make(stack, tmp_path)


def stop(number: int, host: HostId = HOSTS[0]) -> StopWorkers:
    return StopWorkers(at_s=float(number), attempt=Attempt(1), host=host, kill_ranks=(), grace_s=1.0)


def asked(number: int) -> StopRequested:
    return StopRequested(at_s=float(number), by="test")


def test_nothing_was_said_at_first(lines: Lines) -> None:
    assert list(lines.coordinator.receive(0.0)) == []
    assert [list(end.receive()) for end in lines.agents.values()] == [[], []]


def test_events_come_in_the_order_in_which_they_were_sent_and_once(lines: Lines) -> None:
    for number in range(5):
        lines.agents[HOSTS[number % 2]].send(asked(number))
    events = lines.events(5)
    if lines.takes_time:  # each host's are in order; whose come first is chance
        events.sort(key=lambda event: event.at_s)  # type: ignore[attr-defined]
    assert events == [asked(number) for number in range(5)]
    assert list(lines.coordinator.receive(0.0)) == []


def test_commands_come_to_their_host_alone_in_order_and_once(lines: Lines) -> None:
    for number in range(4):
        lines.coordinator.send(stop(number, HOSTS[number % 2]), host=HOSTS[number % 2])
    assert lines.commands(HOSTS[0], 2) == [0.0, 2.0]
    assert lines.commands(HOSTS[1], 2) == [1.0, 3.0]
    assert list(lines.agents[HOSTS[0]].receive()) == []


@pytest.mark.parametrize("host", HOSTS)
def test_no_event_of_many_is_lost_or_overtaken(lines: Lines, host: HostId) -> None:
    for number in range(3_000):
        lines.agents[host].send(asked(number))
    assert lines.events(3_000) == [asked(number) for number in range(3_000)]


def test_a_command_to_a_host_that_is_not_there_is_dropped(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lines = real(stack, tmp_path)
        lines.coordinator.send(stop(1, HostId("gone")), host=HostId("gone"))
        assert list(lines.agents[HOSTS[0]].receive()) == []


def test_a_real_command_wakes_the_agent(tmp_path: Path) -> None:
    lines = real(ExitStack(), tmp_path)
    lines.coordinator.send(stop(1), host=HOSTS[0])
    assert len(lines.wakes) == 1


def test_a_real_wait_ends_with_the_first_event_and_else_with_its_time(tmp_path: Path) -> None:
    lines = real(ExitStack(), tmp_path)
    assert list(lines.coordinator.receive(0.01)) == []
    threading.Timer(0.05, lines.agents[HOSTS[0]].send, (asked(1),)).start()
    started_s = time.monotonic()
    assert list(lines.coordinator.receive(30.0)) == [asked(1)]
    assert time.monotonic() - started_s < 10.0
