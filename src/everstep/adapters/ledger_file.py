"""The ledger as `ledger.jsonl` in a run directory: one writer under a lock, any number of readers without one.

It knows bytes, locks and disks, and nothing of what the entries mean.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from everstep.domain.codec import Entry, decode_entry, encode_entry
from everstep.domain.commands import Command
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.domain.events import Event

LEDGER_NAME = "ledger.jsonl"
_BUFFER_BYTES = 1 << 20
_LAST_BYTES = 1 << 18

_WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full: free some space there and start `everstep run` with the same directory again",
    errno.EDQUOT: "the disk quota is used up: free some space and start `everstep run` with the same directory again",
    errno.EFBIG: "the file may not grow further: raise `ulimit -f` and start `everstep run` again",
    errno.EIO: "the disk reports an input/output error: look at `dmesg`, then go on from another disk or host",
    errno.EROFS: "the file system is read-only: remount it, or choose a run directory elsewhere",
    errno.EACCES: "permission denied: choose a run directory that you may write to",
    errno.ENOLCK: "the file system gives no locks: choose a run directory on a disk that does",
}
_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EAGAIN}


class LedgerFile:
    """The `Ledger` port over a file. Holds an exclusive lock from construction to `close`.

    Opening cuts off one torn last line. Numbers go on from the last whole entry.

    Args:
        run_dir: made if it is not there.

    Raises:
        ConfigError: another coordinator has it open.
        EvidenceError: a line other than a torn last one is no entry, or comes from a newer everstep.
        WorldError: the file can't be opened or written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LEDGER_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _world_error(self.path, error, doing="open") from error
        try:
            self._lock()
            self._count, self._size_bytes = _scan(self.path)
            self._cut()
            if is_new:
                _sync_folder(run_dir)
        except BaseException:  # outermost frame of the descriptor: whatever happened, it must not stay open
            os.close(self._fd)
            raise
        self._opened_size_bytes = self._size_bytes

    def __enter__(self) -> "LedgerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and its lock. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> Sequence[Entry]:
        """All whole entries that were there when it was opened. Read anew at every call, so that nobody keeps them."""
        return tuple(_entries(self.path, size_bytes=self._opened_size_bytes))

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        """Add entries in order with one write. With `durable` they are on disk before this returns.

        Raises:
            WorldError: they can't be written. None of them is in the ledger then; what was before them is whole.
        """
        lines = b"".join(
            encode_entry(Entry(number=number, wall=wall, body=body))
            for number, body in enumerate(bodies, start=self._count + 1)
        )
        try:
            self._cut()
            _write_all(self._fd, lines)
            if durable:
                os.fdatasync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError, WorldError):  # else the next append or opening cuts it
                self._cut()
            raise _world_error(self.path, error, doing="write") from error
        self._size_bytes += len(lines)
        self._count += len(bodies)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another `everstep run` ({_lock_owner(self._fd)}) is using {self.path.parent}: "
                "wait for it to end, stop it, or give this run another directory"
            ) from error
        except OSError as error:
            raise _world_error(self.path, error, doing="lock") from error

    def _cut(self) -> None:
        """Cut off what is not a whole entry: a torn last line, or the front of a write that failed."""
        try:
            if os.fstat(self._fd).st_size > self._size_bytes:
                os.ftruncate(self._fd, self._size_bytes)
        except OSError as error:
            raise _world_error(self.path, error, doing="truncate") from error


def ledger_path(given: Path) -> Path:
    """The ledger that a person means by a run directory or by the file itself.

    Raises:
        ConfigError: there is none.
    """
    path = given / LEDGER_NAME if given.is_dir() else given
    if path.is_file():
        return path
    if given.is_dir():
        raise ConfigError(f"{given} holds no {LEDGER_NAME}: give the run directory that `everstep run` names at start")
    raise ConfigError(f"{given} does not exist: give a run directory of `everstep run`, or its {LEDGER_NAME}")


def read_entries(path: Path) -> Iterator[Entry]:
    """Stream a ledger without a lock. The run may still be going, so one torn last line is left out.

    Raises:
        EvidenceError: a line before the last is no entry, or any comes from a newer everstep.
        WorldError: the file can't be read.
    """
    return _entries(path, size_bytes=None)


def last_entry(path: Path) -> Entry | None:
    """The last whole entry; None where there is no ledger, or its end makes no sense. Takes no lock."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            lines = file.read().split(b"\n")
        return decode_entry(lines[-2]) if len(lines) > 1 else None
    except (OSError, EvidenceError):
        return None


def _entries(path: Path, *, size_bytes: int | None) -> Iterator[Entry]:
    position = 0
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                if size_bytes is not None and position > size_bytes:
                    return
                entry = _entry(path, number, line)
                if entry is None:
                    if next(file, None) is None:
                        return
                    raise EvidenceError(f"{path}, line {number}: not a ledger entry, and not the last line: {_DAMAGED}")
                yield entry
    except OSError as error:
        raise _world_error(path, error, doing="read") from error


_DAMAGED = "the file was damaged or edited; restore it, or start a new run directory"


def _entry(path: Path, number: int, line: bytes) -> Entry | None:
    """The entry of a line; None when the line could be the torn last one."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = decode_entry(line)
    except EvidenceError as error:
        if error.__cause__ is not None:  # not even JSON of our shape
            return None
        raise EvidenceError(f"{path}, line {number}: {error}") from error
    if entry.number != number:
        raise EvidenceError(f"{path}, line {number}: holds entry {entry.number}, so lines are missing: {_DAMAGED}")
    return entry


def _scan(path: Path) -> tuple[int, int]:
    """How many whole entries there are, and the bytes they take."""
    count = sum(1 for _ in read_entries(path))
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            return count, sum(len(line) for line, _ in zip(file, range(count), strict=False))
    except OSError as error:
        raise _world_error(path, error, doing="read") from error


def _write_all(descriptor: int, data: bytes) -> None:
    """Write until all is written; a full disk shows as a short write first and as an error at the next."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _world_error(folder, error, doing="sync") from error


def _lock_owner(descriptor: int) -> str:
    """Who holds the lock, from the kernel's list: flock itself does not say."""
    inode = str(os.fstat(descriptor).st_ino)
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return "pid unknown"
    for lock in locks:
        # 1: FLOCK  ADVISORY  WRITE 1234 08:01:123456 0 EOF
        match lock.split():
            case [_, "FLOCK", _, _, pid, place, *_] if place.rsplit(":", 1)[-1] == inode and int(pid) > 0:
                return f"pid {pid}"
    return "pid unknown"


def _world_error(path: Path, error: OSError, *, doing: str) -> WorldError:
    number = error.errno or 0
    what = _WHAT_TO_DO.get(number, f"{error.strerror or error}: check the path and its disk")
    return WorldError(f"cannot {doing} {path}: {what}", retryable=number in _MAY_PASS)
