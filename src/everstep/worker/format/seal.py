"""The checksum of a rank's tensors: sums of 64-bit words by block, and one number over all sums.

It costs half a copy, where crc32 costs three. Any change of one word is found for certain, exchanged blocks too; it is
no defence against somebody who means harm. It knows bytes, and nothing of torch.
"""

import zlib
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 18
_WORD_BYTES = 8
_NOTHING = np.empty(0, dtype=np.int64)


def sums_of(content: Any, size_bytes: int | None = None) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The sum of each block, wrapping around; what is missing at the end counts as zeros.

    Args:
        content: bytes in any buffer.
        size_bytes: how many of them.
    """
    size = len(content) if size_bytes is None else size_bytes
    words = np.frombuffer(content, dtype=np.int64, count=size // _WORD_BYTES) if size >= _WORD_BYTES else _NOTHING
    whole = size // BLOCK_BYTES * (BLOCK_BYTES // _WORD_BYTES)
    sums = words[:whole].reshape(-1, BLOCK_BYTES // _WORD_BYTES).sum(axis=1, dtype=np.int64)
    if size % BLOCK_BYTES:
        last = words[whole:].sum(dtype=np.int64)
        if odd := size % _WORD_BYTES:
            end = bytes(memoryview(content)[size - odd : size]) + bytes(_WORD_BYTES - odd)
            last = np.add(last, np.frombuffer(end, dtype=np.int64)[0])
        sums = np.append(sums, last)
    return sums


class Seal:
    """The seal of a file that passes in pieces; every piece but the last has a multiple of `BLOCK_BYTES`."""

    def __init__(self) -> None:
        self._sums: list[bytes] = []

    def update(self, piece: "memoryview | bytes | bytearray") -> None:
        self._sums.append(sums_of(piece).tobytes())

    def table(self) -> bytes:
        """The sums of all blocks so far."""
        return b"".join(self._sums)

    def value(self) -> int:
        return zlib.crc32(self.table())


def seal_of(content: Any) -> int:
    """The seal of a whole file."""
    return zlib.crc32(sums_of(content).tobytes())


def seal_by_table(table: bytes, region: "bytes | bytearray") -> int:
    """The seal of a file that ends with a table of the sums of all blocks before, without a look at these.

    Args:
        table: the sums.
        region: the bytes from the table on to the end of the file.
    """
    return zlib.crc32(sums_of(region).tobytes(), zlib.crc32(table))
