"""Files in shared memory made of huge pages, and mappings of them in which one entry of the page table serves 2 MB.

Where the kernel gives none (before Linux 6.1, or memory is in pieces), files and mappings are as usual.
"""

import ctypes
import errno
import mmap
import os
import time
import weakref
from typing import Any

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_PIECE_BYTES = 32 * HUGE_BYTES
_LIMIT_S_PER_BYTE = 2e-9
"""Above that the kernel moves other memory out of the way for each page, and ordinary pages are cheaper."""
_FAILED = ctypes.c_void_p(-1).value


def fill(fd: int, size_bytes: int) -> None:
    """Give an empty file all its pages, zeros.

    Raises:
        OSError: shared memory is full.
    """
    room = os.fstatvfs(fd)
    if size_bytes > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size_bytes)
    if (whole := size_bytes // HUGE_BYTES * HUGE_BYTES) and (memory := mapped(fd, whole)) is not None:
        start = ctypes.addressof(memory)
        for at in range(0, whole, _PIECE_BYTES):
            began_s, size = time.thread_time(), min(_PIECE_BYTES, whole - at)
            for page in range(at, at + size, HUGE_BYTES):
                os.pwrite(fd, b"\0", page)  # the kernel collapses what has a page
            if _libc().madvise(start + at, size, _MADV_COLLAPSE) != 0:
                break
            if time.thread_time() - began_s > size * _LIMIT_S_PER_BYTE:
                break
    os.posix_fallocate(fd, 0, size_bytes)  # a full /dev/shm must fail here and not by SIGBUS


def mapped(fd: int, size_bytes: int, *, writable: bool = True) -> Any:
    """A file's content as a buffer that is unmapped with its last user; None where it cannot be mapped."""
    libc = _libc()
    room = libc.mmap(None, size_bytes + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return None
    start = -(-room // HUGE_BYTES) * HUGE_BYTES
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    found = libc.mmap(start, size_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if found == _FAILED:
        libc.munmap(room, size_bytes + HUGE_BYTES)
        return None
    memory = (ctypes.c_char * size_bytes).from_address(start)
    weakref.finalize(memory, libc.munmap, room, size_bytes + HUGE_BYTES).atexit = False
    return memory


_MAP_FIXED = 0x10
_loaded: list[Any] = []


def _libc() -> Any:
    if not _loaded:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        _loaded.append(libc)
    return _loaded[0]
