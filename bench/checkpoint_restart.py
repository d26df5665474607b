"""Kills all ranks of a job under `everstep run` and times the way to its first new step, by part, from its ledger."""

import os
import signal
import statistics
import sys
import time

from bench.figures import Bar, Outcome, median, spread
from bench.jobs import WORLD_SIZE, Job, JobError
from bench.machine import load1
from everstep.domain.events import CheckpointRestored, WorkerReady

LIMIT_S = 1.0
WITHIN_S = 60.0
STEPS_BEFORE = 12
PARTS = ("imported", "attached", "restored", "first_step")


def measure_restart(*, layers: int, kills: int) -> Outcome:
    """Kills of all four ranks at once."""
    rows: list[dict[str, object]] = []
    with Job("everstep", ("--layers", str(layers)), script="attached.py") as job:
        for number in range(kills):
            row: dict[str, object] = {"number": number, "load1": load1()}
            rows.append(row)
            try:
                row |= kill_all(job)
            except JobError as error:
                row["error"] = str(error)
                job.keep_folder = True
                break
            print(f"kill {number + 1} of all ranks: {row['total_s']:.2f} s {row['parts']}", file=sys.stderr)
    totals = [float(str(row["total_s"])) for row in rows if "total_s" in row]
    failed = sum("error" in row for row in rows)
    size = f"{layers * 85 / 1000:.2f} GB/rank, {WORLD_SIZE} ranks, "
    bar = Bar(
        name="restart_s", value=median(totals), unit="s", limit=LIMIT_S, spread=size + spread(totals, failed=failed)
    )
    texts = []
    for part in PARTS:
        seen = [row["parts"][part] for row in rows if "parts" in row and part in row["parts"]]  # type: ignore[index,operator]
        texts.append(f"{part} {statistics.median(seen):.3f}" if seen else f"{part} unseen")
    note = f"restart, medians in s since the order to start, largest rank: {', '.join(texts)}"
    return Outcome(bars=(bar,), rows=rows, notes=(note,))


def kill_all(job: Job) -> dict[str, object]:
    job.wait_for_steps(STEPS_BEFORE)
    old = job.log.newest()
    attempt = max((body.attempt for body in job.ledger if isinstance(body, WorkerReady)), default=0)
    since_s = time.monotonic()
    for life in old.values():
        os.kill(life.pid, signal.SIGKILL)
    job.wait_for(
        lambda: job.log.recovered(WORLD_SIZE, since_s), within_s=WITHIN_S, what="a step of every rank after the kill"
    )
    lives = job.log.recovered(WORLD_SIZE, since_s)
    assert lives is not None
    ends_s = time.monotonic() + 2.0
    while time.monotonic() < ends_s:  # the notes come with the agent's next look
        job.read()
        time.sleep(0.05)
    ready = [body for body in job.ledger if isinstance(body, WorkerReady) and body.attempt > attempt]
    restored = [b for b in job.ledger if isinstance(b, CheckpointRestored) and b.attempt > attempt]
    reached = max(step for life in old.values() for _, step in life.steps)
    return {
        "total_s": round(max(life.steps[0][0] for life in lives.values()) - since_s, 3),
        "parts": {part: round(max(b.after_s for b in ready if b.part == part), 3) for part in {b.part for b in ready}},
        "lost_steps": reached - (lives[0].steps[0][1] - 1),
        "source": restored[-1].path if restored else "",
    }
