"""What is left to do at the end of a job is done, whoever is killed over it, and a state that no disk takes is kept."""

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, bodies_of, command_lines, run, run_id, started, wait_for
from tests.e2e.test_hosts import nodes
from tests.storage.faulty import FaultyStorage

from everstep.adapters.checkpoints.memory_folder import SHARED_MEMORY, folder_of
from everstep.domain.commands import FinishJob
from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointFailed, CheckpointRestored, CheckpointSaved
from everstep.worker.format.manifest import complete_steps

pytestmark = pytest.mark.e2e
SAVER, UPLOADER = "everstep.worker.saving.saver", "everstep.worker.mirror.upload"


def arguments(tmp_path: Path, steps: int) -> list[str]:
    mirror = ("--checkpoint-mirror", f"file://{tmp_path}/mirror", "--nproc-per-node", "2")
    return [*mirror, str(SCRIPTS / "train_slowly.py"), str(steps), str(tmp_path / "digest"), "0.3", "0.02"]


def last_failed(folder: Path) -> int:
    """The newest step whose save failed."""
    return max((body.step for body in bodies_of(folder, CheckpointFailed)), default=0)


def pids(module: str, *words: str) -> set[int]:
    """The processes of a module with one of the words in their command line."""
    lines = [(pid, b" ".join(line).decode()) for pid, line in command_lines()]
    return {pid for pid, line in lines if module in line and any(word in line for word in words)}


@pytest.mark.parametrize(("module", "where"), [(SAVER, "run/checkpoints"), (UPLOADER, "mirror")])
def test_who_is_killed_over_the_last_step_is_started_again_until_it_is_there(
    module: str, where: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    storage = FaultyStorage(tmp_path / where, tmp_path)
    with started(folder, *arguments(tmp_path, 200), **storage.environment) as job, contextlib.closing(storage):
        wait_for(lambda: bodies_of(folder, CheckpointSaved), "a save", within_s=90)
        storage.fail(errno.EIO)
        if module == SAVER:
            wait_for(lambda: last_failed(folder) == 200, "the ranks' own save to fail", within_s=90)
        storage.hang()
        wait_for(lambda: bodies_of(folder, FinishJob), "the end of training", within_s=90)
        killed: set[int] = set()
        for _ in range(2):
            wait_for(lambda: pids(module, run_id(folder), str(folder)) - killed, f"{module} at work")
            [pid] = pids(module, run_id(folder), str(folder)) - killed
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        storage.heal()
        assert job.wait(90) == ExitCode.DONE
    assert complete_steps(folder / "checkpoints")[0] == 200
    assert complete_steps(tmp_path / "mirror")[0] == 200
    assert not folder_of(run_id(folder)).exists()
    assert not list((folder / "checkpoints").glob(".mirroring-*"))


def test_what_a_full_disk_does_not_take_at_the_end_stays_in_memory_for_the_same_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    disk = FaultyStorage(folder / "checkpoints", tmp_path)
    disk.fail(errno.ENOSPC, "write")
    done = run(folder, *arguments(tmp_path, 100), **disk.environment)
    memory = folder_of(run_id(folder))
    assert done.code == ExitCode.DONE, done.err
    assert f"the newest step could not be made durable and stays in {memory}, which holds 0.0 GB of memory" in done.err
    assert complete_steps(folder / "checkpoints") == []
    disk.heal()
    go_on(folder, tmp_path, 100, disk.environment)


def test_after_kill_9_of_everything_at_the_end_the_same_command_makes_the_last_step_durable(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    disk = FaultyStorage(folder / "checkpoints", tmp_path)
    with started(folder, *arguments(tmp_path, 200), **disk.environment) as job, contextlib.closing(disk):
        wait_for(lambda: bodies_of(folder, CheckpointSaved), "a save", within_s=90)
        disk.fail(errno.EIO)
        wait_for(lambda: last_failed(folder) == 200, "the ranks' own save to fail", within_s=90)
        disk.hang()
        wait_for(lambda: bodies_of(folder, FinishJob), "the end of training", within_s=90)
        job.kill()
        for pid in pids(SAVER, run_id(folder)):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not pids(SAVER, run_id(folder)), "the saver to be gone")
    assert folder_of(run_id(folder)).exists()
    assert complete_steps(folder / "checkpoints")[0] < 200
    go_on(folder, tmp_path, 200, disk.environment)


def test_two_nodes_whose_disk_was_full_at_the_end_make_the_last_step_durable_when_they_are_started_again(
    tmp_path: Path,
) -> None:
    disk = FaultyStorage(tmp_path / "run" / "checkpoints", tmp_path)
    disk.fail(errno.ENOSPC, "write")
    program = (str(SCRIPTS / "train_slowly.py"), "100", str(tmp_path / "digest"), "0.3", "0.02")
    with nodes(tmp_path, *program, **disk.environment) as job:
        both = [job.start("--node-rank", str(rank)) for rank in (0, 1)]
        assert job.codes(*both) == [ExitCode.DONE, ExitCode.DONE], job.everything()
        assert "the newest step could not be made durable and stays in" in job.said(0)
        assert complete_steps(job.run_dir / "checkpoints") == []
        disk.heal()
        both = [job.start("--node-rank", str(rank)) for rank in (1, 0)]  # the second to come is the coordinator's
        assert job.codes(*both) == [ExitCode.DONE, ExitCode.DONE], job.everything()
        assert job.of(CheckpointRestored)[-1].step == complete_steps(job.run_dir / "checkpoints")[0] == 100
        once_more = job.start("--node-rank", "0")
        assert job.codes(once_more) == [ExitCode.DONE]
        assert "holds a run that is done already" in job.said()
    assert not list(SHARED_MEMORY.glob(f"everstep-memory-*-{run_id(job.run_dir)}*"))


def go_on(folder: Path, tmp_path: Path, step: int, environment: dict[str, str]) -> None:
    """The same command again, with a disk that works."""
    expected = (tmp_path / "digest").read_text()
    again = run(folder, *arguments(tmp_path, step), **environment)
    assert again.code == ExitCode.DONE, again.err
    assert "the run is done, but its last step may be in memory alone" in again.err
    assert again.bodies(CheckpointRestored)[-1].step == step
    assert complete_steps(folder / "checkpoints")[0] == complete_steps(tmp_path / "mirror")[0] == step
    assert (tmp_path / "digest").read_text() == expected
    assert not folder_of(run_id(folder)).exists()
    once_more = run(folder, *arguments(tmp_path, step), **environment)
    assert "holds a run that is done already" in once_more.out + once_more.err
