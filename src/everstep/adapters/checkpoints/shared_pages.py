"""Files in shared memory that one process makes and others map; what is in them is their makers' affair."""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from everstep.domain.errors import WorldError

_CRC = struct.Struct("<I")
_COPIES = (0, 512)
"""The content stands there twice: a writer that dies in the middle of one leaves the other."""
_LOOKS_MAX = 1000


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


def map_page(path: Path, size: int) -> mmap.mmap:
    """A page of shared memory, made with zeros where it does not exist.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full /dev/shm must fail here and not by SIGBUS
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise WorldError(f"cannot use {path.name} in shared memory: {error.strerror}") from error


def write_twice(memory: mmap.mmap, content: bytes) -> None:
    """Overwrite a page's content, at most 508 bytes, both copies of it with their checksums."""
    sealed = content + _CRC.pack(zlib.crc32(content))
    for at in _COPIES:
        memory[at : at + len(sealed)] = sealed


def read_twice(memory: mmap.mmap, form: struct.Struct) -> tuple[bytes, Sequence[float]]:
    """The page's first copy where it is whole, else nothing; and the content, zeros where nobody has written yet.

    The writer may move on between two looks, so it looks again.
    """
    nothing = bytes(form.size + _CRC.size)
    for _ in range(_LOOKS_MAX):
        copies = [memory[at : at + form.size + _CRC.size] for at in _COPIES]
        for number, copy in enumerate(copies):
            if _CRC.unpack_from(copy, form.size)[0] == zlib.crc32(copy[: form.size]):
                return (b"" if number else copy), form.unpack_from(copy)
        if copies == [nothing, nothing]:
            break
    return b"", form.unpack_from(nothing)
