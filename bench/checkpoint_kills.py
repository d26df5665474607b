"""`make bench-checkpoint-kills`: kills -9 at random moments of saves, and the weights of every job compared.

Workers, saver, uploader or the agent itself die; the same command is said again. No kill may cost a complete checkpoint
or make the mirror count a torn one, every resume must begin with what was complete before, and the final weights must
be those of a run that nothing touched, bit for bit.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/checkpoint_kills.py` works

from bench.killed_run import KilledRun
from bench.machine import load1
from everstep.domain.codec import Entry
from everstep.domain.commands import StartWorkers
from everstep.domain.events import CheckpointMirrored, CheckpointRefused, CheckpointRestored

RESULT = Path(__file__).resolve().parent / "results" / "checkpoint_kills.json"
WITHIN_S = 60.0
SHARES = {"worker": 0.25, "all workers": 0.2, "saver": 0.22, "uploader": 0.25, "agent": 0.08}
"""How often each is killed: after an agent's death everything starts cold, which takes as long as ten other kills."""
WORKS_AT = {
    "worker": ["memory"],
    "all workers": ["memory"],
    "saver": ["disk"],
    "uploader": ["mirror"],
    "agent": ["memory", "disk", "mirror"],
}
"""Which saves a victim has to do with."""
AIMED_SHARE = 0.75
"""So many kills wait until such a save is under way; the others come at any time."""
AIM_WITHIN_S = 1.0
LATER_S = {"memory": 0.004, "disk": 0.08, "mirror": 0.08, "": 0.08}
"""And then up to so much later: about as long as such a save takes here."""


@dataclass(slots=True)
class Job:
    """What happened to one job.

    Attributes:
        kills: the victims, in their order.
        amid: where to a save was under way at a kill: memory, disk, mirror.
        went_back: tiers or resumes that were older after a kill than before.
        torn: what the mirror counted as complete and was not.
        mirror_lacks: what was wrong with the mirror's newest step at the end; empty when nothing was.
    """

    number: int
    seed: str
    kills: list[str] = field(default_factory=list)
    amid: list[str] = field(default_factory=list)
    went_back: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    mirror_lacks: str = ""
    same_weights: bool = False
    resumes: int = 0
    refusals: int = 0
    mirrored: int = 0
    took_s: float = 0.0
    load: float = field(default_factory=load1)


def kill_once(run: KilledRun, chance: random.Random, job: Job) -> tuple[datetime, int] | None:
    """Wait for progress, then kill something at a random moment; go on.

    Returns:
        When that was, and the newest step that was complete then; None when there was nothing to kill.
    """
    ends_s, enough = _now() + WITHIN_S, run.newest() + 2
    while run.newest() < enough and run.agent.poll() is None and _now() < ends_s:
        time.sleep(0.005)
    [kind] = chance.choices(list(SHARES), list(SHARES.values()))
    pids = run.alive().get(kind, [])
    if run.agent.poll() is not None or not pids:
        return None
    newest, in_mirror = aim(run, chance, chance.choice(WORKS_AT[kind]) if chance.random() < AIMED_SHARE else "")
    under_way, moment, killed = run.under_way(), datetime.now(UTC), 0
    for pid in pids if kind == "all workers" else [chance.choice(pids)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    if not killed:
        return None  # it had ended meanwhile
    job.kills.append(kind)
    job.amid += under_way
    if kind == "agent":
        run.agent.wait()
        time.sleep(chance.random() * 0.2)
        run.again()
    for tier, before, after in (
        ("memory and disk", newest, run.newest()),
        ("the mirror", in_mirror, run.newest_in_mirror()),
    ):
        if after < before:
            job.went_back.append(f"{kind} killed, {tier}: {before} before, {after} after")
    job.torn += run.torn_in_mirror()
    return moment, newest


def aim(run: KilledRun, chance: random.Random, work: str) -> tuple[int, int]:
    """Wait for a random moment, of the given kind of save if there is one; what was newest then, also in the mirror."""
    later_s = chance.random() * LATER_S[work]
    ends_s = _now() + (AIM_WITHIN_S if work else later_s)
    while True:
        newest, in_mirror, has_begun = run.newest(), run.newest_in_mirror(), work and work in run.under_way()
        if has_begun:
            time.sleep(later_s)
        if has_begun or _now() > ends_s or run.agent.poll() is not None:
            return newest, in_mirror


def resumes_that_went_back(entries: Sequence[Entry], moments: Sequence[tuple[datetime, int]]) -> list[str]:
    """Resumes from something older than what was complete when the attempt before was killed."""
    found, floor = [], 0
    for entry in entries:
        if isinstance(entry.body, StartWorkers):
            began = datetime.fromisoformat(entry.wall)
            floor = max((step for at, step in moments if at < began), default=0)
        elif isinstance(entry.body, CheckpointRestored) and entry.body.step < floor:
            found.append(f"attempt {entry.body.attempt} resumed from step {entry.body.step}, {floor} was complete")
    return found


def play(folder: Path, steps: int, job: Job, kills: int, expected: str) -> str:
    """One job from its begin to its end; the digest of its weights.

    Args:
        kills: at most so many; after them it is left alone.
        expected: what the digest should be; empty for the run that says so.
    """
    run, chance, moments, in_vain, reached, began_s = (
        KilledRun(folder, steps),
        random.Random(job.seed),
        [],
        0,
        0,
        _now(),
    )
    while run.agent.poll() is None:
        if len(job.kills) < kills:
            if moment := kill_once(run, chance, job):
                moments.append(moment)
        else:
            time.sleep(0.05)
        if run.agent.poll() not in (None, 0):
            in_vain = 0 if run.newest() > reached else in_vain + 1
            reached = run.newest()
            if in_vain > 5:
                raise SystemExit(f"the job cannot run at all: see {run.log}")
            run.again()  # its budget of restarts is spent: a person would say it again as well
    entries = run.entries()
    bodies = [entry.body for entry in entries]
    job.went_back += resumes_that_went_back(entries, moments)
    job.torn += run.torn_in_mirror()
    job.mirror_lacks = run.mirror_at_the_end()
    job.same_weights = run.digest() == expected
    job.resumes = sum(isinstance(body, CheckpointRestored) for body in bodies)
    job.refusals = sum(isinstance(body, CheckpointRefused) for body in bodies)
    job.mirrored = sum(isinstance(body, CheckpointMirrored) for body in bodies)
    job.took_s = round(_now() - began_s, 1)
    return run.digest()


def _now() -> float:
    return time.monotonic()


def is_good(job: Job) -> bool:
    return job.same_weights and not (job.went_back or job.torn or job.mirror_lacks)


def sentence(jobs: Sequence[Job], wanted: int) -> str:
    """The one line of result."""
    kills, amid = [kind for job in jobs for kind in job.kills], [where for job in jobs for where in job.amid]
    total, bad = len(kills), sum(not is_good(job) for job in jobs)
    parts = [
        f"{total} of {wanted} kills ({_counts(kills)}; amid a save to {_counts(amid)})",
        f"{len(jobs)} jobs",
        f"{sum(job.resumes for job in jobs)} resumes",
        f"{sum(job.mirrored for job in jobs)} uploads",
        f"{sum(job.refusals for job in jobs)} refused",
        f"{sum(not job.same_weights for job in jobs)} with other weights",
        f"{sum(len(job.went_back) for job in jobs)} went back",
        f"{sum(len(job.torn) for job in jobs)} torn in the mirror",
        f"{sum(bool(job.mirror_lacks) for job in jobs)} ends without the newest in the mirror",
        f"{sum(job.took_s for job in jobs):.0f} s",
    ]
    return f"{', '.join(parts)}: {'MISSED' if bad else 'met' if total >= wanted else 'met so far'}"


def _counts(names: Sequence[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common())


def read_jobs() -> list[Job]:
    """What an earlier call has measured."""
    rows = json.loads(RESULT.read_text())["jobs"] if RESULT.exists() else []
    return [Job(**row) for row in rows]


def write_jobs(jobs: Sequence[Job], wanted: int, steps: int) -> None:
    about = {"at": datetime.now(UTC).isoformat(), "cpus": os.cpu_count(), "kernel": platform.release(), "steps": steps}
    RESULT.parent.mkdir(exist_ok=True)
    document = {**about, "result": sentence(jobs, wanted), "jobs": [asdict(job) for job in jobs]}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Returns 0 when no kill lost anything, 1 when one did, 2 when the time was over before all were made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of each job; jobs follow until all kills are made"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="no job begins later than this")
    parser.add_argument("--resume", action="store_true", help=f"go on after the jobs in {RESULT.name}")
    args = parser.parse_args()
    began_s, jobs = _now(), read_jobs() if args.resume else []
    folder = Path(tempfile.mkdtemp(prefix="everstep-kills-"))
    expected = play(folder / "whole", args.steps, Job(number=0, seed=""), 0, "")
    assert expected, "the untouched run failed"
    while (left := args.kills - sum(len(job.kills) for job in jobs)) > 0 and _now() - began_s < args.minutes * 60:
        job = Job(number=len(jobs) + 1, seed=f"{args.seed}-{len(jobs) + 1}")
        play(folder / f"job-{job.number}", args.steps, job, left, expected)
        jobs.append(job)
        write_jobs(jobs, args.kills, args.steps)
        print(f"job {job.number}: {sentence([job], left)}", file=sys.stderr)
        if is_good(job):
            for path in folder.glob(f"job-{job.number}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(sentence(jobs, args.kills))
    if bad := [job for job in jobs if not is_good(job)]:
        print(*(f"job {job.number}: {job.went_back} {job.torn} {job.mirror_lacks}" for job in bad), sep="\n")
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0 if left <= 0 else 2


if __name__ == "__main__":
    sys.exit(main())
