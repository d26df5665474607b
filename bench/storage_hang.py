"""Hangs the checkpoint disk of a running job for a minute, for real, and says what that cost: steps, words, durability.

Needs gcc: the disk is made to hang by a library that is loaded before the C library (tests/storage).
"""

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/storage_hang.py` works

from tests.storage.faulty import FaultyStorage

from everstep.adapters.ledger_file import read_entries
from everstep.domain.errors import EverstepError
from everstep.domain.events import CheckpointDelayed, CheckpointSaved, StallSuspected, StepsFinished

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "e2e" / "scripts" / "train_slowly.py"
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
    """Returns 0 when training never stopped and durability came back."""
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
    print(f"median step {healthy_s * 1000:.1f} ms before, {statistics.median(hung) * 1000:.1f} ms while the disk hung")
    print(f"{len(hung)} steps in those {args.seconds:.0f} s, the longest {max(hung):.2f} s")
    print(f"durable again {back_s:.2f} s after the disk")
    for body in found(folder, CheckpointDelayed):
        print(f"told after {body.waited_s:.0f} s: {body.reason}")
    print(f"suspected hangs: {len(found(folder, StallSuspected))}")
    shutil.rmtree(scratch)
    return int(max(hung) > 5.0)


if __name__ == "__main__":
    sys.exit(main())
