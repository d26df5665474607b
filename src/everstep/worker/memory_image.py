"""The files of a memory slot: an image that `torch.load` reads, mapped once and overwritten in place, and a small rest.

It knows one slot's two files and their checksums, not when to write or which.
"""

import contextlib
import ctypes
import io
import mmap
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.domain.errors import EvidenceError
from everstep.worker.memory_state import checked, tensors_in
from everstep.worker.seal import seal_of

_MADV_POPULATE_WRITE = 23


class Image:
    """A slot's tensors in shared memory, open for writing.

    Raises:
        EvidenceError: the file is not what `lay_out` made.
    """

    def __init__(self, path: Path) -> None:
        self._parts = _load(path, shared=True)
        self._views = tensors_in(self._parts)
        self._memory = _mapped(path, writable=True)
        self.size_bytes = len(self._memory)
        self._populate()

    def copy_in(self, tensors: Sequence[Tensor], *, at: int = 0) -> None:
        """Overwrite the tensors from number `at` on with others of the same sizes. Waits for the devices."""
        if tensors:  # a small model leaves some ranks without a share
            torch._foreach_copy_(self._views[at : at + len(tensors)], list(tensors))

    def equals(self, tensors: Sequence[Tensor], *, at: int = 0) -> bool:
        """Whether the tensors from number `at` on have the bits of these."""
        here = self._views[at : at + len(tensors)]
        return all(torch.equal(_bits(a), _bits(b.cpu())) for a, b in zip(here, tensors, strict=True))

    def span(self) -> tuple[int, int]:
        """Where the tensors lie in this process: the address of the first page, and the bytes from there."""
        start = min((view.data_ptr() for view in self._views if view.numel()), default=0)
        end = max((view.data_ptr() + view.nbytes for view in self._views if view.numel()), default=0)
        start -= start % mmap.PAGESIZE
        return start, end - start

    def _populate(self) -> None:
        """Map the pages now: the first save would take several times as long."""
        start, size = self.span()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)  # Linux 5.14; a hint

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return [(t.shape, t.dtype) for t in self._views] == [(t.shape, t.dtype) for t in tensors]

    def seal(self) -> int:
        return seal_of(self._memory)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def lay_out(path: Path, parts: dict[str, Any]) -> None:
    """Make the file of a slot; every page of it exists afterwards.

    Raises:
        OSError: shared memory is full.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:  # buffered: that writes on where the kernel takes 2 GB at a time
        try:
            torch.save(parts, file)
        except RuntimeError as error:  # torch hides the file's own error
            path.unlink(missing_ok=True)
            raise OSError(28, "No space left in shared memory") from error


def lay_out_like(path: Path, model: Path) -> None:
    """Make the file of another slot of the same layout.

    Raises:
        OSError: shared memory is full.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as file, model.open("rb") as source:
        os.posix_fallocate(file.fileno(), 0, model.stat().st_size)
        shutil.copyfileobj(source, file, 8 << 20)


def write_rest(path: Path, rest: dict[str, Any]) -> tuple[int, int]:
    """Write the small part anew; its size and checksum.

    Raises:
        OSError: shared memory is full.
    """
    content = io.BytesIO()
    torch.save(rest, content)
    view = content.getbuffer()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(view))
        os.pwrite(fd, view, 0)
        os.ftruncate(fd, len(view))
    finally:
        os.close(fd)
    return len(view), zlib.crc32(view)


def load_image(path: Path, *, size_bytes: int, seal: int | None) -> dict[str, Any]:
    """What the file of a slot holds, mapped: a copy is made where somebody writes.

    Args:
        seal: the expected checksum; None where another rank has tested it.

    Raises:
        EvidenceError: gone, of another size, or changed.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error.strerror}") from error
    if size != size_bytes:
        raise EvidenceError(f"{path.name} has {size} bytes, expected {size_bytes}")
    if seal is not None and (found := seal_of(_mapped(path, writable=False))) != seal:
        raise EvidenceError(f"{path.name} was changed: its checksum is {found:08x}, expected {seal:08x}")
    return _load(path, shared=False)


def load_rest(path: Path, *, size_bytes: int, seal: int) -> dict[str, Any]:
    """What `write_rest` wrote.

    Raises:
        EvidenceError: gone, of another size, or changed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(content) != size_bytes:
        raise EvidenceError(f"{path.name} has {len(content)} bytes, expected {size_bytes}")
    if zlib.crc32(content) != seal:
        raise EvidenceError(f"{path.name} was changed: its checksum is another")
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found


def _mapped(path: Path, *, writable: bool) -> mmap.mmap:
    try:
        with path.open("r+b" if writable else "rb") as file:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise EvidenceError(f"{path.name} cannot be read: {error}") from error


def _load(path: Path, *, shared: bool) -> dict[str, Any]:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE):
        try:
            return checked(torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))
        except (RuntimeError, OSError, ValueError, EOFError) as error:
            raise EvidenceError(f"{path.name} cannot be read: {error}") from error


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
