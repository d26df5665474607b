"""The guard outlives its run, even one that was killed, and sweeps up what that left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.adapters.polling import python, wait_for

from everstep.adapters.workers.guard import Guard
from everstep.adapters.workers.processes import kill_run, processes_of_run, read_stat
from everstep.adapters.workers.worker_environment import RUN_VARIABLE
from everstep.domain.evidence import ProcessState

LAUNCHER = """
import subprocess, sys
from pathlib import Path
from everstep.adapters.workers.guard import Guard
guard = Guard(run=sys.argv[1], scratch=Path(sys.argv[2]))
left = subprocess.Popen(["sleep", "600"], env={"EVERSTEP_RUN": sys.argv[1]}, start_new_session=True)
print(guard.pid, left.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run() -> Iterator[str]:
    name = f"test-guard-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    kill_run(name)


def test_at_a_proper_end_the_guard_sweeps_before_close_returns(run: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "a0001").mkdir(parents=True)
    (scratch / "a0001" / "0.page").write_bytes(b"x")
    guard = Guard(run=run, scratch=scratch)
    left = subprocess.Popen(["sleep", "600"], env={RUN_VARIABLE: run}, start_new_session=True)
    wait_for(lambda: processes_of_run(run), "the orphan")
    guard.close()
    assert processes_of_run(run) == []
    assert left.wait() == -signal.SIGKILL
    assert not scratch.exists()


def test_the_guard_does_not_belong_to_the_run_it_sweeps(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, run)  # a run inside a run
    guard = Guard(run=run, scratch=tmp_path / "none")
    assert guard.pid not in processes_of_run(run)
    guard.close()


def test_when_the_run_is_killed_with_sigkill_its_orphans_and_its_scratch_go(run: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with python(LAUNCHER, run, str(scratch), stdin=subprocess.PIPE) as launcher:
        guard, left = map(int, launcher.stdout.readline().split())
        wait_for(lambda: processes_of_run(run) == [left], "the orphan")
        os.kill(guard, signal.SIGTERM)  # a scheduler sends it to all; the guard stays
        os.kill(guard, signal.SIGINT)
        assert scratch.exists()
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        wait_for(lambda: read_stat(guard).state is ProcessState.GONE, "the guard to finish its sweep")
    assert processes_of_run(run) == []
    assert read_stat(left).state is ProcessState.GONE
    assert not scratch.exists()
