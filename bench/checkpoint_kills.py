"""Kills workers, savers and agents of a job at random moments, says the command again, and compares the final weights.

Every kill must leave a complete checkpoint, never older than the newest step that was complete on all ranks before.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/checkpoint_kills.py` works

from everstep.adapters.ledger_file import read_entries
from everstep.adapters.memory_folder import folder_of
from everstep.adapters.memory_slots import RankSlots, SavePages, ranks_present
from everstep.adapters.processes import processes_of_run
from everstep.domain.errors import EverstepError
from everstep.domain.events import CheckpointRefused, CheckpointRestored, RunStarted
from everstep.policy.checkpoints import committed_steps
from everstep.worker.checkpoint_manifest import complete_steps

SCRIPT = Path(__file__).resolve().parent / "kill_target.py"
WORLD_SIZE = 2
WITHIN_S = 60.0


@dataclass(slots=True)
class Tally:
    """What happened."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("worker", "all workers", "saver", "agent"), 0))
    went_back: list[str] = field(default_factory=list)


class Victim:
    """One run, started again after each death of its agent."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self._command = [
            *(str(Path(sys.executable).with_name("everstep")), "run", "--nproc-per-node", str(WORLD_SIZE)),
            *("--quiet", "--run-dir", str(folder), str(SCRIPT), str(steps), str(folder / "digest")),
        ]
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        log = (self.folder.parent / f"{self.folder.name}.log").open("ab")
        with log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def again(self) -> None:
        self.process = self._start()

    @property
    def run(self) -> str:
        with contextlib.suppress(EverstepError, OSError):
            for entry in read_entries(self.folder / "ledger.jsonl"):
                if isinstance(entry.body, RunStarted):
                    return str(entry.body.run)
        return ""

    def committed(self) -> int:
        """The newest step that is complete on all ranks in memory, or on disk."""
        memory, found = folder_of(self.run), 0
        with contextlib.suppress(OSError):
            found = next(iter(complete_steps(self.folder / "checkpoints")), 0)
        with contextlib.suppress(EverstepError, OSError):
            if memory.is_dir() and len(ranks_present(memory)) == WORLD_SIZE:
                ranks = [RankSlots(memory, rank).slots() for rank in range(WORLD_SIZE)]
                found = max(found, next(iter(committed_steps(ranks)), 0))
        return found

    def saver(self) -> int:
        with contextlib.suppress(EverstepError, OSError):
            if (memory := folder_of(self.run)).is_dir():
                return SavePages(memory).word().pid
        return 0

    def workers(self) -> list[int]:
        marked = processes_of_run(self.run) if self.run else []
        return [pid for pid in marked if b"LOCAL_RANK=" in _environment(pid) or _is_worker(pid)]


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _is_worker(pid: int) -> bool:
    """Forks of the zygote have its environment; only the ranks have mapped a progress page."""
    with contextlib.suppress(OSError):
        return ".page" in Path(f"/proc/{pid}/maps").read_text()
    return False


def kill_once(victim: Victim, chance: random.Random, tally: Tally) -> None:
    """Wait for progress, then kill something at a random moment; go on."""
    before, ends_s = victim.committed(), time.monotonic() + WITHIN_S
    while victim.committed() < before + 2 and victim.process.poll() is None and time.monotonic() < ends_s:
        time.sleep(0.005)
    time.sleep(chance.random() * 0.08)
    if victim.process.poll() is not None:
        return
    kind = chance.choice(list(tally.kills))
    workers, newest = victim.workers(), victim.committed()
    targets = {
        "worker": workers[chance.randrange(len(workers)) :][:1] if workers else [],
        "all workers": workers,
        "saver": [victim.saver()],
        "agent": [victim.process.pid],
    }[kind]
    for pid in targets:
        if pid > 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                tally.kills[kind] += pid == targets[0]
    if kind == "agent":
        victim.process.wait()
        time.sleep(chance.random() * 0.2)
        victim.again()
    if (after := victim.committed()) < newest and kind != "agent":  # then it moves from memory to disk
        tally.went_back.append(f"{kind}: {newest} before, {after} after")


def train(folder: Path, steps: int, chance: random.Random | None, tally: Tally, kills: int) -> tuple[str, Victim]:
    victim = Victim(folder, steps)
    while victim.process.poll() is None:
        if chance is not None and sum(tally.kills.values()) < kills:
            kill_once(victim, chance, tally)
        else:
            time.sleep(0.05)
        if victim.process.poll() not in (None, 0):
            victim.again()  # its budget of restarts is spent: a person would say it again as well
    digest = folder / "digest"
    return digest.read_text() if digest.exists() else "", victim


def main() -> int:
    """Returns 0 when no kill lost anything and the weights are the same."""
    parser = argparse.ArgumentParser(description="Kill at random moments of saves and compare the weights.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument(
        "--steps", type=int, default=100, help="steps of each job; jobs follow until all kills are done"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance, tally = random.Random(args.seed), Tally()
    folder = Path(tempfile.mkdtemp(prefix="everstep-kills-"))
    expected, _ = train(folder / "whole", args.steps, None, tally, 0)
    assert expected, "the untouched run failed"
    number = different = refused = restored = 0
    while sum(tally.kills.values()) < args.kills:
        number += 1
        digest, victim = train(folder / f"job-{number}", args.steps, chance, tally, args.kills)
        different += digest != expected
        bodies = [entry.body for entry in read_entries(victim.folder / "ledger.jsonl")]
        refused += sum(isinstance(body, CheckpointRefused) for body in bodies)
        restored += sum(isinstance(body, CheckpointRestored) for body in bodies)
        print(f"job {number}: {sum(tally.kills.values())} kills {tally.kills}, same weights: {digest == expected}")
    print(f"{sum(tally.kills.values())} kills {tally.kills}, {number} jobs, {restored} resumes, {refused} refusals")
    print(f"jobs with other weights: {different}; went back: {tally.went_back or 'never'}")
    if different or tally.went_back:
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
