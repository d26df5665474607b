"""What the memory tier takes of the host: at most three times the state, also after restarts, and nothing later."""

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, bodies, latest_workers, run, run_id, started, wait_for

from everstep.adapters.checkpoints.memory_folder import folder_of
from everstep.adapters.checkpoints.memory_slots import RankSlots, SavePages, ranks_present
from everstep.adapters.workers.processes import processes_of_run
from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointRestored
from everstep.policy.checkpoints import committed_steps

pytestmark = pytest.mark.e2e
LARGE = str(SCRIPTS / "train_large.py")
STATE_BYTES = 3 * 4 * 2048 * (2048 + 1)
"""Parameters and AdamW's two averages, in single precision, once for both ranks."""
SMALL_BYTES = 2_000_000
"""For headers, plans, steps and random numbers."""


def steps_in_memory(memory: Path) -> list[int]:
    ranks = ranks_present(memory)
    return committed_steps([RankSlots(memory, rank).slots() for rank in ranks]) if len(ranks) == 2 else []


def taken_bytes(memory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in memory.iterdir())


def mapped_bytes(pids: list[int], memory: Path) -> int:
    """What the kernel counts of this folder for these processes together, each page once (PSS)."""
    total = 0
    for pid in pids:
        inside = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.partition(" ")[0]:
                inside = str(memory) in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_memory_holds_three_times_the_state_at_most_also_after_a_restart(tmp_path: Path) -> None:
    with started(tmp_path, "--nproc-per-node", "2", LARGE) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        memory, run = folder_of(run_id(tmp_path)), run_id(tmp_path)
        wait_for(lambda: len(steps_in_memory(memory)) >= 2, "two steps in memory")
        before = taken_bytes(memory)
        assert STATE_BYTES < before <= 3 * STATE_BYTES + SMALL_BYTES
        pids = [*processes_of_run(run), SavePages(memory).word().pid]
        assert mapped_bytes([pid for pid in pids if pid], memory) <= 3 * STATE_BYTES + SMALL_BYTES
        workers = latest_workers(tmp_path)
        assert workers is not None
        reached = steps_in_memory(memory)[0]
        for pid in workers.pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: any(isinstance(body, CheckpointRestored) for body in bodies(tmp_path)), "the restart")
        wait_for(lambda: steps_in_memory(memory)[:1] > [reached + 4], "more steps in memory")
        assert taken_bytes(memory) <= 3 * STATE_BYTES + SMALL_BYTES
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == ExitCode.PREEMPTED
    assert not memory.exists()


def test_memory_of_a_job_of_which_everything_was_killed_goes_with_the_next_start(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    with started(tmp_path / "a", "--nproc-per-node", "2", LARGE) as job:
        wait_for(lambda: latest_workers(tmp_path / "a"), "workers")
        memory = folder_of(run_id(tmp_path / "a"))
        wait_for(lambda: steps_in_memory(memory), "a step in memory")
        wait_for(lambda: SavePages(memory).word().pid, "the saver")
        saver = SavePages(memory).word().pid
        os.kill(saver, signal.SIGSTOP)  # so that it cannot clean up before it is killed
        job.send_signal(signal.SIGKILL)
        os.kill(saver, signal.SIGKILL)
        wait_for(lambda: not processes_of_run(run_id(tmp_path / "a")), "its workers to end")
    assert memory.exists()
    assert run(tmp_path / "b", "--nproc-per-node", "1", str(script)).code == ExitCode.DONE
    assert not memory.exists()
