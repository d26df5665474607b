"""How long `everstep report` takes on a ledger of a million entries; the whole process counts."""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from everstep.adapters.ledger_file import LEDGER_NAME
from everstep.domain.causes import LLAMA3
from everstep.domain.codec import Entry, encode_entry
from everstep.domain.commands import Command, FinishJob, HostShare, RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointSaved,
    Event,
    PhaseChanged,
    RunStarted,
    StepsFinished,
    WorkerExited,
    WorkerReady,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict

ENTRY_COUNT = 1_000_000
TARGET_S = 10.0
SEED = 20_240_731
REPEAT_COUNT = 3
TIMEOUT_S = 300.0
_HOST = HostId("host-0")
_RANK_COUNT = 8
_STEP_S = 0.5
_SAVE_EVERY_BATCHES = 100
_FAIL_EVERY_BATCHES = 4_000
_WALL = "2026-11-30T05:44:33.123Z"


class _Story:
    """One host of eight ranks that trains in small batches of steps, saves, fails and recovers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._at_s = 0.0
        self._attempt = Attempt(0)
        self._step = 0
        self._saved_step = 0

    def entries(self) -> Iterator[Event | Command]:
        """Without an end."""
        yield RunStarted(
            at_s=0.0, run=RunId("bench"), everstep="0", command=("train.py",), world_size=_RANK_COUNT, host_count=1
        )
        while True:
            yield from self._start()
            for batch in range(self._rng.randint(_FAIL_EVERY_BATCHES // 2, 3 * _FAIL_EVERY_BATCHES // 2)):
                if batch % _SAVE_EVERY_BATCHES == _SAVE_EVERY_BATCHES - 1:
                    yield from self._save()
                yield self._train()
            yield from self._fail()

    def _later(self, seconds: float) -> float:
        self._at_s += seconds
        return self._at_s

    def _phase(self, phase: Phase) -> PhaseChanged:
        return PhaseChanged(at_s=self._at_s, attempt=self._attempt, host=_HOST, phase=phase, step=self._step)

    def _start(self) -> Iterator[Event | Command]:
        self._attempt = Attempt(self._attempt + 1)
        self._step = self._saved_step
        yield StartWorkers(
            at_s=self._later(0.5),
            attempt=self._attempt,
            shares=(HostShare(host=_HOST, first_rank=Rank(0), count=_RANK_COUNT),),
            world_size=_RANK_COUNT,
            restart_count=self._attempt - 1,
            faults=(),
            rung=None,
            why="",
        )
        pids = tuple(range(100, 100 + _RANK_COUNT))
        yield WorkersStarted(
            at_s=self._later(0.2), attempt=self._attempt, host=_HOST, pids=pids, warm=True, spawn_s=0.2
        )
        yield self._phase(Phase.STARTING)
        for part, after_s in (("imported", 1.0), ("group_ready", 2.0), ("restored", 4.0)):
            self._later(after_s / 4)
            for rank in range(_RANK_COUNT):
                yield WorkerReady(
                    at_s=self._at_s, attempt=self._attempt, rank=Rank(rank), part=part, after_s=after_s + rank / 100
                )
        yield self._phase(Phase.RESTORING)
        self._later(2.0)
        yield self._phase(Phase.WARMING_UP)

    def _train(self) -> StepsFinished:
        count = self._rng.randint(1, 8)
        ends = tuple(round(self._later(_STEP_S * self._rng.gauss(1.0, 0.03)), 6) for _ in range(count))
        first, self._step = self._step + 1, self._step + count
        return StepsFinished(
            at_s=self._at_s, attempt=self._attempt, host=_HOST, first_step=first, ended_at_s=ends, loss=2.5
        )

    def _save(self) -> Iterator[Event | Command]:
        yield self._phase(Phase.SAVING)
        self._later(1.5)
        self._saved_step = self._step
        yield CheckpointSaved(
            at_s=self._at_s, attempt=self._attempt, step=self._step, path=f"checkpoints/{self._step}",
            size_bytes=10**9, duration_s=1.5,
        )  # fmt: skip
        yield self._phase(Phase.TRAINING)

    def _fail(self) -> Iterator[Event | Command]:
        since_s, rank = self._at_s, Rank(self._rng.randrange(_RANK_COUNT))
        (row,) = self._rng.choices(LLAMA3, weights=[row.count for row in LLAMA3])
        detected_at_s = self._later(self._rng.uniform(0.1, 5.0))
        yield WorkerExited(
            at_s=self._at_s, attempt=self._attempt, host=_HOST, rank=rank, pid=100 + rank, exit_code=-9,
            phase=Phase.TRAINING, step=self._step,
        )  # fmt: skip
        verdict = Verdict(
            trouble=Trouble.DEAD, ranks=(rank,), hosts=(_HOST,), cause=row.cause, signature=f"dead:{rank}",
            reason=f"rank {rank} on {_HOST} was killed by signal 9 after step {self._step}",
        )  # fmt: skip
        yield RecordVerdict(
            at_s=self._later(0.3), attempt=self._attempt, incident=IncidentId(f"a{self._attempt:04}-1"),
            verdict=verdict, since_s=since_s, detected_at_s=detected_at_s, step=self._step,
        )  # fmt: skip
        yield StopWorkers(at_s=self._at_s, attempt=self._attempt, host=_HOST, kill_ranks=(rank,), grace_s=5.0)
        yield WorkersStopped(at_s=self._later(0.5), attempt=self._attempt, host=_HOST, killed=())

    def end(self) -> FinishJob:
        return FinishJob(at_s=self._later(1.0), exit_code=ExitCode.DONE, rung=None, summary="the script is done")


def write_ledger(run_dir: Path, entry_count: int, seed: int = SEED) -> Path:
    """Write a ledger of exactly so many entries; the same seed gives the same bytes."""
    story = _Story(random.Random(seed))
    path = run_dir / LEDGER_NAME
    with path.open("wb") as file:
        entries = story.entries()
        for number in range(1, entry_count):
            file.write(encode_entry(Entry(number=number, wall=_WALL, body=next(entries))))
        file.write(encode_entry(Entry(number=entry_count, wall=_WALL, body=story.end())))
    return path


def bench_report(entry_count: int = ENTRY_COUNT) -> dict[str, object]:
    """The median of three whole `python -m everstep report DIR`, in seconds."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        path = write_ledger(Path(folder), entry_count)
        size_bytes = path.stat().st_size
        times = [_time_report(folder) for _ in range(REPEAT_COUNT)]
    value = statistics.median(times)
    return {
        "bar": "report_1e6_s",
        "value": round(value, 3),
        "target": TARGET_S,
        "unit": "s",
        "is_met": value <= TARGET_S,
        "all": [round(seconds, 3) for seconds in times],
        "entry_count": entry_count,
        "ledger_bytes": size_bytes,
        "seed": SEED,
    }


def _time_report(folder: str) -> float:
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "everstep", "report", folder], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S
    )
    return time.perf_counter() - began_s


if __name__ == "__main__":
    print(json.dumps(bench_report(), indent=2))
