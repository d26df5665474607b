"""A disk that hangs or fails costs durability and never training: people are bodies_of, and it comes back by itself."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e import jobs
from tests.e2e.jobs import SCRIPTS, bodies_of, latest_workers, run, started
from tests.storage.faulty import FaultyStorage

from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointDelayed,
    CheckpointFailed,
    CheckpointMirrored,
    CheckpointRestored,
    CheckpointSaved,
    StallSuspected,
    StepsFinished,
)
from everstep.worker.format.manifest import complete_steps

pytestmark = pytest.mark.e2e
SCRIPT = str(SCRIPTS / "train_slowly.py")


def arguments(folder: Path, steps: int, every_s: float = 0.3, step_s: float = 0.02) -> list[str]:
    return ["--nproc-per-node", "2", SCRIPT, str(steps), str(folder / "digest"), str(every_s), str(step_s)]


def wait_for(condition: Callable[[], object], what: str) -> None:
    jobs.wait_for(condition, what, within_s=90)  # a start from a cold disk on a busy machine is in it


def step_ends(folder: Path) -> list[float]:
    return [at_s for body in bodies_of(folder, StepsFinished) for at_s in body.ended_at_s]


def pace_s(ends: list[float]) -> float:
    """The median step."""
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(ends))


def saved(folder: Path) -> int:
    """The newest step that the ledger knows as durable."""
    return max((body.step for body in bodies_of(folder, CheckpointSaved)), default=0)


def test_a_hung_disk_slows_no_step_blocks_no_restart_and_is_told_of_while_it_hangs(tmp_path: Path) -> None:
    run(tmp_path / "untouched", *arguments(tmp_path, 1000, step_s=0.0))
    expected = (tmp_path / "digest").read_text()
    (tmp_path / "digest").unlink()
    folder = tmp_path / "run"
    disk = FaultyStorage(folder / "checkpoints", tmp_path)
    with started(folder, *arguments(tmp_path, 1000), **disk.environment) as job, contextlib.closing(disk):
        wait_for(lambda: len(bodies_of(folder, CheckpointSaved)) >= 2, "two saves")
        before = len(step_ends(folder))
        disk.hang()
        wait_for(lambda: bodies_of(folder, CheckpointDelayed), "a word about the disk")
        durable, steps = complete_steps(folder / "checkpoints")[0], len(step_ends(folder))
        [told] = bodies_of(folder, CheckpointDelayed)
        assert 10 <= told.waited_s < 15
        assert "has not answered" in told.reason
        assert steps > durable + 100  # it trained on meanwhile
        os.kill(latest_workers(folder).pids[1], signal.SIGKILL)
        wait_for(lambda: bodies_of(folder, CheckpointRestored), "a resume while the disk hangs")
        [resumed] = bodies_of(folder, CheckpointRestored)
        assert (resumed.path, resumed.step > steps - 50) == ("memory", True)
        disk.heal()
        wait_for(lambda: saved(folder) > resumed.step, "durability to come back")
        assert job.wait(90) == ExitCode.DONE
        assert job.stderr is not None
        words = job.stderr.read()
    assert "is not durable yet: the disk has not answered for 10 s; training goes on" in words
    assert "checkpoints are durable again" in words
    assert not bodies_of(folder, StallSuspected)
    assert (tmp_path / "digest").read_text() == expected
    ends = step_ends(folder)
    assert pace_s(ends[before:steps]) < pace_s(ends[:before]) * 1.5
    assert max(later - sooner for sooner, later in itertools.pairwise(ends[before:steps])) < 5  # of 10 s and more


def test_a_full_failing_read_only_or_removed_folder_is_told_of_and_saved_to_again_once_it_works(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    disk = FaultyStorage(folder / "checkpoints", tmp_path)
    sentences = {errno.ENOSPC: "No space left", errno.EIO: "Input/output error", errno.EROFS: "Read-only file system"}
    calls = {errno.ENOSPC: "write", errno.EIO: "fsync", errno.EROFS: "open,mkdir,rename"}
    with started(folder, *arguments(tmp_path, 100_000, 0.2), **disk.environment) as job, contextlib.closing(disk):
        for number, sentence in sentences.items():
            wait_for(lambda: saved(folder), "a save")
            failures = len(bodies_of(folder, CheckpointFailed))
            disk.fail(number, calls[number])
            wait_for(lambda count=failures: len(bodies_of(folder, CheckpointFailed)) > count, f"news of {sentence}")
            assert sentence in bodies_of(folder, CheckpointFailed)[-1].reason
            disk.heal()
            last = saved(folder)
            wait_for(lambda last=last: saved(folder) > last, f"durability after {sentence}")
        shutil.rmtree(folder / "checkpoints")
        last = saved(folder)
        wait_for(lambda: saved(folder) > last, "durability in a folder made anew")
        disk.fail(errno.EROFS, "open,mkdir,rename")
        os.kill(latest_workers(folder).pids[0], signal.SIGKILL)  # a restart while the folder cannot be written
        wait_for(lambda: bodies_of(folder, CheckpointRestored), "a resume")
        disk.heal()
        last = saved(folder)
        wait_for(lambda: saved(folder) > last, "durability after the resume")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == ExitCode.PREEMPTED
    assert not list((folder / "checkpoints").glob(".*"))


def test_a_run_on_another_host_goes_on_from_the_mirror(tmp_path: Path) -> None:
    mirror = ("--checkpoint-mirror", f"file://{tmp_path}/bucket/run")
    run(tmp_path / "untouched", *arguments(tmp_path, 300, step_s=0.0))
    expected = (tmp_path / "digest").read_text()
    first, second = tmp_path / "first", tmp_path / "second"
    with started(first, *mirror, *arguments(tmp_path, 300)) as job:
        wait_for(lambda: len(bodies_of(first, CheckpointMirrored)) >= 2, "two steps in the mirror")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == ExitCode.PREEMPTED
    newest = complete_steps(first / "checkpoints")[0]  # saved by the stop itself
    assert newest > bodies_of(first, CheckpointMirrored)[-1].step - 1
    shutil.rmtree(first)
    done = run(second, *mirror, *arguments(tmp_path, 300))
    assert done.code == ExitCode.DONE, done.err
    assert [event.step for event in done.bodies(CheckpointRestored)] == [newest]
    assert f"step {newest} was fetched from file://" in done.err
    assert (tmp_path / "digest").read_text() == expected
    assert complete_steps(tmp_path / "bucket" / "run")[0] == 300
