"""Kills workers, savers and agents of a job at random moments, says the command again, and compares the final weights.

Every kill must leave a complete checkpoint, never older than the newest step that was complete on all ranks before,
and every resume must begin with one that is no older than that either.
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
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/checkpoint_kills.py` works

from everstep.adapters.ledger_file import read_entries
from everstep.adapters.memory_folder import folder_of
from everstep.adapters.memory_slots import RankSlots, SavePages, ranks_present
from everstep.adapters.processes import processes_of_run
from everstep.domain.codec import Entry
from everstep.domain.commands import StartWorkers
from everstep.domain.errors import EverstepError
from everstep.domain.events import CheckpointRefused, CheckpointRestored, RunStarted
from everstep.policy.checkpoints import committed_steps
from everstep.worker.format.manifest import complete_steps

SCRIPT = Path(__file__).resolve().parent / "kill_target.py"
WORLD_SIZE = 2
WITHIN_S = 60.0
SHARES = {"worker": 0.35, "all workers": 0.3, "saver": 0.25, "agent": 0.1}
"""How often each is killed: after an agent's death everything starts cold, which takes as long as ten other kills."""


@dataclass(slots=True)
class Tally:
    """What happened. `moments` has the wall time of each kill of the present job and what was complete then."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHARES, 0))
    went_back: list[str] = field(default_factory=list)
    moments: list[tuple[datetime, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.kills.values())


class Victim:
    """One run, started again after each death of its agent."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self._command = [
            *(str(Path(sys.executable).with_name("everstep")), "run", "--nproc-per-node", str(WORLD_SIZE)),
            *("--quiet", "--run-dir", str(folder), str(SCRIPT), str(steps), str(folder / "digest")),
        ]
        self._run = ""
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
        if not self._run:
            with contextlib.suppress(EverstepError, OSError):
                first = next(iter(read_entries(self.folder / "ledger.jsonl")), None)
                if first is not None and isinstance(first.body, RunStarted):
                    self._run = str(first.body.run)
        return self._run

    def committed(self) -> int:
        """The newest step that is complete on all ranks in memory, or on disk.

        Memory is looked at first: it goes only when the disk has what was in it.
        """
        memory, found = folder_of(self.run), 0
        with contextlib.suppress(EverstepError, OSError):
            if self.run and len(ranks_present(memory)) == WORLD_SIZE:
                ranks = [RankSlots(memory, rank).slots() for rank in range(WORLD_SIZE)]
                found = next(iter(committed_steps(ranks)), 0)
        with contextlib.suppress(OSError):
            found = max(found, next(iter(complete_steps(self.folder / "checkpoints")), 0))
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
    [kind] = chance.choices(list(SHARES), list(SHARES.values()))
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
    tally.moments.append((datetime.now(UTC), newest))
    if kind == "agent":
        victim.process.wait()
        time.sleep(chance.random() * 0.2)
        victim.again()
    if (after := victim.committed()) < newest:
        tally.went_back.append(f"{kind}: {newest} before, {after} after")


def resumes_that_went_back(entries: list[Entry], moments: list[tuple[datetime, int]]) -> list[str]:
    """Resumes from something older than what was complete when the attempt before was killed."""
    found, floor = [], 0
    for entry in entries:
        if isinstance(entry.body, StartWorkers):
            began = datetime.fromisoformat(entry.wall)
            floor = max((step for at, step in moments if at < began), default=0)
        elif isinstance(entry.body, CheckpointRestored) and entry.body.step < floor:
            found.append(f"attempt {entry.body.attempt} resumed from step {entry.body.step}, {floor} was complete")
    return found


def train(folder: Path, steps: int, chance: random.Random | None, tally: Tally, kills: int) -> tuple[str, Victim]:
    victim, in_vain, reached = Victim(folder, steps), 0, 0
    while victim.process.poll() is None:
        if chance is not None and tally.total < kills:
            kill_once(victim, chance, tally)
        else:
            time.sleep(0.05)
        if victim.process.poll() not in (None, 0):
            in_vain = 0 if victim.committed() > reached else in_vain + 1
            reached = victim.committed()
            if in_vain > 5:
                raise SystemExit(f"the job cannot run at all: see {victim.folder}.log")
            victim.again()  # its budget of restarts is spent: a person would say it again as well
    digest = folder / "digest"
    return digest.read_text() if digest.exists() else "", victim


def main() -> int:
    """Returns 0 when no kill lost anything and the weights are the same."""
    parser = argparse.ArgumentParser(description="Kill at random moments of saves and compare the weights.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--steps", type=int, default=150, help="steps of each job; jobs follow until all are done")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance, tally = random.Random(args.seed), Tally()
    folder = Path(tempfile.mkdtemp(prefix="everstep-kills-"))
    expected, _ = train(folder / "whole", args.steps, None, tally, 0)
    assert expected, "the untouched run failed"
    number = different = refused = restored = 0
    began_s = time.monotonic()
    while tally.total < args.kills:
        number += 1
        tally.moments.clear()
        digest, victim = train(folder / f"job-{number}", args.steps, chance, tally, args.kills)
        different += digest != expected
        entries = list(read_entries(victim.folder / "ledger.jsonl"))
        tally.went_back += resumes_that_went_back(entries, tally.moments)
        bodies = [entry.body for entry in entries]
        refused += sum(isinstance(body, CheckpointRefused) for body in bodies)
        restored += sum(isinstance(body, CheckpointRestored) for body in bodies)
        took_s = time.monotonic() - began_s
        print(f"job {number}: {tally.total} kills {tally.kills} in {took_s:.0f} s, same weights: {digest == expected}")
    print(f"{tally.total} kills {tally.kills}, {number} jobs, {restored} resumes, {refused} refusals, {took_s:.0f} s")
    print(f"jobs with other weights: {different}; went back: {tally.went_back or 'never'}")
    if different or tally.went_back:
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
