"""Slots that this process has mapped before it became a worker, so that a restore copies from memory that is there.

Reading /dev/shm costs the kernel as much per page as copying the page does; a mapping costs it once, and not during a
restart. It knows files in a folder, neither layouts nor ranks' states, and no torch.
"""

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from everstep.adapters.checkpoints import huge_pages
from everstep.adapters.checkpoints.memory_slots import SLOT_COUNT, RankSlots, image_path, ranks_present
from everstep.domain.errors import WorldError
from everstep.policy.checkpoints import SlotState

_MADV_DONTNEED, _MADV_DONTFORK, _MADV_POPULATE_READ = 4, 10, 22
_PIECE_BYTES = 16 << 20
"""A few milliseconds of work, between which others have the processor."""
_RELEASE_AFTER_S = 1.0
_RELEASE_SHARE = 0.2
"""Of the time, so that steps which train meanwhile notice nothing."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Identity = tuple[int, int, int]  # device, inode, size


class _Facts(msgspec.Struct):
    """What of a slot's manifest tells whose slots a rank reads."""

    replicated: bool = False


class _Map:
    """One file, mapped to be read; `ready` bytes from its start on have their place in the page tables."""

    def __init__(self, fd: int, identity: _Identity) -> None:
        self.identity = identity
        memory = huge_pages.mapped(fd, identity[2], writable=False)
        if memory is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.content: Bytes | None = np.frombuffer(memory, dtype=np.uint8)
        self.ready = 0
        self._advise(0, identity[2], _MADV_DONTFORK)  # a loader's process would keep a removed slot's memory

    def populate_piece(self) -> bool:
        """Let the kernel enter the next piece; False when there is none, or it cannot (before Linux 5.14)."""
        size = min(_PIECE_BYTES, self.identity[2] - self.ready)
        if size <= 0 or not self._advise(self.ready, size, _MADV_POPULATE_READ):
            return False
        self.ready += size
        return True

    def drop_piece(self) -> bool:
        """Take the last piece out again; False when there is none. The file keeps it."""
        begin = max(0, self.ready - 1) // _PIECE_BYTES * _PIECE_BYTES
        if self.ready:
            self._advise(begin, self.ready - begin, _MADV_DONTNEED)
        self.ready = begin
        return begin > 0

    def close(self) -> None:
        self.content = None  # the mapping goes with the last who reads

    def _advise(self, at: int, size: int, advice: int) -> bool:
        """The call lets other threads run, which `mmap.madvise` does not."""
        assert self.content is not None
        start = self.content.ctypes.data + at
        return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0)


_maps: dict[Path, _Map] = {}
"""Of this process. Filled by a process that waits to become a worker (worker/waiting.py), emptied after its restore."""


def map_slots(folder: Path, rank: int) -> None:
    """Map the slots that a restore of this rank would read now, anew where they were replaced; let go of others."""
    wanted = {image_path(folder, number, slot) for number in _read_by(folder, rank) for slot in range(SLOT_COUNT)}
    for path in {*wanted, *_maps}:
        held = _maps.get(path)
        with _opened(path if path in wanted else None) as fd:
            identity = _identity(fd) if fd is not None else None
            if held is not None and held.identity == identity:
                continue
            if held is not None:
                del _maps[path]
                held.close()
            if fd is not None and identity is not None and identity[2]:
                with contextlib.suppress(OSError):  # no more descriptors, or address space: it is read instead
                    _maps[path] = _Map(fd, identity)


def populate_some() -> bool:
    """Do a small part of the work that makes the mappings fast, for all of them alike; whether there was any."""
    return any(found.populate_piece() for found in sorted(_maps.values(), key=lambda found: found.ready))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mapped:
    """A file's content in memory; the first `ready_bytes` of it are fast to read."""

    content: Bytes
    ready_bytes: int


def mapped(fd: int) -> Mapped | None:
    """The content of an open file; None where this process has not mapped it.

    Its size is the mapping's, so reading it is safe as long as nobody shortens the file. Nothing here does: a slot is
    made with all its pages, then overwritten in place, or unlinked and made anew as another file.
    """
    if not _maps:
        return None
    identity = _identity(fd)
    for found in list(_maps.values()):
        if found.identity == identity and found.content is not None:
            return Mapped(content=found.content, ready_bytes=found.ready)
    return None


def release_later(after_s: float = _RELEASE_AFTER_S) -> None:
    """Let go of all mappings in a while, bit by bit: they have served, and a rehearsal may want them again."""
    if _maps:
        threading.Thread(target=_release, args=(after_s,), name="everstep-unmap", daemon=True).start()


def _release(after_s: float) -> None:
    time.sleep(after_s)
    for path in list(_maps):
        found = _maps.pop(path)
        while True:
            began_s = time.monotonic()
            more = found.drop_piece()
            if not more:
                break
            time.sleep((time.monotonic() - began_s) * (1 / _RELEASE_SHARE - 1))
        found.close()


def _read_by(folder: Path, rank: int) -> list[int]:
    """The ranks whose slots this one reads: where they share the state all of them, else its own."""
    present = ranks_present(folder)
    if rank not in present:
        return []
    try:
        slots = RankSlots(folder, rank)
    except WorldError:
        return []
    headers = [slots.read(slot) for slot in range(SLOT_COUNT)]
    slots.close()
    for header in headers:
        if header.state is SlotState.COMPLETE:
            with contextlib.suppress(msgspec.MsgspecError):  # another version's
                if msgspec.json.decode(header.facts, type=_Facts).replicated:
                    return present
    return [rank]


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path is not None else None
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _identity(fd: int) -> _Identity:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size
