"""The line between coordinator and agents, real and simulated."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

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


def real() -> Lines:
    wakes: list[int] = []
    channel = LocalChannel(wake=lambda: wakes.append(1))
    return Lines(channel, {host: channel.agent_end(host) for host in HOSTS}, wakes)


def simulated() -> Lines:
    switchboard = SimSwitchboard()
    for host in HOSTS:
        switchboard.lines[host] = SimLine(switchboard.events)
    return Lines(switchboard, dict(switchboard.lines))


@pytest.fixture(params=[real, simulated])
def lines(request: pytest.FixtureRequest) -> Lines:
    make: Callable[[], Lines] = request.param
    return make()


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
    assert list(lines.coordinator.receive(0.0)) == [asked(number) for number in range(5)]
    assert list(lines.coordinator.receive(0.0)) == []


def test_commands_come_to_their_host_alone_in_order_and_once(lines: Lines) -> None:
    for number in range(4):
        lines.coordinator.send(stop(number, HOSTS[number % 2]), host=HOSTS[number % 2])
    assert [command.at_s for command in lines.agents[HOSTS[0]].receive()] == [0.0, 2.0]
    assert [command.at_s for command in lines.agents[HOSTS[1]].receive()] == [1.0, 3.0]
    assert list(lines.agents[HOSTS[0]].receive()) == []


def test_no_event_of_many_is_lost(lines: Lines) -> None:
    for number in range(3_000):
        lines.agents[HOSTS[0]].send(asked(number))
    received: list[object] = []
    while batch := lines.coordinator.receive(0.0):
        received += batch
    assert received == [asked(number) for number in range(3_000)]


def test_a_real_command_wakes_the_agent() -> None:
    lines = real()
    lines.coordinator.send(stop(1), host=HOSTS[0])
    assert len(lines.wakes) == 1


def test_a_real_wait_ends_with_the_first_event_and_else_with_its_time() -> None:
    lines = real()
    assert list(lines.coordinator.receive(0.01)) == []
    threading.Timer(0.05, lines.agents[HOSTS[0]].send, (asked(1),)).start()
    started_s = time.monotonic()
    assert list(lines.coordinator.receive(30.0)) == [asked(1)]
    assert time.monotonic() - started_s < 10.0
