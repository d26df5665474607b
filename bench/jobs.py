"""Starts, watches and stops one job under a launcher, everstep or torchrun, for the benchmark. It judges nothing."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from bench.event_log import EventLog
from bench.machine import cpu_s, is_gone, kill_marked, load1, marked_pids, wait_until_quiet
from everstep.adapters.ledger_file import LEDGER_NAME
from everstep.domain.codec import decode_entry
from everstep.domain.commands import Command, RecordVerdict
from everstep.domain.events import Event

HERE = Path(__file__).resolve().parent
WORLD_SIZE = 4
START_WITHIN_S = 120.0
POLL_S = 0.005
_STOP_WITHIN_S = 10.0
_READER_ENDS_WITHIN_S = 5.0


class JobError(Exception):
    """The job did not do what the measurement needs; the text says what."""


class _Tail:
    """New whole lines of a file that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole


class Job:
    """One job. `with` stops it and all that it started.

    Args:
        launcher: `everstep` or `torchrun`.
        arguments: the script's.
        script: a file of this folder.
        world_size: ranks.
    """

    def __init__(
        self,
        launcher: str,
        arguments: Sequence[str] = (),
        *,
        script: str = "workload.py",
        world_size: int = WORLD_SIZE,
    ) -> None:
        self.launcher = launcher
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self.triggers = self.folder / "triggers"
        self.triggers.mkdir()
        self.log = EventLog()
        self.output: list[tuple[float, str]] = []
        self.ledger: list[Event | Command] = []
        self.left_behind = 0
        self.keep_folder = False
        self.busy_before = wait_until_quiet()
        self.load_before = load1()
        self._mark = f"BENCH_LOG={self.folder / 'events.jsonl'}"
        self._log_tail = _Tail(self.folder / "events.jsonl")
        self._ledger_tail = _Tail(self.folder / "run" / LEDGER_NAME)
        self._process = subprocess.Popen(
            [*self._command(), str(HERE / script), *(text.replace("{folder}", str(self.folder)) for text in arguments)],
            env=self._environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, name="bench-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self.keep_folder or kind is not None:
            (self.folder / "launcher.log").write_text("\n".join(f"{at_s:.3f} {text}" for at_s, text in self.output))
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def launcher_cpu_s(self) -> float:
        """CPU seconds that the launcher itself has used."""
        return cpu_s(self._process.pid)

    def read(self) -> None:
        """Take in what the script and the ledger have told since the last call."""
        self.log.take(line.decode() for line in self._log_tail.lines())
        self.ledger += [decode_entry(line + b"\n").body for line in self._ledger_tail.lines()]

    def wait_for(
        self, done: Callable[[], object], *, within_s: float, what: str, and_watch: Callable[[], None] | None = None
    ) -> None:
        """Read until `done` says so.

        Raises:
            JobError: the launcher ended or the time is over before.
        """
        ends_s = time.monotonic() + within_s
        while True:
            self.read()
            if and_watch is not None:
                and_watch()
            if done():
                return
            if self.exit_code is not None:
                time.sleep(0.1)
                self.read()
                if done():
                    return
                raise JobError(f"{self.launcher} ended with {self.exit_code} before {what}")
            if time.monotonic() > ends_s:
                raise JobError(f"{what} did not happen within {within_s:.0f} s")
            time.sleep(POLL_S)

    def wait_for_steps(self, count: int) -> None:
        """Wait until the newest life of each rank has finished so many steps.

        Raises:
            JobError: it did not come to that.
        """
        self.wait_for(
            lambda: self.log.have_stepped(self.world_size, count),
            within_s=START_WITHIN_S,
            what=f"{count} steps of each rank",
        )

    def first_verdict(self, since_s: float) -> tuple[float, RecordVerdict] | None:
        """The first verdict after a moment of CLOCK_MONOTONIC, and its own moment."""
        zero_s = max((life.zero_ns for life in self.log.lives), default=0) / 1e9
        for body in self.ledger:
            if isinstance(body, RecordVerdict) and body.at_s + zero_s > since_s:
                return body.at_s + zero_s, body
        return None

    def _command(self) -> list[str]:
        if self.launcher == "everstep":
            program = str(Path(sys.executable).with_name("everstep"))
            return [program, "run", "--nproc-per-node", str(self.world_size), "--run-dir", str(self.folder / "run")]
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.world_size), "--max-restarts", "100"),
        ]

    def _environment(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        environment = {**os.environ, name: value, "BENCH_TRIGGERS": str(self.triggers), "OMP_NUM_THREADS": "1"}
        if self.launcher == "torchrun":
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it torchrun never recovers in place
        return environment

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def _stop(self) -> None:
        """Ask, then kill. What lives on after the launcher's own end is counted."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        time.sleep(0.2)
        self.left_behind = len(marked_pids(self._mark))
        kill_marked(self._mark)
        self._reader.join(_READER_ENDS_WITHIN_S)


class Disappearance:
    """Watches pids and remembers when the last one was gone."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._left = set(pids)
        self.at_s: float | None = None

    def look(self) -> None:
        if self._left:
            self._left = {pid for pid in self._left if not is_gone(pid)}
            self.at_s = None if self._left else time.monotonic()
