"""What `torch.save` writes around the data of a tensor, and a rank's file made of that; it writes no file itself."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch import Tensor

from everstep.worker.format.layout import ALIGNMENT, Piece, RankLayout, round_up
from everstep.worker.format.pieces import Live
from everstep.worker.format.seal import BLOCK_BYTES

_KEPT_BYTES = 16 << 10
_DATA = b"archive/data/0"
_LOCAL_HEADER = 30
"""Bytes of a zip file's local header before the name (PKWARE APPNOTE 4.3.7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The bytes before and after the data."""

    prefix: bytes
    suffix: bytes


class _Sink:
    """Takes what `torch.save` writes and keeps both ends."""

    def __init__(self) -> None:
        self.head, self.tail, self.size = b"", b"", 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(self.head) < _KEPT_BYTES:
            self.head += bytes(view[: _KEPT_BYTES - len(self.head)])
        self.tail = (self.tail + bytes(view[-_KEPT_BYTES:]))[-_KEPT_BYTES:]
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The frame of every contiguous tensor of this type and shape."""
    tensor = torch.empty(shape, dtype=dtype)
    sink, crc32 = _Sink(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # data is overwritten in place, and torch.load never looks at it
    try:
        torch.save(tensor, cast("IO[bytes]", sink))
    finally:
        torch.serialization.set_crc32_options(crc32)
    name_at = sink.head.index(_DATA)
    header = sink.head[name_at - _LOCAL_HEADER : name_at]
    assert header[:4] == b"PK\x03\x04", "torch.save writes no zip file any more"
    begin = name_at + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    after = sink.size - begin - tensor.numel() * tensor.element_size()
    assert begin % ALIGNMENT == 0
    assert 0 < after <= len(sink.tail)
    return Frame(prefix=sink.head[:begin], suffix=sink.tail[-after:])


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def arrange(tensors: Sequence[Live]) -> RankLayout:
    """The file of these tensors, one after the other."""
    pieces, at = [], 0
    for found in tensors:
        tensor = found.tensor
        frame = frame_of(tensor.dtype, tuple(tensor.shape))
        blob_at = round_up(at, ALIGNMENT)
        at = blob_at + len(frame.prefix) + found.size_bytes + len(frame.suffix)
        pieces.append(
            Piece(
                key=found.key,
                known_as=found.known_as,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                whole=found.whole,
                offset=found.offset,
                device=tensor.device.type,
                is_sharded=found.is_sharded,
                is_private=found.is_private,
                at=blob_at + len(frame.prefix),
                size_bytes=found.size_bytes,
                blob_at=blob_at,
                blob_bytes=at - blob_at,
            )
        )
    return RankLayout(pieces=tuple(pieces), table_at=round_up(at, BLOCK_BYTES))


def frames(layout: RankLayout) -> Iterator[tuple[int, bytes]]:
    """All that is no data, with its places in the file."""
    for piece in layout.pieces:
        frame = frame_of(dtype_named(piece.dtype), piece.shape)
        yield piece.blob_at, frame.prefix
        yield piece.at + piece.size_bytes, frame.suffix


def data_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes: its own memory where that is possible."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def stream(layout: RankLayout, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The file up to its table, piece by piece."""
    at = 0
    for piece, tensor in zip(layout.pieces, tensors, strict=True):
        frame = frame_of(dtype_named(piece.dtype), piece.shape)
        yield memoryview(bytes(piece.blob_at - at) + frame.prefix)
        yield data_of(tensor)
        yield memoryview(frame.suffix)
        at = piece.blob_at + piece.blob_bytes
    yield memoryview(bytes(layout.table_at - at))
