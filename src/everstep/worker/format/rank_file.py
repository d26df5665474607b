"""Writes a rank's tensors to disk from live memory, in the form that memory slots have; it knows no protocol."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from everstep.worker.format.durable import PIECE_BYTES, write_pieces_past_cache
from everstep.worker.format.frame import stream
from everstep.worker.format.layout import RankLayout
from everstep.worker.format.manifest import Crc32
from everstep.worker.format.seal import Seal


def write_rank_file(
    path: Path, layout: RankLayout, tensors: Sequence[Tensor], moved: Callable[[], None]
) -> tuple[int, str]:
    """Write and sync it; its seal and its digest.

    Args:
        moved: called whenever the disk has taken something.

    Raises:
        OSError: the disk is full or broken.
    """
    seal, crc = Seal(), Crc32()

    def look(piece: memoryview) -> None:
        crc.update(piece)
        moved()

    write_pieces_past_cache(path, _pieces(layout, tensors, seal), look)
    return seal.value(), crc.hexdigest()


def seal_of_tensors(layout: RankLayout, tensors: Sequence[Tensor]) -> int:
    """The seal that the file would have: two ranks with the same hold the same."""
    seal = Seal()
    for piece in _pieces(layout, tensors, seal):
        piece.release()
    return seal.value()


def _pieces(layout: RankLayout, tensors: Sequence[Tensor], seal: Seal) -> Iterator[memoryview]:
    """The file in page-aligned pieces of 8 MiB, in a buffer that is used again."""
    buffer, filled, at = mmap.mmap(-1, PIECE_BYTES), 0, 0
    for content in stream(layout, tensors):
        done = 0
        while done < len(content):
            count = min(len(content) - done, PIECE_BYTES - filled)
            buffer[filled : filled + count] = content[done : done + count]
            filled, done, at = filled + count, done + count, at + count
            if filled == PIECE_BYTES:
                with memoryview(buffer) as whole:
                    seal.update(whole)
                yield memoryview(buffer)
                filled = 0
    assert at == layout.table_at
    with memoryview(buffer) as whole:
        seal.update(whole[:filled])
    table = seal.table()
    end = table + bytes(layout.size_bytes - at - len(table))
    seal.update(end)
    while end:
        count = min(len(end), PIECE_BYTES - filled)
        buffer[filled : filled + count] = end[:count]
        filled, end = filled + count, end[count:]
        if filled == PIECE_BYTES or not end:
            yield memoryview(buffer)[:filled]
            filled = 0
