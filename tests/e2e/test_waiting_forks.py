"""The next attempt's workers wait beside the present ones, take their place, and are gone whenever the job is."""

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, assert_no_orphans, bodies, latest_workers, run, run_id, started, wait_for

from everstep.adapters.checkpoints.memory_folder import folder_of
from everstep.adapters.checkpoints.memory_slots import RankSlots, image_path
from everstep.adapters.workers.processes import processes_of_run
from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointRefused
from everstep.policy.checkpoints import committed_steps

pytestmark = pytest.mark.e2e
SCRIPT = str(SCRIPTS / "train_attached.py")
RANKS = 2


def arguments(folder: Path, steps: int) -> list[str]:
    return ["--nproc-per-node", str(RANKS), SCRIPT, str(steps), str(folder / "digest")]


def waiting(folder: Path) -> list[int]:
    """The processes that wait to become workers, and have the slots of their rank mapped."""
    found = []
    for pid in processes_of_run(run_id(folder)):
        place = Path("/proc", str(pid))
        try:
            if (place / "comm").read_text() == "everstep-next\n" and ".slot-" in (place / "maps").read_text():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def pids(folder: Path) -> list[int]:
    found = latest_workers(folder)
    return sorted(found.pids) if found is not None else []


def attempt(folder: Path) -> int:
    found = latest_workers(folder)
    return int(found.attempt) if found is not None else 0


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untouched")
    assert run(folder, *arguments(folder, 60)).code == ExitCode.DONE
    return (folder / "digest").read_text()


def test_who_waits_becomes_the_next_worker_and_when_one_of_them_has_died_all_are_forked_anew(
    tmp_path: Path, untouched: str
) -> None:
    with started(tmp_path, *arguments(tmp_path, 60)) as job:
        wait_for(lambda: latest_workers(tmp_path) and len(waiting(tmp_path)) == RANKS, "processes that wait")
        ready, first = waiting(tmp_path), pids(tmp_path)
        descriptors = len(os.listdir(f"/proc/{first[0]}/fd"))
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: attempt(tmp_path) == 2, "the second attempt")
        assert pids(tmp_path) == ready
        wait_for(lambda: len(waiting(tmp_path)) == RANKS, "their successors")
        assert len(os.listdir(f"/proc/{ready[0]}/fd")) <= descriptors + 2 * 3  # its maps, for a while
        gone, *others = waiting(tmp_path)
        os.kill(gone, signal.SIGKILL)
        os.kill(ready[1], signal.SIGKILL)
        wait_for(lambda: attempt(tmp_path) == 3, "the third attempt")
        assert not {gone, *others} & {*pids(tmp_path)}
        assert not any(Path("/proc", str(pid)).exists() for pid in (gone, *others))
        assert job.wait(60) == ExitCode.DONE
    assert_no_orphans(tmp_path)
    assert (tmp_path / "digest").read_text() == untouched


def test_a_change_of_a_mapped_slot_is_found(tmp_path: Path, untouched: str) -> None:
    with started(tmp_path, *arguments(tmp_path, 60)) as job:
        wait_for(lambda: latest_workers(tmp_path) and len(waiting(tmp_path)) == RANKS, "processes that wait")
        memory, ready = folder_of(run_id(tmp_path)), waiting(tmp_path)
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGSTOP)  # so that nobody writes it right again
        headers = [RankSlots(memory, rank) for rank in range(RANKS)]
        step = committed_steps([found.slots() for found in headers])[0]
        slot = headers[1].find(step)
        assert slot is not None
        with image_path(memory, 1, slot).open("r+b") as file:
            file.seek(3000)
            file.write(b"damaged")
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: attempt(tmp_path) == 2, "the second attempt")
        assert pids(tmp_path) == ready
        assert job.wait(60) == ExitCode.DONE
    [refused] = [body for body in bodies(tmp_path) if isinstance(body, CheckpointRefused)]
    assert (refused.attempt, refused.path) == (2, f"memory/step-{step:08d}")
    assert (tmp_path / "digest").read_text() == untouched


def test_nobody_waits_any_more_when_the_job_was_stopped_or_killed(tmp_path: Path) -> None:
    for number, end in enumerate((signal.SIGTERM, signal.SIGKILL)):
        folder = tmp_path / str(number)
        with started(folder, *arguments(folder, 600)) as job:
            wait_for(lambda folder=folder: latest_workers(folder) and len(waiting(folder)) == RANKS, "who waits")
            memory = folder_of(run_id(folder))
            job.send_signal(end)
            job.wait(30)
        assert_no_orphans(folder)
        wait_for(lambda memory=memory: not memory.exists(), "the memory folder to go")
