"""A stop that is announced by SIGTERM saves the step in flight: after it, no step that was done is done again."""

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, bodies, latest_workers, run, started, wait_for

from everstep.domain.commands import RecordVerdict
from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointRestored, WorkersStarted

pytestmark = pytest.mark.e2e
STEPS = 80


def arguments(folder: Path, ranks: int) -> list[str]:
    return ["--nproc-per-node", str(ranks), str(SCRIPTS / "train_counted.py"), str(STEPS), str(folder)]


def done_by(folder: Path, rank: int) -> list[int]:
    path = folder / f"steps.{rank}"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stop_from_outside_costs_no_step(tmp_path: Path, ranks: int) -> None:
    with started(tmp_path, *arguments(tmp_path, ranks)) as job:
        wait_for(lambda: len(done_by(tmp_path, 0)) >= 15, "15 steps")
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == ExitCode.PREEMPTED
    before = [done_by(tmp_path, rank) for rank in range(ranks)]
    assert before == [list(range(1, len(before[0]) + 1))] * ranks
    assert len(before[0]) < STEPS
    done = run(tmp_path, *arguments(tmp_path, ranks))
    assert done.code == ExitCode.DONE, done.err
    assert [event.step for event in done.bodies(CheckpointRestored)] == [len(before[0])]
    assert [done_by(tmp_path, rank) for rank in range(ranks)] == [list(range(1, STEPS + 1))] * ranks


def test_sigterm_to_one_worker_costs_a_restart_and_no_step(tmp_path: Path) -> None:
    with started(tmp_path, *arguments(tmp_path, 2)) as job:
        wait_for(lambda: len(done_by(tmp_path, 0)) >= 15, "15 steps")
        workers = latest_workers(tmp_path)
        assert workers is not None
        os.kill(workers.pids[1], signal.SIGTERM)
        assert job.wait(60) == ExitCode.DONE
    assert [done_by(tmp_path, rank) for rank in range(2)] == [list(range(1, STEPS + 1))] * 2
    assert len([body for body in bodies(tmp_path) if isinstance(body, WorkersStarted)]) == 2
    [verdict] = [body.verdict for body in bodies(tmp_path) if isinstance(body, RecordVerdict)]
    assert (verdict.ranks, "SIGTERM" in verdict.reason) == ((1,), True), verdict.reason
