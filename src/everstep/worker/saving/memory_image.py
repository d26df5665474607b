"""The files of a memory slot: a rank's tensors, mapped once and overwritten in place, and a small rest.

It knows one slot's two files and their checksums, not when to write or which.
"""

import contextlib
import ctypes
import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.adapters.checkpoints import huge_pages
from everstep.domain.errors import EvidenceError
from everstep.worker.format.frame import dtype_named, frames
from everstep.worker.format.layout import Piece, RankLayout
from everstep.worker.format.seal import seal_by_table, sums_of

_MADV_POPULATE_WRITE = 23


class Image:
    """A slot's tensors in shared memory, open for writing.

    Raises:
        EvidenceError: the file is not what `lay_out` made.
    """

    def __init__(self, path: Path, layout: RankLayout) -> None:
        self._layout = layout
        self._memory = _mapped(path)
        self.size_bytes = len(self._memory)
        if self.size_bytes < layout.size_bytes:
            raise EvidenceError(f"{path.name} has {self.size_bytes} bytes, expected {layout.size_bytes} or more")
        self._views = [_view(self._memory, piece) for piece in layout.pieces]
        self._populate()

    def copy_in(self, tensors: Sequence[Tensor], *, at: int = 0) -> None:
        """Overwrite the tensors from number `at` on with others of the same sizes. Waits for the devices."""
        if tensors:  # a small model leaves some ranks without a share
            torch._foreach_copy_(self._views[at : at + len(tensors)], list(tensors))

    def equals(self, tensors: Sequence[Tensor], *, at: int = 0) -> bool:
        """Whether the tensors from number `at` on have the bits of these."""
        here = self._views[at : at + len(tensors)]
        return all(torch.equal(_bits(a), _bits(b.cpu())) for a, b in zip(here, tensors, strict=True))

    def place_of(self, number: int) -> tuple[int, int]:
        """Where a tensor begins, for `bytes_at`, and its size in bytes."""
        piece = self._layout.pieces[number]
        return piece.at, piece.size_bytes

    def bytes_at(self, at: int, size_bytes: int) -> bytes:
        return self._memory[at : at + size_bytes]

    def span(self) -> tuple[int, int]:
        """Where the tensors lie in this process: the address of the first page, and the bytes from there."""
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr(), self.size_bytes

    def seal(self) -> int:
        """Write the checksums of all blocks into the file; the number over them."""
        table = sums_of(self._memory, self._layout.table_at).tobytes()
        at = self._layout.table_at
        memoryview(self._memory).cast("B")[at : at + len(table)] = (
            table  # one copy; the array itself takes byte by byte
        )
        return seal_by_table(table, self._memory[at:])

    def _populate(self) -> None:
        """Map the pages now: the first save would take several times as long."""
        start, size = self.span()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)  # Linux 5.14; a hint


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _view(memory: Any, piece: Piece) -> Tensor:
    count = 1
    for length in piece.shape:
        count *= length
    dtype = dtype_named(piece.dtype)
    if not count:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=piece.at).view(piece.shape)


def lay_out(path: Path, layout: RankLayout, trailer: bytes = b"") -> None:
    """Make the file of a slot; every page of it exists afterwards.

    Args:
        trailer: what comes after the table (worker/format/trailer.py).

    Raises:
        OSError: shared memory is full.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        huge_pages.fill(fd, layout.size_bytes + len(trailer))
        for at, content in (*frames(layout), (layout.size_bytes, trailer)):
            os.pwrite(fd, content, at)
    finally:
        os.close(fd)


def rest_of(rest: dict[str, Any]) -> memoryview:
    """The small part as bytes."""
    content = io.BytesIO()
    torch.save(rest, content)
    return content.getbuffer()


def write_rest(path: Path, rest: dict[str, Any]) -> tuple[int, int]:
    """Write the small part anew; its size and checksum.

    Raises:
        OSError: shared memory is full.
    """
    view = rest_of(rest)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(view))
        os.pwrite(fd, view, 0)
        os.ftruncate(fd, len(view))
    finally:
        os.close(fd)
    return len(view), zlib.crc32(view)


def _mapped(path: Path) -> Any:
    try:
        with path.open("r+b") as file:
            memory = huge_pages.mapped(file.fileno(), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error}") from error
    if memory is None:
        raise EvidenceError(f"{path.name} cannot be mapped")
    return memory


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
