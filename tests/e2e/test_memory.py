"""Memory survives every worker and becomes durable when the job ends, however it ends; nothing of it stays behind."""

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, latest_workers, run, run_id, started, wait_for

from everstep.adapters.checkpoints.memory_folder import folder_of
from everstep.adapters.checkpoints.memory_slots import RankSlots, SavePages, ranks_present
from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointRestored, CheckpointSaved
from everstep.policy.checkpoints import committed_steps
from everstep.worker.format.manifest import complete_steps

pytestmark = pytest.mark.e2e
SCRIPT = str(SCRIPTS / "train_attached.py")


def arguments(folder: Path, steps: int) -> list[str]:
    return ["--nproc-per-node", "3", SCRIPT, str(steps), str(folder / "digest")]


def newest_in_memory(memory: Path) -> int:
    ranks = ranks_present(memory)
    if len(ranks) < 3:
        return 0
    return next(iter(committed_steps([RankSlots(memory, rank).slots() for rank in ranks])), 0)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untouched")
    done = run(folder, *arguments(folder, 40))
    assert done.code == ExitCode.DONE
    saved = done.bodies(CheckpointSaved)  # the first by the saver, the last by the ranks
    assert (saved[0].step < 40, saved[-1].step) == (True, 40)
    assert saved[0].path == f"checkpoints/step-{saved[0].step:08d}"
    assert list(Path("/dev/shm").glob(f"everstep-memory-*{run_id(folder)}*")) == []
    return (folder / "digest").read_text()


def memory_of(folder: Path) -> Path:
    wait_for(lambda: latest_workers(folder), "workers")
    return folder_of(run_id(folder))


def saver_of(memory: Path) -> int:
    """The saver's pid, once it has made something durable."""
    wait_for(lambda: SavePages(memory).word().saves, "the saver's first save")
    return SavePages(memory).word().pid


def test_after_sigterm_the_newest_step_in_memory_is_on_disk_and_the_job_goes_on_from_it(
    tmp_path: Path, untouched: str
) -> None:
    with started(tmp_path, *arguments(tmp_path, 40)) as job:
        memory = memory_of(tmp_path)
        wait_for(lambda: newest_in_memory(memory) >= 12, "12 steps in memory")
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == ExitCode.PREEMPTED
    newest = complete_steps(tmp_path / "checkpoints")[0]
    assert newest >= 12
    assert not memory.exists()
    done = run(tmp_path, *arguments(tmp_path, 40))
    assert done.code == ExitCode.DONE, done.err
    assert [event.step for event in done.bodies(CheckpointRestored)] == [newest]
    assert (tmp_path / "digest").read_text() == untouched


def test_after_kill_9_of_everstep_run_its_saver_makes_memory_durable_and_cleans_up(
    tmp_path: Path, untouched: str
) -> None:
    with started(tmp_path, *arguments(tmp_path, 40)) as job:
        memory = memory_of(tmp_path)
        wait_for(lambda: newest_in_memory(memory) >= 12, "12 steps in memory")
        job.send_signal(signal.SIGKILL)
        wait_for(lambda: not memory.exists(), "the memory folder to go")
    assert complete_steps(tmp_path / "checkpoints")[0] >= 12
    done = run(tmp_path, *arguments(tmp_path, 40))
    assert done.code == ExitCode.DONE, done.err
    assert (tmp_path / "digest").read_text() == untouched


def test_after_kill_9_of_everything_the_same_command_takes_memory_over(tmp_path: Path, untouched: str) -> None:
    with started(tmp_path, *arguments(tmp_path, 40)) as job:
        memory = memory_of(tmp_path)
        wait_for(lambda: newest_in_memory(memory) >= 12, "12 steps in memory")
        saver = saver_of(memory)
        os.kill(saver, signal.SIGSTOP)  # so that it cannot save before it is killed
        job.send_signal(signal.SIGKILL)
        os.kill(saver, signal.SIGKILL)
    assert memory.exists()
    on_disk = complete_steps(tmp_path / "checkpoints")[0]
    assert on_disk < newest_in_memory(memory)
    done = run(tmp_path, *arguments(tmp_path, 40))
    assert done.code == ExitCode.DONE, done.err
    [restored] = done.bodies(CheckpointRestored)
    assert restored.path == "memory"
    assert restored.step > on_disk
    assert (tmp_path / "digest").read_text() == untouched
    assert not memory.exists()


def test_a_saver_that_is_killed_is_started_again_and_training_never_waits(tmp_path: Path, untouched: str) -> None:
    with started(tmp_path, *arguments(tmp_path, 40)) as job:
        memory = memory_of(tmp_path)
        wait_for(lambda: newest_in_memory(memory) >= 6, "6 steps in memory")
        first = saver_of(memory)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: SavePages(memory).word().pid not in (0, first), "another saver")
        assert job.wait(60) == ExitCode.DONE
    assert (tmp_path / "digest").read_text() == untouched
    assert complete_steps(tmp_path / "checkpoints")[0] == 40
