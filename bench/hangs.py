"""How soon and how rightly everstep judges a rank that is frozen, holds the GIL or sleeps, and when it trains again."""

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.event_log import recovery_s
from bench.figures import Bar, Outcome, left_behind_notes, spread
from bench.jobs import HERE, WORLD_SIZE, Job, JobError
from bench.machine import load1
from everstep.domain.commands import RecordVerdict

VERDICT_LIMIT_S = 2.5
AGAIN_LIMIT_S = 4.5
STEPS_BEFORE = 50
WITHIN_S = 60.0
FAULTS_PER_JOB = 10
KINDS = ("freeze", "gil", "sleep")
ARGUMENTS = ("--checkpoint", "{folder}/checkpoint.pt")


def measure(kind: str, count: int) -> Outcome:
    """Cause so many hangs of one kind; the victim goes round all ranks."""
    rows: list[dict[str, object]] = []
    left = list(range(count))
    unasked = 0
    while left:
        numbers, left = left[:FAULTS_PER_JOB], left[FAULTS_PER_JOB:]
        with Job("everstep", ARGUMENTS) as job:
            done = _hang_in_turn(job, kind, numbers)
            rows += done
            unasked += sum(isinstance(body, RecordVerdict) for body in job.ledger)
            unasked -= sum("verdict_s" in row for row in done)
        rows[-1]["left_behind"] = job.left_behind
        left = numbers[len(done) :] + left
    return outcome_of(kind, rows, unasked=unasked)


def outcome_of(kind: str, rows: Sequence[dict[str, object]], *, unasked: int) -> Outcome:
    """The bars. A time bar is the slowest repetition, since each of them must keep it."""
    verdicts = [row["verdict_s"] for row in rows if "verdict_s" in row]
    again = [row["again_s"] for row in rows if "again_s" in row]
    bars = (
        Bar(
            name=f"{kind}_named_right", value=sum(bool(row.get("is_right")) for row in rows), unit="runs",
            limit=len(rows), at_least=True, spread=f"of {len(rows)}; {unasked} verdicts nobody asked for",
        ),
        Bar(
            name=f"{kind}_verdict_s", value=max(verdicts, default=None), unit="s", limit=VERDICT_LIMIT_S,  # type: ignore[type-var, arg-type]
            spread=spread(verdicts, failed=len(rows) - len(verdicts)),  # type: ignore[arg-type]
        ),
        Bar(
            name=f"{kind}_training_again_s", value=max(again, default=None), unit="s", limit=AGAIN_LIMIT_S,  # type: ignore[type-var, arg-type]
            spread=spread(again, failed=len(rows) - len(again)),  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    return Outcome(bars=bars, rows=rows, notes=tuple(left_behind_notes(kind, rows)))


def _hang_in_turn(job: Job, kind: str, numbers: Sequence[int]) -> list[dict[str, object]]:
    """Hangs in one job, until one is not recovered from."""
    rows: list[dict[str, object]] = []
    for number in numbers:
        victim = number % WORLD_SIZE
        row: dict[str, object] = {"kind": kind, "number": number, "victim": victim, "load1": load1()}
        rows.append(row)
        try:
            _hang_once(job, kind, victim, row)
        except JobError as error:
            row["error"] = str(error)
        if "error" in row or not row.get("is_right"):
            job.keep_folder = True
            row["folder"] = str(job.folder)
        print(f"{kind} {number + 1} of rank {victim}: {_shown(row)}", file=sys.stderr)
        if "error" in row:
            break
    return rows


def _shown(row: dict[str, object]) -> str:
    right = "right" if row.get("is_right") else "WRONG"
    return (
        f"{right}, verdict {row.get('verdict_s')} s, again {row.get('again_s')} s, named {row.get('named')} "
        f"{row.get('where')} {row.get('error', '')}"
    ).strip()


def _hang_once(job: Job, kind: str, victim: int, row: dict[str, object]) -> None:
    job.wait_for_steps(STEPS_BEFORE)
    since_s = _cause(job, kind, victim)
    try:
        job.wait_for(
            lambda: job.log.recovered(WORLD_SIZE, since_s), within_s=WITHIN_S, what=f"training again after {kind}"
        )
    finally:
        if (found := job.first_verdict(since_s)) is not None:
            at_s, command = found
            verdict = command.verdict
            row |= {
                "verdict_s": round(at_s - since_s, 3), "named": list(verdict.ranks), "trouble": str(verdict.trouble),
                "where": verdict.where, "reason": verdict.reason,
                "is_right": verdict.ranks == (victim,) and (kind == "freeze" or _points_at(verdict.where, kind)),
            }  # fmt: skip
    lives = job.log.recovered(WORLD_SIZE, since_s)
    assert lives is not None
    row["again_s"] = round(recovery_s(lives, since_s), 3)


def _cause(job: Job, kind: str, victim: int) -> float:
    """Cause the hang; returns when it began."""
    life = job.log.newest()[victim]
    if kind == "freeze":
        since_s = time.monotonic()
        os.kill(life.pid, signal.SIGSTOP)
        return since_s
    fresh = job.folder / "trigger.new"
    fresh.write_text(kind)
    fresh.rename(job.triggers / str(victim))
    job.wait_for(lambda: "fault" in life.told, within_s=5.0, what=f"{kind} on rank {victim}")
    return life.told["fault"]


def stalling_line(source: str, kind: str) -> int:
    """The number of the line of the script at which a rank stands still."""
    return next(n for n, line in enumerate(source.splitlines(), 1) if line.endswith(f"# stalls here: {kind}"))


def _points_at(where: str, kind: str) -> bool:
    line = stalling_line((HERE / "workload.py").read_text(), kind)
    found = re.match(r"(.+):(\d+) in \w+", where)
    return found is not None and Path(found[1]).name == "workload.py" and int(found[2]) == line
