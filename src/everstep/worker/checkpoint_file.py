"""A sink for `torch.save` that hashes what passes and keeps the first error of the disk; it knows no protocol."""

import io
from collections.abc import Callable
from typing import IO, Any, cast

import torch

from everstep.worker.checkpoint_manifest import digest

_BEAT_BYTES = 16 << 20


class Sink:
    """A file for `torch.save` that counts, hashes and survives a full disk.

    `torch.save` turns an error of the file into one of its own that hides it; so the first is kept until `finish`.
    """

    def __init__(self, file: io.RawIOBase | None, beat: Callable[[], None]) -> None:
        self._file = file
        self._beat = beat
        self._beat_at = _BEAT_BYTES
        self._error: OSError | None = None
        self.size_bytes = 0
        self.seal = digest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                done = 0
                while self._file is not None and done < len(view):
                    done += self._file.write(view[done : done + _BEAT_BYTES]) or 0
            except OSError as error:
                self._error = error
            self.seal.update(view)
            self.size_bytes += len(view)
            if self.size_bytes >= self._beat_at:
                self._beat_at = self.size_bytes + _BEAT_BYTES
                self._beat()
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self) -> None:
        """Raises the first error of the file."""
        if self._error is not None:
            raise self._error


def digest_of(part: dict[str, Any]) -> str:
    """The digest of what would be written; two ranks with the same have the same state."""
    sink = Sink(None, lambda: None)
    torch.save(part, cast("IO[bytes]", sink))
    return sink.seal.hexdigest()
