"""Starts `everstep run` as a user would, and reads what it left behind; no test of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from everstep.adapters.ledger_file import read_entries
from everstep.adapters.workers.processes import processes_of_run
from everstep.domain.commands import Command, RecordVerdict
from everstep.domain.errors import EverstepError
from everstep.domain.events import Event, RunStarted, WorkersStarted

SCRIPTS = Path(__file__).parent / "scripts"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has ended."""

    code: int
    out: str
    err: str
    run_dir: Path

    def bodies(self, kind: type[_T]) -> list[_T]:
        return [body for body in bodies(self.run_dir) if isinstance(body, kind)]

    def verdict(self) -> RecordVerdict:
        """The only verdict of the run."""
        verdicts = self.bodies(RecordVerdict)
        assert len(verdicts) == 1, [v.verdict.reason for v in verdicts]
        return verdicts[0]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "everstep.cli.main", *arguments]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def run(run_dir: Path, *arguments: str, timeout_s: float = 90, **extra: str) -> Finished:
    """`everstep run --run-dir RUN_DIR ARGUMENTS` to its end; nothing of it may live afterwards."""
    done = subprocess.run(
        command("run", "--run-dir", str(run_dir), *arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**extra),
        check=False,
    )
    finished = Finished(code=done.returncode, out=done.stdout, err=done.stderr, run_dir=run_dir)
    if (run_dir / "ledger.jsonl").exists():
        assert_no_orphans(run_dir)
    return finished


def bodies(run_dir: Path) -> Iterator[Event | Command]:
    for entry in read_entries(run_dir / "ledger.jsonl"):
        yield entry.body


def bodies_of(run_dir: Path, kind: type[_T]) -> list[_T]:
    """What the ledger tells of a kind; nothing while there is none, or hardly one."""
    try:
        return [body for body in bodies(run_dir) if isinstance(body, kind)]
    except (EverstepError, OSError):
        return []


def command_lines() -> Iterator[tuple[int, list[bytes]]]:
    """The arguments of every process, by pid."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile
                yield int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")


def run_id(run_dir: Path) -> str:
    return next(body.run for body in bodies(run_dir) if isinstance(body, RunStarted))


def assert_no_orphans(run_dir: Path, *, within_s: float = 5.0) -> None:
    run = run_id(run_dir)
    wait_for(lambda: not processes_of_run(run), f"all processes of {run} to end", within_s=within_s)


def wait_for(condition: Callable[[], object], what: str, *, within_s: float = 30.0) -> None:
    """Poll until a condition holds; fails with what was waited for."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {within_s} s in vain for {what}"
        time.sleep(0.02)


@contextmanager
def started(run_dir: Path, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on while the test meddles with it; killed at the end if need be."""
    process = subprocess.Popen(
        command("run", "--run-dir", str(run_dir), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


def latest_workers(run_dir: Path) -> WorkersStarted | None:
    """The newest workers that the ledger tells of; None while there are none."""
    try:
        found = [body for body in bodies(run_dir) if isinstance(body, WorkersStarted)]
    except (EverstepError, OSError):
        return None
    return found[-1] if found else None
