"""The saver of one host as a process: started once there is something to save, ended by a closed pipe.

Knows nothing of checkpoints; the process behind it is `everstep.worker.saving.saver`.
"""

import contextlib
import logging
from pathlib import Path

from everstep.adapters.checkpoints.memory_folder import MemoryFolder, remove_folder, taken_bytes
from everstep.adapters.checkpoints.memory_slots import JOB_NAME
from everstep.adapters.workers.piped_process import PipedProcess

_log = logging.getLogger(__name__)
KEPT_NAME = "kept"
"""A saver that leaves this file leaves the folder, too: what is in it is not on disk, and other hosts may come back."""


class SaverProcess:
    """Keeps a saver alive beside the workers.

    Args:
        folder: the run's memory folder. `close` lets it go.
    """

    def __init__(self, folder: MemoryFolder) -> None:
        self._folder = folder
        self._process = PipedProcess("everstep.worker.saving.saver", [str(folder.path)])

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def pid(self) -> int:
        return self._process.pid

    def ensure(self) -> None:
        """Start the saver once there is something to save, and again after it has died."""
        if (self._folder.path / JOB_NAME).exists():
            self._process.ensure()

    def close(self, *, within_s: float) -> bool:
        """Let the saver finish: the newest complete state becomes durable, and the folder goes; else it stays.

        Returns False when that takes longer; the saver then goes on by itself. All of it is told.
        """
        done = True
        if self._process.pid or (self._folder.path / JOB_NAME).exists():
            done = self._process.finish(within_s=within_s, what="the newest step is not on disk")
        has_given_up = not done and not self._process.is_alive()
        if has_given_up or (self._folder.path / KEPT_NAME).exists():
            _log.warning(
                "the newest step could not be made durable and stays in %s, which holds %.1f GB of memory: the same "
                "command again goes on from there, and the next start of another run on this host removes it",
                self._folder.path,
                taken_bytes(self._folder.path) / 1e9,
            )
        elif done:
            remove_folder(self._folder.path)
        with contextlib.suppress(OSError):
            self._folder.release()
        return done
