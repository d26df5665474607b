"""Files in shared memory that one process makes and others map; what is in them is their makers' affair."""

import mmap
import os
from pathlib import Path

from everstep.domain.errors import WorldError


def make_page(path: Path, size_bytes: int, content: bytes, *, what: str) -> None:
    """Make a file that does not exist, mode 0600: `content` and zeros.

    Args:
        what: its name for people.

    Raises:
        WorldError: shared memory is full or not writable.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # a full /dev/shm must fail here, not by SIGBUS in the worker
            os.pwrite(fd, content, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise WorldError(f"cannot make the {what} {path}: {error.strerror}") from error


def open_page(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file that somebody made.

    Raises:
        OSError: there is none, or it is not ours.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
