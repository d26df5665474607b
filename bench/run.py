"""`make bench`: measures every bar that everstep promises to keep, prints the table and writes it as JSON."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/run.py` finds its own package

from bench import false_alarms, hangs, overhead, recovery
from bench.figures import Bar, Outcome, bar_json, table
from bench.machine import load1

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    kills: int
    hangs: int
    healthy_s: float
    healthy_plan: false_alarms.Plan
    pairs: int


def report_outcome() -> Outcome:
    """The colleague's measure of `everstep report`, as a bar."""
    from bench.report_ledger import bench_report

    found = bench_report()
    bar = Bar(
        name=str(found["bar"]), value=float(found["value"]), unit="s", limit=float(found["target"]),  # type: ignore[arg-type]
        spread=f"all {found['all']}",
    )  # fmt: skip
    return Outcome(bars=(bar,), rows=[found])


def measurements(effort: Effort) -> dict[str, Callable[[], Outcome]]:
    """Every measurement by its name for --only, in the order of running."""
    return {
        "recovery_kill": lambda: recovery.measure(effort.kills),
        "freeze": lambda: hangs.measure("freeze", effort.hangs),
        "gil": lambda: hangs.measure("gil", effort.hangs),
        "sleep": lambda: hangs.measure("sleep", effort.hangs),
        "false_alarms": lambda: false_alarms.measure(effort.healthy_s, effort.healthy_plan),
        "overhead_hook": overhead.measure_hook,
        "overhead_pairs": lambda: overhead.measure_pairs(effort.pairs),
        "report_1e6": report_outcome,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure everstep's bars; the results go to bench/results.")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="measure these only")
    parser.add_argument("--kills", type=int, default=None, metavar="N", help="kills under each launcher (20; quick: 4)")
    parser.add_argument("--hangs", type=int, default=None, metavar="N", help="hangs of each kind (20; quick: 4)")
    parser.add_argument("--healthy-s", type=float, default=None, metavar="S", help="healthy run (600; quick: 60)")
    parser.add_argument("--pairs", type=int, default=None, metavar="N", help="pairs of healthy jobs (8; quick: 2)")
    parser.add_argument("--quick", action="store_true", help="a few minutes instead of most of an hour")
    return parser.parse_args()


def effort_of(args: argparse.Namespace) -> Effort:
    quick = args.quick
    return Effort(
        kills=args.kills or (4 if quick else 20),
        hangs=args.hangs or (4 if quick else 20),
        healthy_s=args.healthy_s or (60.0 if quick else 600.0),
        healthy_plan=false_alarms.QUICK if quick else false_alarms.Plan(),
        pairs=args.pairs or (2 if quick else 8),
    )


def main() -> int:
    """Returns 0 when every bar is met, 1 when one is missed or could not be measured, 2 for a wrong name."""
    args = parse()
    todo = measurements(effort_of(args))
    names = args.only.split(",") if args.only else list(todo)
    if unknown := [name for name in names if name not in todo]:
        print(f"--only {','.join(unknown)}: unknown; the names are {', '.join(todo)}", file=sys.stderr)
        return 2
    began = datetime.now(UTC)
    outcomes: dict[str, Outcome] = {}
    took_s: dict[str, float] = {}
    for name in names:
        print(f"== {name} (load {load1()})", file=sys.stderr)
        began_s = time.monotonic()
        outcomes[name] = _measure(name, todo[name])
        took_s[name] = round(time.monotonic() - began_s, 1)
        _write(began, outcomes, took_s)  # after each, so that an interrupted run leaves what it has
    bars = [bar for outcome in outcomes.values() for bar in outcome.bars]
    print(table(bars))
    for outcome in outcomes.values():
        for note in outcome.notes:
            print(note)
    return 0 if all(bar.is_met for bar in bars) else 1


def _measure(name: str, measure: Callable[[], Outcome]) -> Outcome:
    try:
        return measure()
    except Exception as error:  # outermost frame
        text = f"{name} broke off: {type(error).__name__}: {error}"
        print(text, file=sys.stderr)
        return Outcome(bars=(Bar(name=name, value=None, unit="", limit=0, spread=text),))


def _write(began: datetime, outcomes: dict[str, Outcome], took_s: dict[str, float]) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(
        {
            "began": began.isoformat(timespec="seconds"),
            "machine": {
                "cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version(),
            },
            "took_s": took_s,
            "bars": [bar_json(bar) for outcome in outcomes.values() for bar in outcome.bars],
            "notes": [note for outcome in outcomes.values() for note in outcome.notes],
            "rows": {name: list(outcome.rows) for name, outcome in outcomes.items()},
        },
        indent=1,
        ensure_ascii=False,
    )  # fmt: skip
    for path in (RESULTS / f"{began:%Y%m%d-%H%M%S}.json", RESULTS / "latest.json"):
        fresh = path.with_suffix(".new")
        fresh.write_text(text + "\n")
        fresh.rename(path)


if __name__ == "__main__":
    sys.exit(main())
