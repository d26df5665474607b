"""What the observer costs a healthy 50 ms step: its own work timed alone, and whole jobs in pairs against torchrun."""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.figures import Bar, Outcome, median, spread
from bench.jobs import WORLD_SIZE, Job, JobError
from everstep.adapters.workers.progress_page import create_page
from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.worker.observer import Observer

STEP_S = 0.05
LIMIT_PERCENT = 1.0
_CALLS = 10_000
_BATCHES = 21
_STEPS = 200
_STEPS_LEFT_OUT = 20
_RUN_WITHIN_S = 180.0


def measure_hook() -> Outcome:
    """Time the call that torch's optimizer hook makes after each step, in µs and as a share of the step."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        page = Path(folder) / "page"
        create_page(page, rank=0, world_size=WORLD_SIZE, attempt=1)
        observer = Observer(WorkerPaths(run="bench", attempt=1, rank=0, page=str(page)))
        call = lambda _optimizer, _args, _kwargs: observer.optimizer_stepped()  # noqa: E731 - as the hook itself is
        times_us = [_time_us(call) for _ in range(_BATCHES)]
    percent = statistics.median(times_us) * 1e-6 / STEP_S * 100
    bar = Bar(
        name="overhead_hook_percent",
        value=round(percent, 5),
        unit="%",
        limit=LIMIT_PERCENT,
        spread=f"{spread(times_us)} µs per step of {STEP_S * 1000:.0f} ms, {_CALLS} calls each",
    )
    return Outcome(bars=(bar,), rows=[{"us_per_step": [round(value, 3) for value in times_us]}])


def _time_us(call) -> float:  # type: ignore[no-untyped-def]
    began_s = time.perf_counter()
    for _ in range(_CALLS):
        call(None, (), {})
    return (time.perf_counter() - began_s) / _CALLS * 1e6


def measure_pairs(pairs: int) -> Outcome:
    """Run the same compute-bound script under both launchers in turns; which comes first alternates too."""
    work = products_per_step()
    rows: list[dict[str, object]] = []
    ratios: list[float] = []
    for pair in range(pairs):
        order = ("torchrun", "everstep") if pair % 2 == 0 else ("everstep", "torchrun")
        found = {launcher: _run_once(launcher, work) for launcher in order}
        rows += [{"pair": pair, **found[launcher]} for launcher in order]
        if all("median_step_s" in row for row in found.values()):
            ratios.append(found["everstep"]["median_step_s"] / found["torchrun"]["median_step_s"])  # type: ignore[operator]
        print(f"overhead pair {pair + 1}: {[row.get('median_step_s') for row in found.values()]}", file=sys.stderr)
    ratio = median(ratios)
    percents = [(value - 1) * 100 for value in ratios]
    bar = Bar(
        name="overhead_pairs_percent",
        value=None if ratio is None else round((ratio - 1) * 100, 3),
        unit="%",
        limit=LIMIT_PERCENT,
        spread=f"{spread(percents, failed=pairs - len(percents))} pairs",
    )
    return Outcome(bars=(bar,), rows=rows, notes=tuple(_note(launcher, rows) for launcher in ("everstep", "torchrun")))


def _note(launcher: str, rows: Sequence[dict[str, object]]) -> str:
    done = [row for row in rows if row["launcher"] == launcher and "median_step_s" in row]
    steps_s = [row["median_step_s"] for row in done]
    cpu_percent = [row["launcher_cpu_percent"] for row in done]
    return (
        f"overhead_pairs, {launcher}: step {spread(steps_s)} s; "  # type: ignore[arg-type]
        f"the launcher's own CPU {spread(cpu_percent)} % of one core"  # type: ignore[arg-type]
    )


def products_per_step() -> int:
    """So many matrix products of one rank make a step of about 50 ms when all ranks share the CPUs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)
    times_s = []
    for _ in range(300):
        began_s = time.perf_counter()
        torch.mm(matrix, matrix)
        times_s.append(time.perf_counter() - began_s)
    torch.set_num_threads(threads)
    share = min(1.0, len(os.sched_getaffinity(0)) / WORLD_SIZE)
    return max(1, round(STEP_S * share / statistics.median(times_s)))


def _run_once(launcher: str, work: int) -> dict[str, object]:
    row: dict[str, object] = {"launcher": launcher, "products_per_step": work}
    with Job(launcher, ("--work", str(work))) as job:
        row |= {"load1": job.load_before, "busy_before_job": job.busy_before}
        try:
            job.wait_for_steps(_STEPS_LEFT_OUT)
            began_s, used_s = time.monotonic(), job.launcher_cpu_s()
            job.wait_for(
                lambda: job.log.have_stepped(WORLD_SIZE, _STEPS), within_s=_RUN_WITHIN_S, what=f"{_STEPS} steps"
            )  # fmt: skip
        except JobError as error:
            job.keep_folder = True
            return row | {"error": str(error), "folder": str(job.folder)}
        row["launcher_cpu_percent"] = round((job.launcher_cpu_s() - used_s) / (time.monotonic() - began_s) * 100, 2)
    ends_s = [at_s for at_s, _ in job.log.newest()[0].steps][_STEPS_LEFT_OUT:]
    steps_s = [later - earlier for earlier, later in pairwise(ends_s)]
    return row | {"median_step_s": round(statistics.median(steps_s), 5), "slowest_step_s": round(max(steps_s), 5)}
