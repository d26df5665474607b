"""The bars of `everstep simulate`: agreement with what was published, speed, memory, spares on recorded faults.

    python bench/simulate.py [--seeds 50] [--trace ../shared/data/node_faults_stepfun/fault_trace.json]

Prints a table and writes bench/results/simulate.json. Runs in processes of their own, so that memory is a run's alone.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.figures import Bar, bar_json
from everstep.cli.simulate_batch import Variant, exact_of, play_all
from everstep.cli.simulate_play import play, play_into
from everstep.domain.causes import LLAMA3, LLAMA3_PLANNED_COUNT, LLAMA3_UNEXPECTED_COUNT
from everstep.domain.codec import encode_entry
from everstep.policy.spares import spares_for
from everstep.sim import presets
from everstep.sim.failures import DAY_S
from everstep.sim.ledger import MemoryLedger
from everstep.sim.montecarlo import Summary, cause_table
from everstep.sim.scenario import Scenario
from everstep.sim.trace import FaultTrace, parse_trace

RESULT = Path(__file__).parent / "results" / "simulate.json"
TRACE = Path(__file__).parents[1] / "../shared/data/node_faults_stepfun/fault_trace.json"
_PRESETS = {"llama3": presets.LLAMA3, "100k": presets.HUNDRED_K}
_CHI2_999 = 40.8
"""The 99.9th percentile with the 17 degrees of freedom of Llama 3's table."""
_SEEDS_TARGET = 1000
_CORES = 2


def one_run(name: str) -> dict[str, float]:
    """CPU seconds and peak memory of one run, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
    return {key: float(value) for key, value in json.loads(done.stdout).items()}


def tell_one_run(name: str) -> None:
    began_s = time.process_time()
    play(_PRESETS[name], 0)
    took_s = time.process_time() - began_s
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps({"cpu_s": took_s, "peak_mb": peak_mb}))


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ledger_digest() -> str:
    ledger = MemoryLedger()
    play_into(presets.LLAMA3, 7, ledger, lambda _body: None)
    return hashlib.blake2b(b"".join(map(encode_entry, ledger.entries)), digest_size=16).hexdigest()


def digests() -> set[str]:
    found = set()
    for hash_seed in ("0", "1", "17"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, __file__, "--digest"], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    return found


def agreement_bars(row: Summary) -> list[Bar]:
    """Against Llama 3's counts and the exact formula."""
    counts = [outcome.unexpected_count for outcome in row.outcomes]
    sigma = math.sqrt(LLAMA3_UNEXPECTED_COUNT)
    within = sum(abs(count - LLAMA3_UNEXPECTED_COUNT) <= 3 * sigma for count in counts)
    seeds = row.seed_count
    table = {cause.component: cause.mean_count for cause in cause_table(row.outcomes)}
    chi2 = sum((seeds * table.get(r.cause.component, 0.0) - seeds * r.count) ** 2 / (seeds * r.count) for r in LLAMA3)
    spread = f"mean {statistics.mean(counts):.1f}, {min(counts)}–{max(counts)}, standard deviation of 1 run {sigma:.1f}"
    found = row.effective_share
    shares = f"simulated {100 * found.mean:.2f} ± {100 * found.half_width:.2f} %, exact {100 * row.exact_share:.2f} %"
    return [
        Bar(
            name="llama3_unexpected_within_3_sigma",
            value=within / seeds,
            unit="of runs",
            limit=0.99,
            at_least=True,
            spread=spread,
        ),
        Bar(
            name="llama3_mean_unexpected_error",
            value=abs(row.unexpected.mean - LLAMA3_UNEXPECTED_COUNT),
            unit="",
            limit=3 * sigma / math.sqrt(seeds),
            spread=f"±{row.unexpected.half_width:.1f}",
        ),
        Bar(
            name="llama3_mean_planned_error",
            value=abs(row.planned.mean - LLAMA3_PLANNED_COUNT),
            unit="",
            limit=3 * math.sqrt(LLAMA3_PLANNED_COUNT / seeds),
            spread=f"mean {row.planned.mean:.1f}",
        ),
        Bar(name="llama3_causes_chi2", value=chi2, unit="", limit=_CHI2_999, spread="17 degrees of freedom"),
        Bar(
            name="llama3_against_exact_formula",
            value=100 * abs(found.mean - row.exact_share),
            unit="points",
            limit=1.0,
            spread=shares,
        ),
    ]


def speed_bars(took_s: float, cpu_s: float, seeds: int) -> list[Bar]:
    bars = []
    for name, limit_s in (("llama3", 2.0), ("100k", 15.0)):
        runs = [one_run(name) for _ in range(3)]
        times_s = [run["cpu_s"] for run in runs]
        spread = f"{min(times_s):.2f}–{max(times_s):.2f} s of CPU, n=3"
        bars.append(Bar(name=f"{name}_run_s", value=statistics.median(times_s), unit="s", limit=limit_s, spread=spread))
        bars.append(Bar(name=f"{name}_peak_mb", value=max(run["peak_mb"] for run in runs), unit="MB", limit=500.0))
    whole_min = cpu_s / _CORES / seeds * _SEEDS_TARGET / 60
    wall_min = took_s / seeds * _SEEDS_TARGET / 60
    spread = (
        f"extrapolated from the CPU time of {seeds} seeds over {_CORES} cores; by the clock {wall_min:.0f} min, "
        f"with a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    bars.append(Bar(name="llama3_1000_seeds_min", value=whole_min, unit="min", limit=15.0, spread=spread))
    return bars


def spare_bars(path: Path) -> list[Bar]:
    trace = parse_trace(json.loads(path.read_text()))
    chosen, poisson = presets.stepfun(trace), presets.stepfun(trace, spares=17)
    kept, failed = play(chosen, 0), play(poisson, 0)
    forgetful = play(replace(chosen, lemon_failures=0), 0)
    known = f"{chosen.spares} spares, {kept.unexpected_count} interruptions; "
    bars = [
        Bar(
            name="stepfun_availability",
            value=kept.available_share,
            unit="",
            limit=0.99,
            at_least=True,
            spread=f"{known}{forgetful.unexpected_count} without the lemon rule",
        ),
        Bar(
            name="stepfun_availability_poisson",
            value=failed.available_share,
            unit="",
            limit=0.99,
            spread="17 spares, Poisson's 99th percentile",
        ),
    ]
    for is_second, name in ((True, "second"), (False, "first")):
        half = half_of(trace, is_second=is_second)
        spread = f"{half.spares} spares (of 32 that there are), sized on the other half"
        value = play(half, 0).available_share
        bars.append(Bar(name=f"stepfun_{name}_half", value=value, unit="", limit=0.99, at_least=True, spread=spread))
    return bars


def half_of(trace: FaultTrace, *, is_second: bool) -> Scenario:
    """Half of the faults, with spares sized by the other half's: what the rule is worth on what it has not seen."""
    half_s = trace.duration_s / 2
    samples = trace.down_at_once()
    middle = len(samples) // 2
    spares = min(32, spares_for(samples[:middle] if is_second else samples[middle:], availability=0.99))
    whole = presets.stepfun(trace, spares=spares)
    assert whole.faults is not None
    begin_s, end_s = (half_s, trace.duration_s) if is_second else (0.0, half_s)
    kept = []
    for fault in whole.faults:
        until_s = fault.at_s + fault.down_s
        if until_s > begin_s and fault.at_s < end_s:
            at_s = max(0.0, fault.at_s - begin_s)
            kept.append(replace(fault, at_s=at_s, down_s=until_s - begin_s - at_s))
    return replace(whole, faults=tuple(sorted(kept, key=lambda fault: fault.at_s)), days=half_s / DAY_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--one", choices=_PRESETS, help=argparse.SUPPRESS)
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        tell_one_run(args.one)
        return 0
    if args.digest:
        sys.stdout.write(ledger_digest())
        return 0
    began_s, cpu_began_s = time.monotonic(), children_cpu_s()
    (row,) = play_all([Variant(label="llama3", scenario=presets.LLAMA3)], range(args.seeds), jobs=_CORES)
    took_s, cpu_s = time.monotonic() - began_s, children_cpu_s() - cpu_began_s
    bars = [*agreement_bars(row), *speed_bars(took_s, cpu_s, args.seeds)]
    bars.append(Bar(name="ledgers_of_one_seed", value=len(digests()), unit="digests", limit=1, spread="3 hash seeds"))
    notes = what_everstep_would_have_made()
    if args.trace.exists():
        bars += spare_bars(args.trace)
    else:
        notes.append("StepFun's trace is not there: its bars were not measured")
    for bar in bars:
        shown = "-" if bar.value is None else f"{bar.value:.4g} {bar.unit}"
        print(f"{bar.name:36} {shown:>14}  {bar.target:>14}  {bar.verdict:10} {bar.spread}")
    print("\n".join(notes))
    RESULT.write_text(
        json.dumps({"seeds": args.seeds, "bars": [bar_json(bar) for bar in bars], "notes": notes}, indent=1)
    )
    return 0


def what_everstep_would_have_made() -> list[str]:
    one = presets.LLAMA3
    others = [presets.with_everstep(one), *(presets.with_torchrun(one, timeout_s) for timeout_s in presets.TIMEOUTS_S)]
    rows = play_all([Variant(label=other.name, scenario=other) for other in others], range(8), jobs=_CORES)
    return [
        f"simulated, {row.label}: effective {100 * row.effective_share.mean:.2f} ± "
        f"{100 * row.effective_share.half_width:.2f} % (exact {100 * exact_of(row.scenario):.2f} %), "
        f"{row.lost_per_interruption_s.mean / 60:.1f} min lost for each interruption, 8 seeds"
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
