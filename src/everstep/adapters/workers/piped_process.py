"""A process of everstep's own beside the workers: started again when it dies, asked to finish by a closed pipe.

It outlives whoever started it by what it still has to do. Knows nothing of what it does.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from everstep.adapters.workers.worker_environment import RUN_VARIABLE

_log = logging.getLogger(__name__)
_TELL_EVERY_S = 10.0
_BETWEEN_STARTS_S = 1.0
_BETWEEN_STARTS_MAX_S = 10.0
_LONG_LIFE_S = 2.0
_LAST_STARTS = 5
"""Whoever is killed while it finishes what is left is started again so often."""


class PipedProcess:
    """`python -m MODULE FD ARGUMENTS...`, where FD is the reading end of a pipe. Sweeps of the run do not find it."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._module = module
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._write_end = -1
        self._started_s = float("-inf")
        self._pause_s = _BETWEEN_STARTS_S

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ensure(self) -> None:
        """Start it unless it lives; one that dies young again and again is started ever less often."""
        now_s = time.monotonic()
        if self.is_alive() or now_s - self._started_s < self._pause_s:
            return
        if self._process is not None:
            died_young = now_s - self._started_s < _LONG_LIFE_S + self._pause_s
            self._pause_s = min(self._pause_s * 2, _BETWEEN_STARTS_MAX_S) if died_young else _BETWEEN_STARTS_S
        self._start()

    def release(self) -> None:
        """Ask it to finish, and do not wait."""
        self._drop_pipe()

    def finish(self, *, within_s: float, what: str) -> bool:
        """Let it do what is left, telling every ten seconds that it is waited for; False when it is not done by then.

        One that is killed or fails meanwhile is started again: what it had to do is still to be done.

        Args:
            what: what is not so yet, for the beginning of a sentence.
        """
        started_s = time.monotonic()
        code: int | None = 1
        for _ in range(_LAST_STARTS):
            if not self.is_alive():
                self._start()
            self._drop_pipe()
            code = self._wait_told(started_s, within_s, what)
            if not code:
                return code is not None
        _log.warning("%s: its process has died %d times over it, at last with exit code %d", what, _LAST_STARTS, code)
        return False

    def _start(self) -> None:
        self._started_s = time.monotonic()
        self._drop_pipe()
        read_end, self._write_end = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(read_end), *self._arguments],
                pass_fds=[read_end],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def _drop_pipe(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def _wait_told(self, started_s: float, within_s: float, what: str) -> int | None:
        """Its exit code; None when the time is over before it ends."""
        assert self._process is not None
        while True:
            left_s = started_s + within_s - time.monotonic()
            try:
                return self._process.wait(min(_TELL_EVERY_S, max(left_s, 0.0)))
            except subprocess.TimeoutExpired:
                if left_s <= _TELL_EVERY_S:
                    _log.warning("%s; process %d goes on by itself until it is", what, self.pid)
                    return None
                waited_s = time.monotonic() - started_s
                _log.warning("%s after %.0f s; waiting up to %.0f s", what, waited_s, within_s)
