"""`everstep demo`: one training run twice, untouched and under Llama 3's faults; do its weights come out the same?

The number of steps must be the same in both runs and is not known before the machine's pace is: so a short run measures
it first. A constant would take ten seconds on one machine and ten minutes on another.
"""

import argparse
import importlib.util
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from everstep.adapters.ledger_file import ledger_path, read_entries
from everstep.adapters.workers.devices import cpu_count
from everstep.adapters.workers.standby import Program
from everstep.adapters.workers.worker_logs import LogChoice
from everstep.cli.demo_end import DemoEnd, Weights, read_weights, show_end
from everstep.cli.demo_faults import FaultChoice, plan_faults, steps_needed
from everstep.cli.launch import run_job
from everstep.cli.live_view import LiveView, live_view
from everstep.cli.run_arguments import WORKERS_PER_CPU_MAX, RunPlan
from everstep.domain.commands import Command, FinishJob
from everstep.domain.errors import ConfigError, ExitCode, WorldError
from everstep.domain.events import Event, StepsFinished
from everstep.domain.faults import PlannedFault
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.stall import StallConfig
from everstep.views.report import RunFold, RunReport

DEFAULT_MINUTES = 1.0
DEFAULT_WORKERS = 4
DEFAULT_SEED = 41
"""Chosen among the first 80 for its variety: six of the nine kinds in eight faults, where a seed usually shows four."""
PACE_STEPS = 40
_SETTLED_STEPS = 10
_REPORT_S = 0.5
_SAVING_S = 5.0
_DESCRIPTION = """\
Train a small GPT on the source of Python's standard library with DDP, twice: untouched, and with real faults (SIGKILL,
SIGSTOP, crashes, hangs) drawn from the 419 interruptions of Llama 3's training. Show how each is found and overcome,
where the time went, and whether the final weights are the same, bit for bit. Needs PyTorch, no GPU and no network."""
_EPILOG = """\
examples:
  everstep demo                                      Llama 3's faults, about 3 minutes on two cores
  everstep demo --faults kill,freeze --minutes 0.5   these kinds in turn
  everstep demo --seed 3 --workers 8 --minutes 5     other faults on other ranks, for longer
  everstep demo --json | jq .identical               for a script; progress goes to stderr

exit codes: 0 the weights are identical, 14 stopped from outside, 64 wrong flag, 70 the weights differ;
others as in everstep run --help
"""

_Subparsers = argparse._SubParsersAction  # argparse has no public name for it


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What was asked for, checked."""

    choice: FaultChoice
    minutes: float
    worker_count: int
    seed: int
    run_dir: Path

    @property
    def fault_count(self) -> int:
        return self.choice.count(self.minutes * 60)

    def step_count(self, step_s: float) -> int:
        """The steps of both runs at this pace; never so few that the faults have no room."""
        return max(round(self.minutes * 60 / step_s), steps_needed(self.fault_count))


def add_parser(subparsers: "_Subparsers[argparse.ArgumentParser]") -> None:
    """Add the `demo` command."""
    parser = subparsers.add_parser(
        "demo",
        help="watch a real training run meet Llama 3's faults and recover from each",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--faults",
        default="llama3",
        metavar="WHICH",
        help="none, llama3 (drawn from its published counts; the default), or kinds such as kill,freeze in turn",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        metavar="M",
        help=f"training in each of the two runs, without recoveries (default: {DEFAULT_MINUTES:g})",
    )
    parser.add_argument(
        "--workers", type=int, default=DEFAULT_WORKERS, metavar="W", help=f"ranks (default: {DEFAULT_WORKERS})"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=DEFAULT_SEED,
        metavar="S",
        help=f"decides the faults and the training's randomness (default: {DEFAULT_SEED})",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where all goes (default: a new folder in everstep-runs/)")
    parser.add_argument("--json", action="store_true", help="end with one JSON document instead of the report")


def run(args: argparse.Namespace) -> int:
    """Run the demo and give its exit code.

    Raises:
        ConfigError: a flag is wrong, or PyTorch is missing.
        WorldError: the training left no result, or the disk failed.
    """
    plan = plan_demo(args)
    view = live_view(sys.stderr)
    sys.stderr.write(f"ledgers, logs and evidence go to {plan.run_dir}\n")
    try:
        return _run(plan, view, as_json=args.json)
    except KeyboardInterrupt:  # between two runs; within one it is the run's to end
        sys.stderr.write("everstep: stopped by Ctrl-C\n")
        return int(ExitCode.PREEMPTED)


def plan_demo(args: argparse.Namespace) -> DemoPlan:
    """Check the flags.

    Raises:
        ConfigError: one is wrong; the sentence says what to write instead.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the demo trains with PyTorch, which is not installed here: pip install 'everstep[torch]'")
    choice = FaultChoice.parse(args.faults)
    if not 0 < args.minutes <= 24 * 60:
        raise ConfigError(f"--minutes {args.minutes:g}: write a number above 0 and up to {24 * 60}, such as 1.5")
    if args.workers < 2:
        raise ConfigError(
            f"--workers {args.workers}: the demo is about ranks that wait for each other; write 2 or more"
        )
    if args.workers > (most := cpu_count() * WORKERS_PER_CPU_MAX):
        raise ConfigError(f"--workers {args.workers} is too many for {cpu_count()} CPUs; write {most} or fewer")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} is below 0; write 0 or more")
    run_dir = Path(args.run_dir) if args.run_dir else _fresh_run_dir()
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"--run-dir {run_dir} is not empty; give a new folder, since a demo starts afresh")
    return DemoPlan(
        choice=choice, minutes=args.minutes, worker_count=args.workers, seed=args.seed, run_dir=run_dir.absolute()
    )


def _fresh_run_dir() -> Path:
    return Path("everstep-runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _run(plan: DemoPlan, view: LiveView, *, as_json: bool) -> int:
    began_s = time.monotonic()
    step_s, end = _measure_pace(plan, view)
    if end.exit_code is not ExitCode.DONE:
        return _give_up(end, "the run that measures the pace")
    step_count = plan.step_count(step_s)
    title = f"2 of 3: the untouched run, {plan.worker_count} workers"
    end = _train(plan, "untouched", step_count, (), _Shown(view=view, title=title))
    if end.exit_code is not ExitCode.DONE:
        return _give_up(end, "the untouched run")
    faults = plan_faults(
        plan.choice,
        seed=plan.seed,
        fault_count=plan.fault_count,
        step_count=step_count,
        worker_count=plan.worker_count,
    )
    title = f"3 of 3: the same run with {len(faults)} faults"
    end = _train(plan, "faulted", step_count, faults, _Shown(view=view, title=title))
    is_done = end.exit_code is ExitCode.DONE
    result = DemoEnd(
        seed=plan.seed,
        step_count=step_count,
        wall_s=time.monotonic() - began_s,
        untouched=_weights(plan, "untouched"),
        faulted=_weights(plan, "faulted") if is_done else None,
        report=_report(plan.run_dir / "faulted"),
    )
    show_end(result, as_json=as_json)
    if not is_done:
        return _give_up(end, "the run with faults")
    return int(ExitCode.DONE if result.identical else ExitCode.INTERNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """How a run is shown, and who else hears its ledger."""

    view: LiveView
    title: str
    also: Callable[[Event | Command], None] = lambda _body: None


def _measure_pace(plan: DemoPlan, view: LiveView) -> tuple[float, FinishJob]:
    """Seconds of a settled step."""
    ends_s: list[float] = []

    def hear(body: Event | Command) -> None:
        if isinstance(body, StepsFinished):
            ends_s.extend(body.ended_at_s)

    title = "1 of 3: a few steps to measure this machine's pace"
    end = _train(plan, "pace", PACE_STEPS, (), _Shown(view=view, title=title, also=hear))
    durations_s = [after - before for before, after in pairwise(ends_s)][_SETTLED_STEPS:]
    return statistics.median(durations_s) if durations_s else 1.0, end


def _train(plan: DemoPlan, name: str, step_count: int, faults: tuple[PlannedFault, ...], shown: _Shown) -> FinishJob:
    with shown.view.show(shown.title, until=step_count, fault_count=len(faults)) as show:

        def listen(body: Event | Command) -> None:
            show(body)
            shown.also(body)

        return run_job(_run_plan(plan, name, step_count, faults), listen=listen)


def _run_plan(plan: DemoPlan, name: str, step_count: int, faults: tuple[PlannedFault, ...]) -> RunPlan:
    run_dir = plan.run_dir / name
    return RunPlan(
        program=Program(
            arguments=(
                "everstep.worker.demo.train",
                *("--steps", str(step_count), "--seed", str(plan.seed)),
                *("--weights-out", str(_weights_path(plan, name))),
            ),
            module=True,
        ),
        worker_count=plan.worker_count,
        run_dir=run_dir,
        log_dir=run_dir / "logs",
        logs=LogChoice(),
        address="127.0.0.1",
        port=0,
        rdzv_id="",
        standby=True,
        preload=("everstep.worker.attachment", "everstep.worker.demo.gpt", "everstep.worker.demo.text"),
        faults=faults,
        recovery=RecoveryConfig(),
        stall=StallConfig(special_floor_s=_SAVING_S),  # a save of this model takes a fraction of a second
        report_s=_REPORT_S,
        console=False,
        quiet=True,
    )


def _weights_path(plan: DemoPlan, name: str) -> Path:
    return plan.run_dir / name / "weights.json"


def _weights(plan: DemoPlan, name: str) -> Weights:
    path = _weights_path(plan, name)
    if not path.exists():
        raise WorldError(f"the training has ended well and left no {path}")
    return read_weights(path)


def _report(run_dir: Path) -> RunReport:
    fold = RunFold(str(run_dir))
    fold.take_all(read_entries(ledger_path(run_dir)))
    return fold.report()


def _give_up(end: FinishJob, which: str) -> int:
    if end.detail:
        sys.stderr.write(end.detail.rstrip("\n") + "\n")
    sys.stderr.write(f"everstep: {which} has ended with code {int(end.exit_code)}: {end.summary}\n")
    return int(end.exit_code)
