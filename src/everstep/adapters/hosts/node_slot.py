"""Which of several nodes on one machine this `everstep run` is: a numbered lock file, let go by the kernel at its end.

A node that was killed and is started again finds its number free, and with it what it left in memory.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from everstep.adapters.checkpoints.memory_folder import SHARED_MEMORY, exclusive
from everstep.domain.errors import WorldError

_SLOTS_MAX = 256
_KEPT_S = 86_400.0
"""For how long a killed node finds its number again once others start on its machine."""


def _slots_folder() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextlib.contextmanager
def node_slot(job: str, *, rank: int | None, folder: Path | None = None) -> Iterator[int]:
    """Hold a number from 1 that no other node of this job on this machine holds.

    Args:
        job: what the nodes of one job have in common and two jobs on one machine have not.
        rank: the node's own --node-rank, which finds its number again.
        folder: where the lock files lie; it must forget them when the machine restarts.

    Raises:
        WorldError: no lock can be had.
    """
    folder = folder or _slots_folder()
    digest = hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
    stem = f"everstep-node-{os.getuid()}-{digest}"
    try:
        with exclusive(_lock(folder)):
            _sweep(folder, stem)
            number, path, fd = _take(folder, stem, "-" if rank is None else str(rank))
    except OSError as error:
        raise WorldError(f"cannot find out which node of this machine this is ({error.strerror})") from error
    try:
        yield number
    finally:
        with contextlib.suppress(OSError), exclusive(_lock(folder)):
            path.unlink()
        os.close(fd)


def _lock(folder: Path) -> Path:
    """One node at a time looks, so that none takes a number whose file is just going."""
    return folder / f"everstep-nodes-{os.getuid()}.lock"


def _sweep(folder: Path, stem: str) -> None:
    """Remove what killed nodes of other jobs left long ago."""
    for path in folder.glob(f"everstep-node-{os.getuid()}-*.*"):
        if path.stem == stem or time.time() - path.stat().st_mtime < _KEPT_S:
            continue
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            with contextlib.suppress(BlockingIOError):  # it lives
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        finally:
            os.close(fd)


def _take(folder: Path, stem: str, mark: str) -> tuple[int, Path, int]:
    """The number that was this node's; else a new one; else one that a dead node left."""
    free: list[tuple[int, int, int]] = []
    with contextlib.ExitStack() as opened:
        for number in range(1, _SLOTS_MAX + 1):
            fd = os.open(folder / f"{stem}.{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            was = os.pread(fd, 16, 0).decode(errors="replace")
            free.append(((was != mark) + (was not in (mark, "")), number, fd))
            if was in (mark, ""):
                break
        if not free:
            raise WorldError(f"{_SLOTS_MAX} nodes of one job on one machine are surely a slip")
        _, number, fd = min(free)
        if (last := free[-1])[1] != number and not os.fstat(last[2]).st_size:
            (folder / f"{stem}.{last[1]}").unlink()  # made while looking
        os.ftruncate(fd, 0)
        os.pwrite(fd, mark.encode(), 0)
        return number, folder / f"{stem}.{number}", os.dup(fd)  # shares the lock
