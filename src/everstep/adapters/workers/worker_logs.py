"""The workers' output: always kept in files, and shown on the console as torchrun's --redirects, --tee and filter say.

Knows nothing of what the lines mean.
"""

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everstep.domain.errors import ConfigError, WorldError

_log = logging.getLogger(__name__)
_LAST_BYTES = 8192
_PIECE_BYTES = 1 << 16
_OUT, _ERR = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoice:
    """torchrun's `Std`: which streams, for all local ranks or each by number. 0 none, 1 stdout, 2 stderr, 3 both."""

    everywhere: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str, *, flag: str) -> "StreamChoice":
        """From torchrun's text: `3`, or `0:1,1:2`.

        Raises:
            ConfigError: neither of the two forms.
        """
        try:
            if ":" not in text:
                return cls(everywhere=_stream_bits(text))
            pairs = (pair.split(":") for pair in text.split(","))
            return cls(by_rank=tuple((int(rank), _stream_bits(bits)) for rank, bits in pairs))
        except ValueError:
            raise ConfigError(
                f"{flag} {text!r} is not understood; write 0, 1 (stdout), 2 (stderr), 3 (both), or 0:3,1:2 by rank"
            ) from None

    def of(self, local_rank: int) -> int:
        return dict(self.by_rank).get(local_rank, self.everywhere)


def _stream_bits(text: str) -> int:
    bits = int(text)
    if bits not in (0, 1, 2, 3):
        raise ValueError(text)
    return bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """What of the workers' output is shown on the console.

    Attributes:
        redirects: streams that go to files only.
        tee: streams that are shown with `[default0]:` before each line.
        ranks: local ranks that are shown at all; None is all.
    """

    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    ranks: frozenset[int] | None = None

    def shows(self, local_rank: int, stream: int) -> bool:
        if self.ranks is not None and local_rank not in self.ranks:
            return False
        return bool(self.tee.of(local_rank) & stream) or not self.redirects.of(local_rank) & stream

    def prefix(self, local_rank: int, stream: int) -> bytes:
        return f"[default{local_rank}]:".encode() if self.tee.of(local_rank) & stream else b""


class _Tail:
    """Copies what is new in one log file to the console, whole lines when there is a prefix."""

    def __init__(self, path: Path, target: BinaryIO, prefix: bytes) -> None:
        self._file = path.open("rb", buffering=0)
        self._target = target
        self._prefix = prefix
        self._rest = b""

    def copy(self, *, all_of_it: bool) -> bool:
        copied = False
        while piece := self._file.read(_PIECE_BYTES):
            copied = True
            if not self._prefix:
                self._target.write(piece)
                continue
            lines = (self._rest + piece).split(b"\n")
            self._rest = lines.pop()
            self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        if all_of_it and self._rest:
            self._target.write(self._prefix + self._rest + b"\n")
            self._rest = b""
        return copied

    def close(self) -> None:
        self._file.close()


class WorkerLogs:
    """Log files of one host's workers, attempt after attempt.

    Args:
        folder: where `attempt-0001/rank-0.stdout.log` and its like go.
        choice: what the console shows.
        console: the two streams of the console; None shows nothing.
    """

    def __init__(self, folder: Path, *, choice: LogChoice, console: tuple[BinaryIO, BinaryIO] | None) -> None:
        self._folder = folder
        self._choice = choice
        self._console = console
        self._tails: list[_Tail] = []
        self._paths: dict[int, tuple[Path, Path]] = {}

    def open(self, *, attempt: int, ranks: Collection[int]) -> dict[int, tuple[int, int]]:
        """Make the attempt's files: rank → descriptors of its stdout and stderr, which the caller closes.

        Raises:
            WorldError: the folder can't be written any more.
        """
        self.finish()
        folder = self._folder / f"attempt-{attempt:04d}"
        descriptors = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for local_rank, rank in enumerate(ranks):
                paths = (folder / f"rank-{rank}.stdout.log", folder / f"rank-{rank}.stderr.log")
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                descriptors[rank] = (os.open(paths[0], flags, 0o644), os.open(paths[1], flags, 0o644))
                self._paths[rank] = paths
                self._follow(local_rank, paths)
        except OSError as error:
            for pair in descriptors.values():
                for descriptor in pair:
                    os.close(descriptor)
            raise WorldError(
                f"cannot write logs in {folder} ({error.strerror}); free some space or give another --log-dir"
            ) from error
        return descriptors

    def _follow(self, local_rank: int, paths: tuple[Path, Path]) -> None:
        if self._console is None:
            return
        for stream, path, target in ((_OUT, paths[0], self._console[0]), (_ERR, paths[1], self._console[1])):
            if self._choice.shows(local_rank, stream):
                self._tails.append(_Tail(path, target, self._choice.prefix(local_rank, stream)))

    def copy_to_console(self, *, all_of_it: bool = False) -> None:
        """Show what the workers have written since the last call."""
        if self._console is None:
            return
        try:
            copied = [tail.copy(all_of_it=all_of_it) for tail in self._tails]
            if any(copied):
                for target in self._console:
                    target.flush()
        except OSError as error:  # the reader of a pipe has left, or the terminal is gone: no reason to stop training
            _log.warning("the console cannot be written (%s); the workers' output is in %s", error, self._folder)
            self._console = None

    def last_lines(self, rank: int) -> str:
        """The end of the rank's stderr, or of its stdout when it wrote no errors; at most 8 KiB."""
        for path in reversed(self._paths.get(rank, ())):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LAST_BYTES))
                text = file.read().decode(errors="replace").strip()
            if text:
                return text
        return ""

    def finish(self) -> None:
        """Show the rest and let go of the attempt's files."""
        self.copy_to_console(all_of_it=True)
        for tail in self._tails:
            tail.close()
        self._tails.clear()
