"""Starts worker processes: forks of the zygote when it stands ready, cold interpreters when it can't.

Knows nothing of jobs: it turns an environment and arguments into a pid, as fast as it can.
"""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.domain.errors import WorldError

_log = logging.getLogger(__name__)
_READY_WITHIN_S = 300.0
_FORK_WITHIN_S = 20.0
_MESSAGE_BYTES = 1 << 16
_FORKS_PER_MESSAGE = 32  # two descriptors each; the kernel takes 253 in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """One process to start.

    Attributes:
        environment: variables on top of this process's own.
        stdout, stderr: descriptors for its output.
        observe: run it under the observer.
    """

    environment: Mapping[str, str]
    stdout: int
    stderr: int
    observe: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run: a script or module with arguments, or with `python` False a command of any kind."""

    arguments: tuple[str, ...]
    module: bool = False
    python: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A process that shall wait to become a rank's next worker.

    Attributes:
        beside: pid of the present one.
        line: its end of the line that the order will come on; it keeps a copy.
    """

    rank: int
    beside: int
    line: socket.socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """What became of the script's own imports.

    Attributes:
        pid: the process that has them and serves instead of the zygote; 0 for none.
        problem: why they are not used.
        count, took_s: modules, and seconds for them.
    """

    pid: int = 0
    problem: str = ""
    count: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyReport:
    """How the zygote came up: seconds of imports, why it cannot fork (empty: it can), what could not be preloaded."""

    took_s: float = 0.0
    hazard: str = ""
    problems: tuple[str, ...] = ()
    heir: Heir = Heir()


class Standby:
    """The zygote of one host. `close` ends it; so does the end of this process.

    Args:
        environment: what the zygote and so every fork starts with.
        preload: further modules to import.
        program: whose imports to foresee, for as long as that does no harm.
    """

    def __init__(
        self, *, environment: Mapping[str, str], preload: Sequence[str] = (), program: Program | None = None
    ) -> None:
        self._environment = dict(environment)
        self._preload = tuple(preload)
        self._program = program if program is not None and program.python else None
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._report: StandbyReport | None = None

    @property
    def pids(self) -> set[int]:
        """The zygote's own processes, not those of its forks."""
        return {self._process.pid if self._process else 0, self._report.heir.pid if self._report else 0}

    def warm_up(self) -> None:
        """Begin to import, in the background. Harmless when it has begun already; begins anew when it has died."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._line, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everstep.worker.zygote", str(theirs.fileno()), self._imports()],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
            )

    def _imports(self) -> str:
        program = self._program
        order = {"modules": self._preload}
        if program is not None:
            order |= {"script": program.arguments[0], "is_module": program.module}  # type: ignore[dict-item]
        return msgspec.json.encode(order).decode()

    def report(self, *, timeout_s: float = _READY_WITHIN_S) -> StandbyReport:
        """How the zygote came up; waits for it.

        Raises:
            WorldError: it died or did not come up in time.
        """
        if self._report is None:
            self._report = msgspec.convert(self._receive(timeout_s), StandbyReport)
            if problem := self._report.heir.problem:
                self._program = None  # and so it stays, also when the zygote has to begin anew
                _log.warning("everstep: the warm standby does without the script's own imports: %s", problem)
        return self._report

    def ready(self) -> bool:
        """Whether a fork is possible right now, without waiting."""
        if self._process is None or self._process.poll() is not None or self._line is None:
            return False
        if self._report is None and not select.select([self._line], [], [], 0)[0]:
            return False
        return not self.report().hazard

    def start(self, program: Program, orders: Sequence[ProcessOrder]) -> list[int]:
        """Fork one process for each order and give their pids.

        Raises:
            WorldError: the zygote is gone or refuses; start cold instead.
        """
        pids: list[int] = []
        for first in range(0, len(orders), _FORKS_PER_MESSAGE):
            batch = orders[first : first + _FORKS_PER_MESSAGE]
            message = [order_text(program, order) for order in batch]
            pids += self._ask(msgspec.json.encode(message), [fd for o in batch for fd in (o.stdout, o.stderr)])
        return pids

    def fork_waiting(self, slots: Path, successors: Sequence[Successor]) -> list[int]:
        """Fork processes that wait on their lines to become workers, and give their pids.

        Args:
            slots: the folder whose slots they map meanwhile.

        Raises:
            WorldError: the zygote is gone or refuses.
        """
        blank = order_text(Program(arguments=()), ProcessOrder(environment={}, stdout=2, stderr=2))
        pids: list[int] = []
        for first in range(0, len(successors), _FORKS_PER_MESSAGE):
            batch = successors[first : first + _FORKS_PER_MESSAGE]
            message = [
                blank | {"waits": {"rank": one.rank, "slots": str(slots), "beside": one.beside}} for one in batch
            ]
            descriptors = [fd for one in batch for fd in (one.line.fileno(), 2)]
            pids += self._ask(msgspec.json.encode(message), descriptors)
        return pids

    def _ask(self, message: bytes, descriptors: list[int]) -> list[int]:
        if self._line is None:
            raise WorldError("the standby has not been started")
        try:
            socket.send_fds(self._line, [message], descriptors)
        except OSError as error:
            raise WorldError(f"the standby is gone ({error.strerror})") from error
        answer = self._receive(_FORK_WITHIN_S)
        if "pids" not in answer:
            raise WorldError(str(answer.get("error")))
        return [int(pid) for pid in answer["pids"]]

    def _receive(self, timeout_s: float) -> dict[str, list[int]]:
        assert self._line is not None
        self._line.settimeout(timeout_s)
        try:
            message = self._line.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise WorldError(f"the standby does not answer within {timeout_s:.0f} s") from error
        if not message:
            raise WorldError("the standby has died")
        answer: dict[str, list[int]] = msgspec.json.decode(message)
        return answer

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._report = None


def order_text(program: Program, order: ProcessOrder) -> dict[str, object]:
    """What a fork is told (`worker.zygote.ForkOrder`)."""
    return {
        "environment": dict(order.environment),
        "arguments": list(program.arguments),
        "module": program.module,
        "observe": order.observe,
        "parent": os.getpid(),
    }


def start_cold(program: Program, order: ProcessOrder, *, environment: Mapping[str, str]) -> int:
    """Start one process from nothing and give its pid.

    Raises:
        WorldError: the command can't be started.
    """
    if not program.python:
        command = list(program.arguments)
    elif order.observe:
        command = [sys.executable, "-u", "-m", "everstep.worker", *(["-m"] if program.module else [])]
        command += program.arguments
    else:
        command = [sys.executable, *(["-m"] if program.module else []), *program.arguments]
    try:
        process = subprocess.Popen(
            command,
            env={**environment, **order.environment},
            stdin=subprocess.DEVNULL,
            stdout=order.stdout,
            stderr=order.stderr,
            start_new_session=True,
        )
    except OSError as error:
        raise WorldError(f"cannot start {command[0]}: {error.strerror}") from error
    process.returncode = 0  # the watch reaps it; Popen must not
    return process.pid


def wait_for_line(descriptor: int, *, timeout_s: float) -> str:
    """The first line that a child writes to a pipe; empty when it ends or the time is over first."""
    deadline_s = time.monotonic() + timeout_s
    text = b""
    while b"\n" not in text:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            return ""
        piece = os.read(descriptor, 4096)
        if not piece:
            return ""
        text += piece
    return text.decode().splitlines()[0]
