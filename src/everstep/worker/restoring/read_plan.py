"""Which part of which rank's file a tensor is read from, also where ranks or shards were others. Pure numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.errors import EvidenceError
from everstep.worker.format.layout import Layout, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor that lies in one piece; `low` and `high` are in the whole tensor."""

    rank: int
    piece: Piece
    low: tuple[int, ...]
    high: tuple[int, ...]


class Index:
    """The pieces of a layout by key.

    Args:
        rank: whose; what it wrote itself comes first.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._pieces: dict[str, list[tuple[int, Piece]]] = {}
        own = rank if rank < len(layout.ranks) else 0
        for number in [own, *(n for n in range(len(layout.ranks)) if n != own)]:
            for piece in layout.ranks[number].pieces:
                self._pieces.setdefault(piece.key, []).append((number, piece))

    def first(self, key: str) -> Piece | None:
        """One of the pieces; None where there are none."""
        found = self._pieces.get(key)
        return found[0][1] if found else None

    def private_keys(self, prefix: str) -> list[str]:
        """The keys of what each rank has of its own, in the order of this rank's file."""
        return [key for key, found in self._pieces.items() if key.startswith(prefix) and found[0][1].is_private]

    def parts(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> list[Part]:
        """What fills the box of this shape at this offset, without overlaps.

        Raises:
            EvidenceError: something of it is nowhere.
        """
        low, high = tuple(offset), tuple(o + n for o, n in zip(offset, shape, strict=True))
        if not math.prod(shape):
            return []
        pieces = self._pieces.get(key, ())
        if pieces and pieces[0][1].offset == low and pieces[0][1].shape == tuple(shape):  # as this rank saved it
            return [Part(rank=pieces[0][0], piece=pieces[0][1], low=low, high=high)]
        found, seen = [], set()
        for rank, piece in pieces:
            if len(piece.offset) != len(low) or (piece.offset, piece.shape) in seen:
                continue  # another replica's
            seen.add((piece.offset, piece.shape))
            ends = tuple(o + n for o, n in zip(piece.offset, piece.shape, strict=True))
            begin = tuple(map(max, low, piece.offset))
            end = tuple(map(min, high, ends))
            if all(a < b for a, b in zip(begin, end, strict=True)):
                found.append(Part(rank=rank, piece=piece, low=begin, high=end))
                if piece.is_private or (begin, end) == (low, high):
                    found = found[-1:]
                    break
        if sum(volume(part.low, part.high) for part in found) != math.prod(shape):
            raise EvidenceError(f"{key} is not whole: the checkpoint lacks a part of {list(low)} to {list(high)}")
        return found


def volume(low: Sequence[int], high: Sequence[int]) -> int:
    return math.prod(b - a for a, b in zip(low, high, strict=True))


def run_in(offset: Sequence[int], shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> int | None:
    """Where a box begins in a contiguous array, in elements, if it is one run of it.

    Args:
        offset, shape: of the array, in the coordinates of the box.
    """
    start, stride, is_open = 0, 1, True
    for o, n, a, b in reversed(list(zip(offset, shape, low, high, strict=True))):
        if not is_open and b - a != 1:
            return None
        is_open = is_open and b - a == n
        start += (a - o) * stride
        stride *= n
    return start
