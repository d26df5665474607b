"""How often everstep cries wolf at a healthy job with slow first steps, long checkpoints and long evaluations."""

import sys
import time
from dataclasses import dataclass

from bench.figures import Bar, Outcome, left_behind_notes
from bench.jobs import WORLD_SIZE, Job, JobError
from everstep.domain.commands import DismissSuspicion, RecordVerdict
from everstep.domain.events import StallSuspected

_STEP_S = 0.05
_SLOW_STEPS = 3
_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A healthy job. Each cycle has two checkpoints and two evaluations, half of them announced."""

    slow_step_s: float = 5.0
    save_s: float = 20.0
    evaluate_s: float = 15.0
    steps_between: int = 200

    @property
    def cycle_s(self) -> float:
        return 2 * (self.save_s + self.evaluate_s) + 4 * self.steps_between * _STEP_S

    def cycles(self, duration_s: float) -> int:
        """As many as come nearest to a duration, and at least one."""
        return max(1, round((duration_s - _SLOW_STEPS * self.slow_step_s) / self.cycle_s))

    def length_s(self, cycles: int) -> float:
        return _SLOW_STEPS * self.slow_step_s + cycles * self.cycle_s

    def arguments(self, cycles: int) -> list[str]:
        return [
            *("--cycles", str(cycles), "--steps-between", str(self.steps_between)),
            *("--slow-step-s", str(self.slow_step_s), "--save-s", str(self.save_s)),
            *("--evaluate-s", str(self.evaluate_s), "--checkpoint", "{folder}/checkpoint.pt"),
        ]


QUICK = Plan(
    slow_step_s=2.0, save_s=8.0, evaluate_s=6.0, steps_between=120
)  # over 100 steps, so that one long one does not set the deadline


def measure(duration_s: float, plan: Plan) -> Outcome:
    """Run the healthy job once and read its ledger."""
    cycles = plan.cycles(duration_s)
    print(f"false alarms: a healthy job of about {plan.length_s(cycles):.0f} s", file=sys.stderr)
    error = ""
    with Job("everstep", plan.arguments(cycles), script="healthy.py") as job:
        began_s = time.monotonic()
        try:
            job.wait_for(
                lambda: job.exit_code is not None,
                within_s=2 * plan.length_s(cycles) + _START_S,
                what="the end of the job",
            )
        except JobError as problem:
            error = str(problem)
        took_s = time.monotonic() - began_s
        job.read()
        if job.exit_code != 0 and not error:
            error = f"the job ended with {job.exit_code}"
        verdicts = [body for body in job.ledger if isinstance(body, RecordVerdict)]
        suspicions = [body for body in job.ledger if isinstance(body, StallSuspected)]
        dismissed = [body for body in job.ledger if isinstance(body, DismissSuspicion)]
        job.keep_folder = bool(verdicts or error)
    steps = min((len(life.steps) for life in job.log.newest().values()), default=0)
    row: dict[str, object] = {
        "took_s": round(took_s, 1), "cycles": cycles, "steps": steps, "error": error, "load1": job.load_before,
        "verdicts": [f"{body.at_s:.1f} s: {body.verdict.reason}" for body in verdicts],
        "suspicions": [f"{b.at_s:.1f} s: {b.phase.name.lower()}, {b.learned_from}" for b in suspicions],
        "dismissed": [f"{body.at_s:.1f} s: {body.reason}" for body in dismissed],
        "left_behind": job.left_behind, "folder": str(job.folder) if job.keep_folder else "",
    }  # fmt: skip
    sample = f"{took_s:.0f} s, {WORLD_SIZE} ranks, {steps} steps, {4 * cycles} long parts, {len(suspicions)} suspected"
    bars = (
        Bar(name="false_alarms", value=len(verdicts), unit="verdicts", limit=0, spread=sample),
        Bar(name="false_alarms_job_failed", value=float(bool(error)), unit="runs", limit=0, spread=error),
    )
    notes = left_behind_notes("false_alarms", [row])
    notes += [f"false verdict at {text}" for text in row["verdicts"]]  # type: ignore[attr-defined]
    notes += [f"dismissed suspicion at {text}" for text in row["dismissed"]]  # type: ignore[attr-defined]
    return Outcome(bars=bars, rows=[row], notes=tuple(notes))
