"""Plays every hang case over gloo, and the healthy jobs, in several seeds; prints what was said, right or wrong."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/hang_cases.py` finds the tests

from tests.e2e.hang_cases.expected import BY_NAME, CASES, HEALTHY, Case
from tests.e2e.hang_cases.playing import Said, play

_QUICK = ("sigstop", "pipeline_frozen", "gil", "spin", "order", "side_mismatch", "shape", "dtype")
"""Those whose verdict must come within two seconds: frozen, GIL-locked, looping, mismatched."""
VERDICT_LIMIT_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    parser.add_argument("cases", nargs="*", help="only these")
    options = parser.parse_args()
    cases = [BY_NAME[name] for name in options.cases] or [*CASES, *HEALTHY]
    folder = options.keep or Path(tempfile.mkdtemp())
    wrong, slowest_s = 0, 0.0
    for case in cases:
        for seed in range(options.seeds):
            run_dir = folder / f"{case.name}-{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)
            said = play(case, seed=seed, run_dir=run_dir)
            problem = said.wrong(case, case.victim(seed))
            wrong += bool(problem)
            if case.name in _QUICK and said.verdict_s is not None:
                slowest_s = max(slowest_s, said.verdict_s)
            print(_line(case, seed, said, problem), flush=True)
    if not options.keep:
        shutil.rmtree(folder)
    print(f"{wrong} of {len(cases) * options.seeds} wrong; slowest verdict of the quick classes {slowest_s:.2f} s")
    return int(wrong > 0 or slowest_s > VERDICT_LIMIT_S)


def _line(case: Case, seed: int, said: Said, problem: str) -> str:
    when = "      -" if said.verdict_s is None else f"{said.verdict_s:5.2f} s"
    ranks = ",".join(map(str, sorted(said.ranks))) or "-"
    kind = said.trouble + (" (borne)" if said.borne else "")
    return (
        f"{'WRONG' if problem else 'right'}  {case.name:18} victim {case.victim(seed)}  {kind or 'nothing':24} "
        f"{ranks:8} {when}  {said.took_s:4.1f} s  {problem}"
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())
