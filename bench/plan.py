"""How long plans take: all outputs of one as a process and as a call, and a sweep of 10,000, against their bars."""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/plan.py` finds its package

from bench.machine import load1, wait_until_quiet
from everstep.planning import Plan, evaluate, preset_plan
from everstep.views.plan_html import plan_html
from everstep.views.plan_text import plan_json, plan_lines

ONE_PLAN_BAR_S = 0.2
SWEEP_BAR_S = 5.0
SWEEP_COUNT = 10_000
REPEAT_COUNT = 5
TIMEOUT_S = 60.0
RESULT = Path(__file__).parent / "results" / "plan.json"


def swept_plans() -> list[Plan]:
    """Ten thousand different plans: sizes, rates, pauses and restarts around the preset's, with its model."""
    base = replace(preset_plan("llama3-405b"), failure_count=None, observed_host_days=None, origins={})
    sizes = [1_024 * 2**i for i in range(8)]
    rates = [0.5 + 0.4 * i for i in range(16)]
    pauses = [0.5 * 2**i for i in range(9)]
    restarts = [10.0 * 1.6**i for i in range(9)]
    return [
        replace(base, gpu_count=gpus, failures_per_1000_host_days=rate, checkpoint_pause_s=pause_s, restart_s=restart_s)
        for gpus, rate, pause_s, restart_s in islice(product(sizes, rates, pauses, restarts), SWEEP_COUNT)
    ]


def call() -> None:
    """Evaluate one plan and make every form of its report: text, JSON and the page with plots."""
    report = evaluate(preset_plan("llama3-405b"))
    assert plan_lines(report)
    assert plan_json(report)
    assert plan_html(report)


def process() -> None:
    """The whole of `everstep plan llama3-405b --html FILE`, Python's own start included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "everstep", "plan", "llama3-405b", "--html", f"{folder}/plan.html"]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def sweep() -> None:
    """Make and evaluate 10,000 plans in one process."""
    plans = swept_plans()
    assert len(plans) == SWEEP_COUNT
    shares = [evaluate(plan).value("effective_share") for plan in plans]
    assert len(set(shares)) > SWEEP_COUNT * 0.9


def measure(work: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds of each repetition; the CPU time of child processes is not in the second."""
    walls_s, cpus_s = [], []
    for _ in range(REPEAT_COUNT):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        walls_s.append(time.perf_counter() - wall_s)
        cpus_s.append(time.process_time() - cpu_s)
    return walls_s, cpus_s


def main() -> int:
    is_good = True
    busy = wait_until_quiet()
    document: dict[str, object] = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "load1": load1(),
        "busy_share": busy,
    }
    for name, work, bar_s in (
        ("one_plan_all_outputs_s", call, ONE_PLAN_BAR_S),
        ("one_plan_whole_process_s", process, None),
        ("sweep_of_10000_plans_s", sweep, SWEEP_BAR_S),
    ):
        walls_s, cpus_s = measure(work)
        median_s, worst_s, cpu_s = statistics.median(walls_s), max(walls_s), statistics.median(cpus_s)
        holds = bar_s is None or worst_s <= bar_s
        is_good &= holds
        told = "no bar" if bar_s is None else f"bar {bar_s:g} s: {'holds' if holds else 'MISSED'}"
        print(f"{name:26} median {median_s:.3f} s, worst {worst_s:.3f} s of {REPEAT_COUNT}, CPU {cpu_s:.3f} s; {told}")
        document[name] = {
            "median": round(median_s, 4),
            "worst": round(worst_s, 4),
            "cpu": round(cpu_s, 4),
            "bar": bar_s,
            "holds": holds,
        }
    print(f"load {document['load1']}, {busy:.0%} of the CPUs busy when it began")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
