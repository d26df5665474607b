"""A process beside the workers is started again when it dies, ends when its pipe closes, and is not awaited in vain."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.adapters.polling import wait_for

from everstep.adapters.workers import piped_process
from everstep.adapters.workers.piped_process import PipedProcess

PROGRAM = """\
import os, sys, time
pipe, mode, log = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(log, "a") as file:
    file.write("started ")
if mode == "dies":
    sys.exit(1)
while os.read(pipe, 1):
    pass
with open(log, "a") as file:
    file.write("finishing ")
if mode == "stubborn" or (mode == "dies twice" and open(log).read().count("finishing") < 3):
    time.sleep(60)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "piped_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path / "log"


def starts(log: Path) -> int:
    return log.read_text().count("started") if log.exists() else 0


def test_a_killed_one_is_started_again_and_finishes_when_asked(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piped_process, "_BETWEEN_STARTS_S", 0.0)
    process = PipedProcess("piped_program", ["obeys", str(log)])
    process.ensure()
    wait_for(lambda: starts(log) == 1, "a start")
    first = process.pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not process.is_alive(), "its end")
    process._pause_s = 0.0
    process.ensure()
    wait_for(lambda: starts(log) == 2, "another start")
    assert process.pid != first
    assert process.finish(within_s=20, what="nothing")
    assert not process.is_alive()


def test_one_that_dies_young_is_started_ever_less_often(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = PipedProcess("piped_program", ["dies", str(log)])
    process._pause_s = 0.05
    ends_s = time.monotonic() + 2.0
    while time.monotonic() < ends_s:
        process.ensure()
        time.sleep(0.005)
    assert 1 <= starts(log) <= 6  # after 0.05, 0.1, 0.2, 0.4, 0.8 s and not sixty times
    assert process._pause_s > 0.1


def test_one_that_is_killed_over_what_is_left_is_started_again_until_it_is_done(log: Path) -> None:
    process = PipedProcess("piped_program", ["dies twice", str(log)])

    def kill_twice() -> None:
        for number in (1, 2):
            wait_for(
                lambda number=number: log.exists() and log.read_text().count("finishing") == number, "the last work"
            )
            os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_twice)
    killer.start()
    assert process.finish(within_s=60, what="nothing")
    killer.join()
    assert log.read_text().count("finishing") == 3


def test_one_that_dies_over_it_each_time_is_not_said_to_be_done(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = PipedProcess("piped_program", ["dies", str(log)])
    with caplog.at_level(logging.WARNING):
        assert not process.finish(within_s=60, what="the newest step is not on disk")
    told = "the newest step is not on disk: its process has died 5 times over it, at last with exit code 1"
    assert caplog.messages == [told]
    assert starts(log) == 5


def test_one_that_does_not_finish_is_told_of_and_left_to_it(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = PipedProcess("piped_program", ["stubborn", str(log)])
    process.ensure()
    wait_for(lambda: starts(log) == 1, "a start")
    with caplog.at_level(logging.WARNING):
        assert not process.finish(within_s=0.2, what="the newest step is not on disk")
    assert caplog.messages == [f"the newest step is not on disk; process {process.pid} goes on by itself until it is"]
    os.kill(process.pid, signal.SIGKILL)
