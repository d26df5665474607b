"""Kills all ranks of a job under `everstep run` and times the way to its first new step, beside a cold start.

The cold start is what torchrun's restart comes to at best: all ranks at once from a fresh interpreter, a store that
listens already, `dcp.load` with the checkpoint out of the page cache. Its clock starts at the exec: seeing the death
and ending the old attempt are not counted for it. Every first loss must be that of a run that nothing touched.
"""

import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.event_log import EventLog, Life
from bench.figures import Bar, Outcome, median, spread
from bench.jobs import HERE, Job, JobError
from bench.machine import load1, wait_until_quiet
from everstep.adapters.checkpoints.memory_folder import folder_of
from everstep.adapters.checkpoints.memory_slots import RankSlots
from everstep.domain.errors import WorldError
from everstep.domain.events import CheckpointRestored, RunStarted
from everstep.policy.accounting import Accountant
from everstep.policy.checkpoints import committed_steps
from everstep.policy.incidents import IncidentLog

LIMIT_S = 1.5
RATIO_MIN = 5.0
WITHIN_S = 120.0
STEPS_BEFORE = 6
BLOCKS = 2
"""Warm and cold rounds take turns, so that a busy moment of the machine meets both."""
_SAVE_AT = 3
_WARM = {"attach": (), "resuming": ("--promised",)}
"""The script with its three lines, and one that also asks `resuming()` before it builds its model."""
_WAYS = (*_WARM, "cold")
_COLD_PARTS = (
    ("spawn", "proc_start"),
    ("import", "script_imported"),
    ("init", "pg_ready"),
    ("build", "built"),
    ("restore", "restored"),
)


def measure_restart(*, world: int, layers: int, kills: int) -> Outcome:
    """So many kills of all ranks, and as many cold starts."""
    rows: list[dict[str, object]] = []
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
    try:
        cold = _Cold(folder, world=world, layers=layers)
        losses = cold.prepare(until=_SAVE_AT + (kills + 1) * (STEPS_BEFORE + 2))
        for block in range(BLOCKS):
            share = range(block * kills // BLOCKS, (block + 1) * kills // BLOCKS)
            for way, flags in _WARM.items():
                rows += _warm_rounds(way, ("--layers", str(layers), *flags), world, share, losses)
            rows += [cold.start(number, losses) for number in share]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome_of(rows, name=f"restart_{world}_ranks", size=f"{layers * 85 / 1000:.2f} GB/rank, ")


def outcome_of(rows: Sequence[dict[str, object]], *, name: str, size: str) -> Outcome:
    """The bars of all repetitions; failures are counted and have no time."""
    totals = {way: [float(str(r["total_s"])) for r in rows if r["way"] == way and "total_s" in r] for way in _WAYS}
    failed = {way: sum(row["way"] == way and "error" in row for row in rows) for way in _WAYS}
    theirs = median(totals["cold"])
    bars = []
    for way in _WARM:
        ours, title = median(totals[way]), f"{name}{'' if way == 'attach' else f'_{way}'}"
        text = size + spread(totals[way], failed=failed[way])
        bars.append(Bar(name=f"{title}_s", value=ours, unit="s", limit=LIMIT_S, spread=text))
        ratio = round(theirs / ours, 2) if ours and theirs else None
        text = f"cold start with dcp.load: {spread(totals['cold'], failed=failed['cold'])}"
        bars.append(
            Bar(name=f"{title}_beside_cold", value=ratio, unit="×", limit=RATIO_MIN, at_least=True, spread=text)
        )
    notes = [_part_note(way, name, rows, key) for way in _WAYS for key in ("parts", "cpu_s")]
    return Outcome(bars=tuple(bars), rows=rows, notes=tuple(notes))


def _part_note(way: str, name: str, rows: Sequence[dict[str, object]], key: str) -> str:
    parts: dict[str, list[float]] = {}
    for row in rows:
        found = row.get(key)
        if row["way"] == way and isinstance(found, dict):
            for part, value in found.items():
                parts.setdefault(part, []).append(value)
    texts = ", ".join(f"{part} {statistics.median(values):.3f}" for part, values in parts.items())
    unit = "s" if key == "parts" else "CPU seconds of the largest rank"
    return f"{name}, {way}, medians in {unit}: {texts}"


def _warm_rounds(
    way: str, arguments: Sequence[str], world: int, numbers: Sequence[int], losses: dict[int, str]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with Job("everstep", arguments, script="attached.py", world_size=world) as job:
        for number in numbers:
            row: dict[str, object] = {"way": way, "number": number, "load1": load1()}
            rows.append(row)
            try:
                row |= kill_all(job, losses)
            except JobError as error:
                row["error"] = str(error)
                job.keep_folder = True
                break
            print(
                f"kill {number + 1} of all {world} ranks, {way}: {row['total_s']:.2f} s {row['parts']}", file=sys.stderr
            )
    return rows


def kill_all(job: Job, losses: dict[int, str]) -> dict[str, object]:
    """One kill of all ranks, once the job trains well; the loss of every step must be the untouched run's.

    Raises:
        JobError: it did not come back, or not to the same numbers.
    """
    job.wait_for_steps(STEPS_BEFORE)
    job.wait_for(lambda: _newest_in_memory(job), within_s=WITHIN_S, what="a step of all ranks in memory")
    old = job.log.newest()
    restored_before = sum(isinstance(body, CheckpointRestored) for body in job.ledger)
    since_s = time.monotonic()
    for life in old.values():
        with contextlib.suppress(ProcessLookupError):  # the death of the first may have ended it already
            os.kill(life.pid, signal.SIGKILL)
    job.wait_for(
        lambda: job.log.recovered(job.world_size, since_s),
        within_s=WITHIN_S,
        what="a step of every rank after the kill",
    )
    job.wait_for(lambda: _recovered_at_s(job) is not None, within_s=WITHIN_S, what="the ledger's word on the recovery")
    lives = job.log.recovered(job.world_size, since_s)
    assert lives is not None
    _compare(lives, losses)
    restored = [body for body in job.ledger if isinstance(body, CheckpointRestored)][restored_before:]
    reached = max(step for life in old.values() for _, step in life.steps)
    ends_s = max(life.steps[0][0] for life in lives.values())
    return {
        "total_s": round(ends_s - since_s, 3),
        "parts": _parts(job, since_s=since_s, ends_s=ends_s),
        "cpu_s": _cpu_parts(lives),
        "lost_steps": reached - (lives[0].steps[0][1] - 1),
        "source": restored[-1].path if restored else "",
    }


def _newest_in_memory(job: Job) -> int:
    """The newest step that memory has of all ranks; 0 for none."""
    started = next(body for body in job.ledger if isinstance(body, RunStarted))
    folder = folder_of(str(started.run))
    try:
        slots = [RankSlots(folder, rank).slots() for rank in range(job.world_size)]
    except (WorldError, OSError):
        return 0
    return next(iter(committed_steps(slots)), 0)


def _recovered_at_s(job: Job) -> float | None:
    log = IncidentLog()
    for body in job.ledger:
        log.handle(body)
    found = log.incidents(Accountant().account())
    return found[-1].recovered_at_s if found else None


def _parts(job: Job, *, since_s: float, ends_s: float) -> dict[str, float]:
    """The parts as `everstep report` tells them, from the kill to the script's own word on its first step."""
    log, accountant = IncidentLog(), Accountant()
    for body in job.ledger:
        log.handle(body)
        accountant.handle(body)
    incident = log.incidents(accountant.account())[-1]
    zero_s = max(life.zero_ns for life in job.log.lives) / 1e9
    parts, at_s = {}, incident.since_s + zero_s
    for part in incident.parts:
        begins_s, at_s = max(at_s, since_s), at_s + part.duration_s
        if part.name == incident.parts[-1].name:
            at_s = ends_s
        parts[part.name] = round(max(0.0, at_s - begins_s), 3)
    return parts


def _cpu_parts(lives: dict[int, Life]) -> dict[str, float]:
    """CPU seconds by part, the largest rank's: what a part costs however busy the machine is."""
    found, ends = {}, [*_COLD_PARTS[1:], ("first_step", "step")]
    for (_, before), (part, event) in pairwise([("", ""), *ends]):
        spent = [life.cpu_s[event] - life.cpu_s.get(before, 0.0) for life in lives.values() if event in life.cpu_s]
        found[part] = round(max(spent, default=0.0), 3)
    return found


def _compare(lives: dict[int, Life], losses: dict[int, str]) -> None:
    for rank, life in lives.items():
        for step, loss in life.losses.items():
            if step in losses and losses[step] != f"{rank} {loss}".partition(" ")[2]:
                raise JobError(f"rank {rank} has another loss at step {step} than the run that nothing touched")


class _Cold:
    """Starts all ranks from nothing."""

    def __init__(self, folder: Path, *, world: int, layers: int) -> None:
        self._folder = folder
        self._checkpoint = folder / "dcp"
        self._world = world
        self._layers = layers

    def prepare(self, *, until: int) -> dict[int, str]:
        """Train without interruption and save once; the losses by step, which all ranks share."""
        log, _ = self._launch("--until", str(until), within_s=600.0)
        return log.newest()[0].losses

    def start(self, number: int, losses: dict[int, str]) -> dict[str, object]:
        """One cold start, with the checkpoint out of the page cache."""
        row: dict[str, object] = {"way": "cold", "number": number, "load1": load1(), "busy": wait_until_quiet()}
        for path in self._checkpoint.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            log, since_s = self._launch("--load", within_s=WITHIN_S)
            lives = log.newest()
            _compare(lives, losses)
        except JobError as error:
            return row | {"error": str(error)}
        ends_s = max(life.steps[0][0] for life in lives.values())
        parts, at_s = {}, since_s
        for part, event in _COLD_PARTS:
            begins_s, at_s = at_s, max(life.told[event] for life in lives.values())
            parts[part] = round(at_s - begins_s, 3)
        parts["first_step"] = round(ends_s - at_s, 3)
        print(f"cold start {number + 1} of {self._world} ranks: {ends_s - since_s:.2f} s {parts}", file=sys.stderr)
        return row | {"total_s": round(ends_s - since_s, 3), "parts": parts, "cpu_s": _cpu_parts(lives)}

    def _launch(self, *arguments: str, within_s: float) -> tuple[EventLog, float]:
        """Run all ranks to their end; what they told, and when the first was started."""
        path = self._folder / "events.jsonl"
        path.unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        script = [str(HERE / "attached.py"), f"--layers={self._layers}", f"--folder={self._checkpoint}"]
        since_s = time.monotonic()
        ranks = [
            subprocess.Popen(
                [sys.executable, *script, "--save-at", str(_SAVE_AT), *arguments],
                env={**os.environ, **self._environment(rank, port, path)},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(self._world)
        ]
        try:
            for process in ranks:
                if process.wait(max(0.1, since_s + within_s - time.monotonic())) != 0:
                    raise JobError(f"a rank of the cold start ended with {process.returncode}")
        except subprocess.TimeoutExpired as late:
            raise JobError(f"the cold start took more than {within_s:.0f} s") from late
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        log = EventLog()
        log.take(path.read_text().splitlines())
        return log, since_s

    def _environment(self, rank: int, port: int, events: Path) -> dict[str, str]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._world, "MASTER_PORT": port}
        return {
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "BENCH_LOG": str(events),
            "BENCH_TRIGGERS": str(self._folder),
        }
