"""Shards in slots as files of one folder: found by version, sent in pieces, and taken in as complete only when proven.

Both the ranks' memory slots and the copies that a host keeps lie in such folders. It imports no torch, opens no line.
"""

import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from everstep.adapters.checkpoints.memory_slots import (
    SLOT_COUNT,
    RankSlots,
    SlotHeader,
    image_path,
    ranks_present,
    rest_path,
)
from everstep.domain.errors import EvidenceError
from everstep.policy.checkpoints import SlotState
from everstep.policy.replication import HeldShard, Version
from everstep.worker.format.seal import BLOCK_BYTES, Seal
from everstep.worker.saving.memory_room import room_bytes

PIECE_BYTES = 4 * BLOCK_BYTES
_ROOM_SHARE = 0.5
Fill = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What of a manifest's draft matters here."""

    world_size: int
    replicated: bool = False


def version_of(header: SlotHeader) -> Version:
    return Version(attempt=header.attempt, step=header.step, layout=header.layout)


class ShardStore:
    """The slots of some shards in one folder.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self._opened: dict[int, RankSlots] = {}
        self._facts: dict[tuple[int, int], tuple[bytes, _Facts | None]] = {}

    def header(self, shard: int, slot: int) -> SlotHeader:
        return self._headers(shard).read(slot)

    def write_header(self, shard: int, slot: int, header: SlotHeader) -> None:
        """Say what a slot holds, or what another host's slot of this number does."""
        self._headers(shard).write(slot, header)

    def find(self, shard: int, version: Version) -> tuple[int, SlotHeader] | None:
        """The slot that holds a version completely; None also for a shard that is not here at all."""
        if shard not in self._opened and shard not in ranks_present(self.folder):
            return None
        for slot in range(SLOT_COUNT):
            header = self.header(shard, slot)
            if header.state is SlotState.COMPLETE and version_of(header) == version:
                return slot, header
        return None

    def has_files(self, shard: int, slot: int) -> bool:
        """Whether the files of a slot are there in the sizes that its header says."""
        header = self.header(shard, slot)
        return all(path.exists() and path.stat().st_size == size for path, size in self._files(shard, slot, header))

    def held(self, shard: int) -> list[HeldShard]:
        found = []
        for slot in range(SLOT_COUNT):
            header = self.header(shard, slot)
            if header.state is SlotState.COMPLETE and (facts := self._facts_of(shard, slot, header)) is not None:
                found.append(
                    HeldShard(
                        shard=shard,
                        slot=slot,
                        version=version_of(header),
                        shard_count=facts.world_size,
                        is_replicated=facts.replicated,
                    )
                )
        return found

    @contextmanager
    def reading(self, shard: int, slot: int, header: SlotHeader) -> Iterator[list[memoryview]]:
        """The bytes of a slot's two files.

        Raises:
            EvidenceError: gone, or not as long as the header says.
        """
        maps, views = [], []
        try:
            for path, size in self._files(shard, slot, header):
                try:
                    with path.open("rb") as file:
                        if os.fstat(file.fileno()).st_size != size:
                            raise EvidenceError(f"{path.name} is not as long as its header says")
                        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
                except OSError as error:
                    raise EvidenceError(f"{path.name} cannot be read: {error.strerror}") from error
                if isinstance(content, mmap.mmap):
                    maps.append(content)
                views.append(memoryview(content))
            yield views
        finally:
            with suppress(BufferError):  # a line that broke holds a piece; the mapping goes with it
                for view in views:
                    view.release()
                for content in maps:
                    content.close()

    def take(self, shard: int, slot: int, header: SlotHeader, fill: Fill, *, in_place: bool) -> None:
        """Fill a slot piece by piece; it is complete only if its bytes have the checksums that the header says.

        Args:
            in_place: into the files that are there, whose pages exist; else into fresh ones, which come in by rename,
                so that whoever still maps the old ones sees no change.

        Raises:
            EvidenceError: other bytes than announced, or more than there is room for. The slot is then incomplete.
            OSError: memory is full, or whatever `fill` raises.
        """
        headers = self._headers(shard)
        headers.write(slot, SlotHeader(state=SlotState.WRITING, step=header.step, layout=header.layout))
        self.take_files(shard, slot, header, fill, in_place=in_place)
        headers.write(slot, replace(header, state=SlotState.COMPLETE))

    def take_files(
        self,
        shard: int,
        slot: int,
        header: SlotHeader,
        fill: Fill,
        *,
        in_place: bool = False,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """The files alone, for a slot whose header is not this host's to write, or is right already.

        Args:
            confirm: called when fresh files are proven, before they come in place; raises where they must not.

        Raises: as for `take`, or whatever `confirm` raises.
        """
        files = self._files(shard, slot, header)
        targets = files if in_place else [(path.with_name(f"{path.name}.new"), size) for path, size in files]
        seals: tuple[_Seal, ...] = (_SealOf(header.image_seal), _CrcOf(header.rest_seal))
        with ExitStack() as on_failure:
            for (path, size), seal in zip(targets, seals, strict=True):
                if not in_place:
                    on_failure.callback(path.unlink, missing_ok=True)
                self._fill(path, size, fill, seal)
                if not seal.is_right():
                    raise EvidenceError(f"shard {shard} of step {header.step} arrived changed")
            confirm()
            on_failure.pop_all()
        for (fresh, _), (path, _) in zip(targets, files, strict=True):
            fresh.rename(path)

    def _fill(self, path: Path, size: int, fill: Fill, seal: "_Seal") -> None:
        self._check_room(path, size)
        with _allocated(path, size) as content:
            for at in range(0, size, PIECE_BYTES):
                with content[at : at + PIECE_BYTES] as piece:
                    fill(piece)
                    seal.update(piece)

    def _headers(self, shard: int) -> RankSlots:
        if shard not in self._opened:
            self._opened[shard] = RankSlots(self.folder, shard)
        return self._opened[shard]

    def _facts_of(self, shard: int, slot: int, header: SlotHeader) -> _Facts | None:
        known = self._facts.get((shard, slot))
        if known is None or known[0] != header.facts:
            try:
                known = header.facts, msgspec.json.decode(header.facts, type=_Facts)
            except msgspec.MsgspecError:
                known = header.facts, None  # another version's
            self._facts[shard, slot] = known
        return known[1]

    def _files(self, shard: int, slot: int, header: SlotHeader) -> list[tuple[Path, int]]:
        return [
            (image_path(self.folder, shard, slot), header.image_bytes),
            (rest_path(self.folder, shard, slot), header.rest_bytes),
        ]

    def _check_room(self, path: Path, size: int) -> None:
        there = path.stat().st_size if path.exists() else 0
        room = room_bytes(self.folder)
        if size - there > room * _ROOM_SHARE:
            raise EvidenceError(
                f"{path.name} would take {size / 1e9:.1f} GB, over half of the {room / 1e9:.1f} GB free"
            )


def takes_room(store: ShardStore, shard: int) -> bool:
    """Whether a shard has files here, complete or not."""
    return any(path.exists() for path in _paths(store.folder, shard))


def drop(store: ShardStore, shard: int) -> None:
    """Free what a shard takes."""
    for slot in range(SLOT_COUNT):
        store.write_header(shard, slot, SlotHeader())
    _unlink(store.folder, shard)


def drop_files(folder: Path, keep: tuple[int, ...]) -> None:
    """Remove the files of all shards in a folder but these: they are of a moment that is over."""
    for shard in ranks_present(folder):
        if shard not in keep:
            _unlink(folder, shard)


def _unlink(folder: Path, shard: int) -> None:
    for path in _paths(folder, shard):
        path.unlink(missing_ok=True)


def _paths(folder: Path, shard: int) -> list[Path]:
    return [path(folder, shard, slot) for slot in range(SLOT_COUNT) for path in (image_path, rest_path)]


@contextmanager
def _allocated(path: Path, size: int) -> Iterator[memoryview]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        if not size:
            yield memoryview(b"")
            return
        os.posix_fallocate(fd, 0, size)  # a full memory must fail here and not by SIGBUS
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # cheaper than a fault for each page
        with mmap.mmap(fd, size, flags=flags) as content, memoryview(content) as view:
            yield view
    finally:
        os.close(fd)


class _Seal(Protocol):
    def update(self, piece: memoryview) -> None: ...

    def is_right(self) -> bool: ...


class _SealOf:
    def __init__(self, expected: int) -> None:
        self._expected, self._seal = expected, Seal()

    def update(self, piece: memoryview) -> None:
        self._seal.update(piece)

    def is_right(self) -> bool:
        return self._seal.value() == self._expected


class _CrcOf:
    def __init__(self, expected: int) -> None:
        self._expected, self._crc = expected, 0

    def update(self, piece: memoryview) -> None:
        self._crc = zlib.crc32(piece, self._crc)

    def is_right(self) -> bool:
        return self._crc == self._expected
