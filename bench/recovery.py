"""Time from the SIGKILL of one worker to training again, everstep and torchrun in turns on the same script."""

import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence

from bench.event_log import PARTS, parts_of_recovery, recovery_s
from bench.figures import Bar, Outcome, left_behind_notes, median, spread
from bench.jobs import WORLD_SIZE, Disappearance, Job, JobError
from bench.machine import load1

LIMIT_S = 1.0
RATIO_MIN = 6.0
STEPS_BEFORE = 40
RECOVER_WITHIN_S = 120.0
KILLS_PER_JOB = 5
ARGUMENTS = ("--checkpoint", "{folder}/checkpoint.pt")
_REACTION = re.compile(r"failed \(exitcode|Sending process|closing signal")
_LAUNCHERS = ("everstep", "torchrun")


def measure(kills: int) -> Outcome:
    """Kill so many workers under each launcher; the victim goes round all ranks, rank 0 too."""
    rows: list[dict[str, object]] = []
    for first in range(0, kills, KILLS_PER_JOB):
        numbers = range(first, min(first + KILLS_PER_JOB, kills))
        for launcher in _LAUNCHERS:
            rows += _kill_in_turn(launcher, numbers)
    return outcome_of(rows)


def outcome_of(rows: Sequence[dict[str, object]]) -> Outcome:
    """The bars of all repetitions; failures are counted and have no time."""
    totals = {
        name: [row["total_s"] for row in rows if row["launcher"] == name and "total_s" in row] for name in _LAUNCHERS
    }
    failed = {name: sum(row["launcher"] == name and "error" in row for row in rows) for name in _LAUNCHERS}
    ours, theirs = median(totals["everstep"]), median(totals["torchrun"])  # type: ignore[arg-type]
    samples = {name: spread(totals[name], failed=failed[name]) for name in _LAUNCHERS}  # type: ignore[arg-type]
    ratio = round(theirs / ours, 2) if ours and theirs else None
    bars = (
        Bar(name="recovery_kill_s", value=ours, unit="s", limit=LIMIT_S, spread=samples["everstep"]),
        Bar(name="recovery_kill_failed", value=failed["everstep"], unit="runs", limit=0),
        Bar(
            name="recovery_kill_ratio",
            value=ratio,
            unit="×",
            limit=RATIO_MIN,
            at_least=True,
            spread=f"torchrun {samples['torchrun']}",
        ),
    )
    notes = [_part_note(name, rows) for name in _LAUNCHERS]
    for name in _LAUNCHERS:
        notes += left_behind_notes(f"recovery_kill, {name}", [row for row in rows if row["launcher"] == name])
    return Outcome(bars=bars, rows=rows, notes=tuple(notes))


def _part_note(launcher: str, rows: Sequence[dict[str, object]]) -> str:
    texts = []
    for part in PARTS:
        values = [row["parts"][part] for row in rows if row["launcher"] == launcher and "parts" in row]  # type: ignore[index]
        seen = [value for value in values if value is not None]
        texts.append(f"{part} {statistics.median(seen):.3f}" if seen else f"{part} unseen")
    return f"parts of {launcher}'s recovery, medians in s: {', '.join(texts)}"


def _kill_in_turn(launcher: str, numbers: Sequence[int]) -> list[dict[str, object]]:
    """One job for all these kills; another one after a kill that it did not survive."""
    rows: list[dict[str, object]] = []
    left = list(numbers)
    while left:
        with Job(launcher, ARGUMENTS) as job:
            while left:
                number = left.pop(0)
                row: dict[str, object] = {
                    "launcher": launcher, "number": number, "victim": number % WORLD_SIZE, "load1": load1(),
                    "busy_before_job": job.busy_before,
                }  # fmt: skip
                rows.append(row)
                try:
                    row |= _kill_once(job, number % WORLD_SIZE)
                except JobError as error:
                    row |= {"error": str(error), "folder": str(job.folder)}
                    job.keep_folder = True
                shown = row.get("error") or f"{row['total_s']:.2f} s {row['parts']}"
                print(f"kill {number + 1} of rank {number % WORLD_SIZE}, {launcher}: {shown}", file=sys.stderr)
                if "error" in row:
                    break
        rows[-1]["left_behind"] = job.left_behind
    return rows


def _kill_once(job: Job, victim: int) -> dict[str, object]:
    job.wait_for_steps(STEPS_BEFORE)
    old = job.log.newest()
    gone = Disappearance([life.pid for life in old.values()])
    since_s = time.monotonic()
    os.kill(old[victim].pid, signal.SIGKILL)
    job.wait_for(
        lambda: job.log.recovered(WORLD_SIZE, since_s),
        within_s=RECOVER_WITHIN_S,
        what="a step of every rank after the kill",
        and_watch=gone.look,
    )
    lives = job.log.recovered(WORLD_SIZE, since_s)
    assert lives is not None
    reached = max(step for life in old.values() for _, step in life.steps)
    return {
        "total_s": round(recovery_s(lives, since_s), 3),
        "parts": parts_of_recovery(lives, since_s, detected_s=_detected_s(job, since_s), gone_s=gone.at_s),
        "lost_steps": reached - (lives[0].steps[0][1] - 1),
    }


def _detected_s(job: Job, since_s: float) -> float | None:
    """Everstep's verdict in the ledger, or torchrun's first line that says so."""
    if job.launcher == "everstep":
        found = job.first_verdict(since_s)
        return found[0] if found else None
    return next((at_s for at_s, text in job.output if at_s > since_s and _REACTION.search(text)), None)
