"""A host without the coordinator: why it waited in vain, and that it leaves for good when its agent hangs."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.hosts import Center, center, hello

from everstep.adapters.clock import MonotonicClock
from everstep.cli import launch_hosts
from everstep.cli.host_parts import Seat
from everstep.cli.main import parser
from everstep.cli.run_arguments import plan_run
from everstep.domain.commands import FinishJob
from everstep.domain.errors import ExitCode
from everstep.domain.events import HostLost
from everstep.domain.ids import HostId


@dataclass
class HangingAgent:
    """Hangs in a call that nothing ends, as on a disk that is gone."""

    stands_still: bool
    hung: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        self.hung.wait()

    def finish(self) -> None:
        """It does not come to look."""


class Workers:
    """Counts what was asked of it."""

    stops = 0

    def wake(self) -> None:
        """Nothing waits."""

    def stop(self, *_: object) -> None:
        self.stops += 1


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Center]:
    with center(tmp_path / "credentials") as it:
        yield it


def follower(made: Center, *flags: str, host: str = "h1") -> launch_hosts._Follower:
    """A host of the center's job, as its command line makes it."""
    Path("train.py").touch()
    arguments = [f"--rdzv-endpoint={made.address}", "--run-dir=run", *flags, "train.py"]
    plan = plan_run(parser().parse_args(["run", "--nnodes=2", *arguments]))
    assert plan.hosts is not None
    found = launch_hosts._Follower(plan, plan.hosts, HostId(host), 1, lambda _: None)
    found._hello = hello(host=host)
    return found


def test_why_a_host_has_waited_in_vain_is_told(made: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick, known = "--host-timeout=0.1", f"--credentials={made.folder}"

    def said(*flags: str, host: str = "h1") -> str:
        end = follower(made, quick, *flags, host=host)._find(again=True)
        assert isinstance(end, FinishJob)
        assert end.exit_code is ExitCode.RETRY_HERE
        return end.summary

    refused = f"the coordinator at {made.address} did not let this host join within 0.1 s (there is a host h0 already"
    assert said(known, host="h0").startswith(refused)
    without = f"somebody is at {made.address}, and this host has not found the job's credentials within 0.1 s"
    assert said("--credentials=elsewhere").startswith(without)
    made.switchboard.close()
    absent = f"the coordinator at {made.address} did not come back within 0.1 s"
    assert said(known).startswith(absent)
    assert said("--credentials=elsewhere").startswith(absent)


@pytest.mark.parametrize("is_seen_by", ["the host itself", "the loss of its line"])
def test_a_host_whose_agent_hangs_leaves_for_good_without_workers(
    made: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen_by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    agent = HangingAgent(stands_still=is_seen_by == "the host itself")
    monkeypatch.setattr(launch_hosts, "make_agent", lambda *_: agent)
    monkeypatch.setattr(launch_hosts, "_LOOK_LATER_S", 0.01)
    monkeypatch.setattr(launch_hosts, "_AGENT_ENDS_WITHIN_S", 0.05)
    monkeypatch.setattr(launch_hosts, "_LAST_WORD_WITHIN_S", 0.2)
    host, workers, kills = made.join(), Workers(), list[int]()
    served = follower(made, "--grace=0")
    served._stop.kill = lambda: kills.append(1)
    if not agent.stands_still:
        made.switchboard.close()
    parts: Any = type("Parts", (), {"workers": workers})
    seat = Seat(run="run-1", host=HostId("h1"), address="127.0.0.1", number=1)
    end = served._work(host.end, seat, parts, MonotonicClock(start_at_s=0.0))
    agent.hung.set()
    assert end is not None
    assert (end.exit_code, "host h1 has left the job: its agent hangs" in end.summary) == (
        ExitCode.RETRY_ELSEWHERE,
        True,
    )
    assert (kills, workers.stops, served._hangs) == (
        [1],
        0,
        True,
    )  # the workers' own way to end may hang, too
    if agent.stands_still:
        (lost,) = made.channel.receive(5.0)
        assert isinstance(lost, HostLost)
        assert (lost.host, lost.defect) == ("h1", False)
        assert "its agent hangs" in lost.reason
    host.end.close()
