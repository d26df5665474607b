"""Ctrl-C at the coordinator: ends the job with grace, and also where the agent of its own host hangs."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.adapters.channel import LocalChannel
from everstep.adapters.clock import MonotonicClock
from everstep.cli.coordinate import _signals
from everstep.cli.host_parts import Seat
from everstep.domain.ids import HostId


@pytest.mark.parametrize(("hangs", "told"), [(False, ["StopRequested"]), (True, ["StopRequested", "HostLost"])])
def test_ctrl_c_asks_for_the_end_and_does_not_wait_for_an_agent_that_hangs(hangs: bool, told: list[str]) -> None:
    channel = LocalChannel(wake=lambda: None)
    agent: Any = SimpleNamespace(stands_still=hangs)
    seat = Seat(run="no-such-run", host=HostId("h"), address="127.0.0.1")
    with _signals(seat, agent, channel, MonotonicClock(start_at_s=0.0)):
        os.kill(os.getpid(), signal.SIGINT)
        events = channel.receive(5.0)
    assert [type(event).__name__ for event in events] == told
