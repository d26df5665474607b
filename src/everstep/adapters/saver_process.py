"""The saver of one host as a process: started when needed, again when it dies, ended by a closed pipe.

Knows nothing of checkpoints; the process behind it is `everstep.worker.saver`.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from everstep.adapters.memory_folder import MemoryFolder, remove_folder
from everstep.adapters.memory_slots import JOB_NAME
from everstep.adapters.worker_environment import RUN_VARIABLE

_BETWEEN_STARTS_S = 1.0


class SaverProcess:
    """Keeps a saver alive beside the workers; sweeps do not find it, since it must outlive them.

    Args:
        folder: the run's memory folder. `close` lets it go.
    """

    def __init__(self, folder: MemoryFolder) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._write_end = -1
        self._started_s = float("-inf")

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def ensure(self) -> None:
        """Start the saver once there is something to save, and again after it has died; at most once in a second."""
        if self._process is not None and self._process.poll() is None:
            return
        if not (self._folder.path / JOB_NAME).exists():
            return
        if time.monotonic() - self._started_s < _BETWEEN_STARTS_S:
            return
        self._started_s = time.monotonic()
        self._drop_pipe()
        read_end, self._write_end = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everstep.worker.saver", str(read_end), str(self._folder.path)],
                pass_fds=[read_end],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def close(self, *, within_s: float) -> bool:
        """Let the saver finish: the newest complete state becomes durable, and the folder goes.

        Returns False when that takes longer; the saver then goes on by itself.
        """
        self._started_s = float("-inf")
        self.ensure()  # what a dead one had to do is still to be done
        self._drop_pipe()
        done = True
        if self._process is not None:
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                done = False
        if done:
            remove_folder(self._folder.path)
        with contextlib.suppress(OSError):
            self._folder.release()
        return done

    def _drop_pipe(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
