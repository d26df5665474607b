"""Small files and names that survive a power cut, and large ones written past the page cache. It needs no torch."""

import concurrent.futures
import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

PIECE_BYTES = 8 << 20
_PAGE_BYTES = 4096


def write_durably(path: Path, content: bytes) -> None:
    """A new small file that survives a power cut once its folder is synced too."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_past_cache(path: Path, content: "mmap.mmap | bytes", look: Callable[[memoryview], None]) -> None:
    """A new large file from page-aligned memory, synced; around the page cache where the file system allows that.

    Args:
        look: sees each piece of 8 MiB while it is written, in another thread: checksums take as long as a fast disk.

    Raises:
        OSError: the disk is full or broken; the file may be there in part.
    """
    with memoryview(content) as whole:
        pieces = (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))
        write_pieces_past_cache(path, pieces, look)


def write_pieces_past_cache(path: Path, pieces: Iterable[memoryview], look: Callable[[memoryview], None]) -> None:
    """The same for a file that comes in pieces, each in page-aligned memory; they are released.

    Raises:
        OSError: the disk is full or broken; the file may be there in part.
    """
    fd, direct = _open_direct(path)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        at = 0
        for piece in pieces:
            with piece:  # let go also when the disk is full
                looking = pool.submit(look, piece)
                try:
                    direct = _write_piece(fd, piece, at, direct)
                finally:
                    concurrent.futures.wait([looking])
                looking.result()
                at += len(piece)
        os.fsync(fd)
    finally:
        pool.shutdown()
        os.close(fd)


def _write_piece(fd: int, piece: memoryview, at: int, direct: bool) -> bool:
    """Write one piece of a file; whether it still goes past the page cache."""
    if direct and len(piece) % _PAGE_BYTES:
        direct = _go_through_cache(fd)
    try:
        _write_all(fd, piece)
    except OSError as error:
        if not (direct and error.errno == errno.EINVAL):
            raise
        direct = _go_through_cache(fd)  # some file systems take the flag and refuse the write
        os.lseek(fd, at, os.SEEK_SET)
        _write_all(fd, piece)
    return direct


def _open_direct(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    with contextlib.suppress(FileNotFoundError):  # an open that failed may have made it
        path.unlink()
    return os.open(path, flags, 0o644), False


def _go_through_cache(fd: int) -> bool:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


def _write_all(fd: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += os.write(fd, piece[done:])
