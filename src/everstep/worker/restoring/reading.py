"""Reads tensors from a rank's file into memory in one pass: each block goes where it belongs and is tested on its way.

A block is copied from where the process has mapped the file, if it has, else read from it, and summed right after,
while it is in the processor's cache. It knows files and bytes, and no ranks.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everstep.domain.errors import EvidenceError
from everstep.worker.format.layout import RankLayout
from everstep.worker.format.seal import BLOCK_BYTES, seal_by_table
from everstep.worker.restoring.slot_maps import Bytes, mapped

_BLOCKS_AT_ONCE = 2
_BEAT_TASKS = 64
_BEAT_S = 0.5
_THREADS_MAX = 4
_BLOCKS_FOR_THREADS = 128
"""From 32 MB on, threads are worth their start."""


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
        self._there = mapped(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        region = bytearray(source.size_bytes - source.layout.table_at)
        self._fill(np.frombuffer(region, dtype=np.uint8), source.layout.table_at)
        table = bytes(region[: source.layout.table_bytes])
        if seal_by_table(table, region) != source.seal:
            raise EvidenceError(f"{source.name} was changed after it was written: its checksum is another")
        self._expected = np.frombuffer(table, dtype=np.int64)
        self._found = self._expected.copy()  # of the blocks that are read, what was found

    def read(self, segments: Sequence[Segment], beat: Callable[[], None], test_all: bool) -> None:
        tasks = self._tasks(segments, test_all)
        count = _thread_count()
        if count == 1 or sum(task.blocks for task in tasks) < _BLOCKS_FOR_THREADS:
            self._work(tasks, beat)
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="everstep-reading") as pool:
                futures = [pool.submit(self._work, tasks[number::count], lambda: None) for number in range(count)]
                while wait(futures, timeout=_BEAT_S).not_done:
                    beat()
            for future in futures:
                future.result()
        beat()
        if (wrong := np.flatnonzero(self._found != self._expected)).size:
            at = int(wrong[0]) * BLOCK_BYTES
            raise EvidenceError(
                f"{self._source.name} was changed after it was written: a checksum is another between byte {at} and "
                f"{at + BLOCK_BYTES}"
            )

    def _tasks(self, segments: Sequence[Segment], test_all: bool) -> list["_Task"]:
        """What to read, in the order of the file: runs of blocks inside of one segment, and blocks that are shared."""
        shared: dict[int, list[Segment]] = {}
        runs: list[tuple[int, int, Segment]] = []
        for segment in segments:
            if not len(segment.memory):
                continue
            first, last = -(-segment.at // BLOCK_BYTES), segment.end // BLOCK_BYTES
            if first < last:
                runs.append((first, last, segment))
            for block in {segment.at // BLOCK_BYTES, (segment.end - 1) // BLOCK_BYTES}:
                if not first <= block < last:
                    shared.setdefault(block, []).append(segment)
        if test_all:
            inside = (range(first, last) for first, last, _ in runs)
            rest = set(range(self._source.layout.block_count)).difference(shared, *inside)
            shared |= {block: [] for block in rest}
        tasks = [_Task(first=block, blocks=1, shared=found) for block, found in shared.items()]
        for first, last, segment in runs:
            tasks += [
                _Task(first=block, blocks=min(_BLOCKS_AT_ONCE, last - block), inside=segment)
                for block in range(first, last, _BLOCKS_AT_ONCE)
            ]
        return sorted(tasks, key=lambda task: task.first)

    def _work(self, tasks: Sequence["_Task"], beat: Callable[[], None]) -> None:
        scratch = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for number, task in enumerate(tasks):
            begin, size = task.first * BLOCK_BYTES, task.blocks * BLOCK_BYTES
            memory = scratch
            if task.inside is not None:
                memory = task.inside.memory[begin - task.inside.at : begin - task.inside.at + size]
            self._fill(memory, begin)
            words = memory.view(np.int64).reshape(task.blocks, -1)
            np.add.reduce(words, axis=1, out=self._found[task.first : task.first + task.blocks])
            for segment in task.shared:
                low, high = max(begin, segment.at), min(begin + BLOCK_BYTES, segment.end)
                segment.memory[low - segment.at : high - segment.at] = scratch[low - begin : high - begin]
            if number % _BEAT_TASKS == 0:
                beat()

    def _fill(self, memory: Bytes, at: int) -> None:
        end = at + len(memory)
        if self._there is not None and end <= self._there.ready_bytes:
            memory[:] = self._there.content[at:end]
            return
        view = memory.data
        done = os.preadv(self._fd, [view], at)
        while done < len(view):
            more = os.preadv(self._fd, [view[done:]], at + done)
            if not more:
                raise EvidenceError(f"{self._source.name} ends after {at + done} bytes")
            done += more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """Blocks to read: into the memory of one segment, or one block beside its place, for each that has some of it."""

    first: int
    blocks: int
    inside: Segment | None = None
    shared: Sequence[Segment] = ()


def _thread_count() -> int:
    """Cores for each rank of this host."""
    try:
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1))
    except ValueError:
        ranks = 1
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // ranks))
