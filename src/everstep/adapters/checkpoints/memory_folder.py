"""The folder of a run's memory tier in /dev/shm: made or taken over at the start, removed at the end.

A start also removes what dead runs left. A run lives while someone holds the lock in its folder; it knows nothing
of what lies there.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.domain.errors import WorldError

_log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
_LOCK_NAME = "lock"
WANTED_NAME = "wanted"
"""A start of the run leaves it while it waits for the folder: whoever still works there need not wait for others."""
_PAUSE_S = 0.05
_TELL_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFolder:
    """A folder that is ours while `lock` is open."""

    path: Path
    lock: int

    def release(self) -> None:
        """Let others have it: whoever saves its content, or the next start."""
        os.close(self.lock)


def folder_of(run: str, parent: Path = SHARED_MEMORY) -> Path:
    return parent / f"{_prefix()}{run}"


def _starts_lock(parent: Path) -> Path:
    """One start at a time looks at the folders, so that none is removed between its making and its lock."""
    return parent / f"{_prefix()}starts.lock"


def _prefix() -> str:
    return f"everstep-memory-{os.getuid()}-"


def open_folder(run: str, *, parent: Path = SHARED_MEMORY, patience_s: float = 60.0) -> MemoryFolder:
    """The run's folder: the old one where the run died with it, else a new one. Removes those of other dead runs.

    Args:
        patience_s: how long to wait for a saver that still makes the old content durable.

    Raises:
        WorldError: no shared memory, or the folder stays in use.
    """
    try:
        with exclusive(_starts_lock(parent)):
            _remove_dead(parent, besides=folder_of(run, parent))
        deadline_s = time.monotonic() + patience_s
        tell_s = time.monotonic() + _TELL_AFTER_S
        while True:
            with exclusive(_starts_lock(parent)):
                path = folder_of(run, parent)
                path.mkdir(mode=0o700, exist_ok=True)
                if path.stat().st_uid != os.getuid():
                    raise WorldError(f"{path} belongs to somebody else")
                if (lock := _try_lock(path)) is not None:
                    (path / WANTED_NAME).unlink(missing_ok=True)
                    return MemoryFolder(path=path, lock=lock)
                (path / WANTED_NAME).touch()
            if time.monotonic() >= deadline_s:
                raise WorldError(f"{path} is still in use after {patience_s:.0f} s")
            if time.monotonic() >= tell_s:
                tell_s = deadline_s
                _log.warning("an earlier start still makes its memory durable; waiting up to %.0f s for it", patience_s)
            time.sleep(_PAUSE_S)
    except OSError as error:
        raise WorldError(f"{parent} cannot be used ({error.strerror})") from error


def is_free(path: Path) -> bool:
    """Whether a folder is there that nobody holds."""
    with contextlib.suppress(OSError):
        if (lock := _try_lock(path)) is not None:
            os.close(lock)
            return True
    return False


def taken_bytes(folder: Path) -> int:
    """What the files in it take; one that goes away meanwhile takes nothing."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def share_lock(path: Path) -> int | None:
    """Hold the run alive too, beside its owner; None when the folder is gone."""
    try:
        fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def remove_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _try_lock(path: Path) -> int | None:
    """Lock the folder: alone for a moment, so that nobody else is there, then shared, so that the saver may join."""
    fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _remove_dead(parent: Path, *, besides: Path) -> None:
    for path in parent.glob(f"{_prefix()}*"):
        if _job_of(path) == _job_of(besides) or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile
            if (lock := _try_lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _job_of(path: Path) -> str:
    """The name without the number of the node: several of one job may be on one machine, and all come back."""
    return path.name.rpartition("@")[0] or path.name


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """One process of this user at a time; the lock's file stays."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
