"""`make bench-storage-hang`: hangs a job's checkpoint disk for a minute, for real, and says what that cost.

Steps, words and durability are measured. Needs gcc: the disk is made to hang by a library that is loaded before the
C library (tests/storage).
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/storage_hang.py` works

from tests.storage.faulty import FaultyStorage

from everstep.adapters.ledger_file import read_entries
from everstep.domain.errors import EverstepError
from everstep.domain.events import CheckpointDelayed, CheckpointSaved, StallSuspected, StepsFinished

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "e2e" / "scripts" / "train_slowly.py"
RESULT = Path(__file__).resolve().parent / "results" / "storage_hang.json"
STEP_BAR_S = 5.0
"""A step that takes longer has waited for the disk."""
_T = TypeVar("_T")


def found(folder: Path, kind: type[_T]) -> list[_T]:
    try:
        return [entry.body for entry in read_entries(folder / "ledger.jsonl") if isinstance(entry.body, kind)]
    except (EverstepError, OSError):  # no ledger yet
        return []


def step_ends(folder: Path) -> list[float]:
    return [at_s for body in found(folder, StepsFinished) for at_s in body.ended_at_s]


def steps_in(ends: list[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(ends)]


def await_(condition: Callable[[], object], within_s: float = 120.0) -> None:
    ends_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends_s:
            raise SystemExit("waited in vain")
        time.sleep(0.05)


def main() -> int:
    """Returns 0 when training never stopped, durability came back, and the person was told."""
    parser = argparse.ArgumentParser(description="Hang the disk under a running job.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it hangs")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="everstep-hang-"))
    folder = scratch / "run"
    disk = FaultyStorage(folder / "checkpoints", scratch)
    command = [
        str(Path(sys.executable).with_name("everstep")),
        "run",
        "--nproc-per-node",
        "2",
        "--run-dir",
        str(folder),
    ]
    command += [str(SCRIPT), "1000000", str(scratch / "digest"), "0.3", "0.02"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **disk.environment})
    await_(lambda: len(found(folder, CheckpointSaved)) >= 5)
    time.sleep(6)
    before = len(step_ends(folder))
    disk.hang()
    time.sleep(args.seconds)
    during = len(step_ends(folder))
    durable = max(body.step for body in found(folder, CheckpointSaved))
    disk.heal()
    healed_s = time.monotonic()
    await_(lambda: max(body.step for body in found(folder, CheckpointSaved)) > durable)
    back_s = time.monotonic() - healed_s
    process.terminate()
    process.wait()
    ends = step_ends(folder)
    healthy_s, hung = statistics.median(steps_in(ends[:before])), steps_in(ends[before:during])
    told = [f"after {body.waited_s:.0f} s: {body.reason}" for body in found(folder, CheckpointDelayed)]
    figures = {
        "hung_s": args.seconds,
        "median_step_before_s": round(healthy_s, 4),
        "median_step_during_s": round(statistics.median(hung), 4),
        "longest_step_during_s": round(max(hung), 3),
        "steps_during": len(hung),
        "durable_again_after_s": round(back_s, 2),
        "suspected_hangs": len(found(folder, StallSuspected)),
        "is_met": max(hung) <= STEP_BAR_S and bool(told),
    }
    for name, value in figures.items():
        print(f"{name:22} {value}")
    print(*(f"told {sentence}" for sentence in told), sep="\n")
    about = {"at": datetime.now(UTC).isoformat(), "cpus": os.cpu_count(), "kernel": platform.release()}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({**about, **figures, "told": told}, indent=1) + "\n")
    shutil.rmtree(scratch)
    return int(not figures["is_met"])


if __name__ == "__main__":
    sys.exit(main())
