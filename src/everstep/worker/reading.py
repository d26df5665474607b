"""Reads tensors from a rank's file into memory in one pass: each block goes where it belongs and is tested on its way.

A block is summed right after it was read, while it is in the processor's cache. It knows files and bytes, and no ranks.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everstep.domain.errors import EvidenceError
from everstep.worker.layout import RankLayout
from everstep.worker.seal import BLOCK_BYTES, seal_by_table, sums_of

_BLOCKS_AT_ONCE = 2
_BEAT_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rank's file.

    Attributes:
        name: for people.
        seal: the checksum over the table of checksums.
    """

    path: Path
    name: str
    layout: RankLayout
    size_bytes: int
    seal: int

    def check_size(self) -> None:
        """Raises EvidenceError where the file cannot be the one that was written."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise EvidenceError(f"{self.name} cannot be read: {error.strerror}") from error
        if size != self.size_bytes or size < self.layout.size_bytes:
            raise EvidenceError(f"{self.name} has {size} bytes, expected {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Bytes of a file, from `at` on, and the memory for them."""

    at: int
    memory: Any

    @property
    def end(self) -> int:
        return self.at + len(self.memory)


def read_into(source: Source, segments: Sequence[Segment], beat: Callable[[], None], *, test_all: bool) -> None:
    """Read segments that do not overlap. Every block that has something of them is tested whole.

    Args:
        test_all: test the other blocks as well.

    Raises:
        EvidenceError: the file is gone, shorter, or changed; the memory may hold some of it.
    """
    try:
        fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EvidenceError(f"{source.name} cannot be read: {error.strerror}") from error
    try:
        _File(fd, source).read(sorted(segments, key=lambda segment: segment.at), beat, test_all)
    except OSError as error:
        raise EvidenceError(f"{source.name} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


class _File:
    def __init__(self, fd: int, source: Source) -> None:
        self._fd = fd
        self._source = source
        self._scratch = np.empty(BLOCK_BYTES, dtype=np.uint8)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        region = bytearray(source.size_bytes - source.layout.table_at)
        self._fill(memoryview(region), source.layout.table_at)
        table = bytes(region[: source.layout.table_bytes])
        if seal_by_table(table, region) != source.seal:
            raise EvidenceError(f"{source.name} was changed after it was written: its checksum is another")
        self._sums = np.frombuffer(table, dtype=np.int64)

    def read(self, segments: Sequence[Segment], beat: Callable[[], None], test_all: bool) -> None:
        shared: dict[int, list[Segment]] = {}
        runs: list[tuple[int, int, Segment]] = []  # first block, how many: all of them inside of the segment
        for segment in segments:
            if not len(segment.memory):
                continue
            first, last = -(-segment.at // BLOCK_BYTES), segment.end // BLOCK_BYTES
            if first < last:
                runs.append((first, last - first, segment))
            begin, end = segment.at // BLOCK_BYTES, (segment.end - 1) // BLOCK_BYTES
            edges = {begin, end} if first < last else range(begin, end + 1)
            for block in edges:
                if not first <= block < last:
                    shared.setdefault(block, []).append(segment)
        if test_all:
            rest = set(range(self._source.layout.block_count)).difference(shared)
            shared |= {block: [] for block in rest.difference(*(range(f, f + n) for f, n, _ in runs))}
        count = 0
        for first, blocks, run in sorted([*runs, *((b, 0, None) for b in shared)], key=lambda task: task[0]):
            if run is None:
                self._read_shared(first, shared[first])
                count += 1
            else:
                self._read_run(first, blocks, run, beat)
            if count >= _BEAT_BLOCKS:
                beat()
                count = 0
        beat()

    def _read_run(self, first: int, blocks: int, segment: Segment, beat: Callable[[], None]) -> None:
        view = memoryview(segment.memory)
        for block in range(first, first + blocks, _BLOCKS_AT_ONCE):
            count = min(_BLOCKS_AT_ONCE, first + blocks - block)
            begin = block * BLOCK_BYTES - segment.at
            piece = view[begin : begin + count * BLOCK_BYTES]
            self._fill(piece, block * BLOCK_BYTES)
            self._test(block, sums_of(piece))
            if (block - first) % _BEAT_BLOCKS == 0:
                beat()

    def _read_shared(self, block: int, segments: Sequence[Segment]) -> None:
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self._source.layout.table_at)
        scratch = self._scratch[: end - begin]
        self._fill(scratch.data, begin)
        self._test(block, sums_of(scratch))
        for segment in segments:
            low, high = max(begin, segment.at), min(end, segment.end)
            segment.memory[low - segment.at : high - segment.at] = scratch[low - begin : high - begin]

    def _fill(self, memory: memoryview, at: int) -> None:
        done = os.preadv(self._fd, [memory], at)
        while done < len(memory):
            more = os.preadv(self._fd, [memory[done:]], at + done)
            if not more:
                raise EvidenceError(f"{self._source.name} ends after {at + done} bytes")
            done += more

    def _test(self, block: int, sums: Any) -> None:
        if not np.array_equal(sums, self._sums[block : block + len(sums)]):
            raise EvidenceError(
                f"{self._source.name} was changed after it was written: "
                f"a checksum is another between byte {block * BLOCK_BYTES} and {(block + len(sums)) * BLOCK_BYTES}"
            )
