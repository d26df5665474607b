"""Writes ranks' memory slots to files of a checkpoint, tested on their way; it knows no schedule and no other host."""

import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from everstep.adapters.checkpoints.memory_slots import RankSlots, SlotHeader, image_path, rest_path
from everstep.domain.errors import EvidenceError
from everstep.policy.checkpoints import SlotState
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import write_past_cache
from everstep.worker.format.layout import tensors_name
from everstep.worker.format.manifest import Crc32, FileEntry
from everstep.worker.format.publishing import write_common, write_small
from everstep.worker.format.seal import Seal
from everstep.worker.format.trailer import unpack

Found = tuple[int, int, SlotHeader]
"""Rank, slot, and what the slot says of itself."""


class Overtaken(Exception):
    """A slot was overwritten while it was read."""


class SlotFiles:
    """The slots of a folder in shared memory, as files on disk.

    Args:
        moved: called whenever the disk has answered; what it raises ends the write.
    """

    def __init__(self, folder: Path, headers: Sequence[RankSlots], moved: Callable[[], None]) -> None:
        self._folder = folder
        self._headers = headers
        self._moved = moved

    def find(self, step: int, ranks: Iterable[int]) -> list[Found]:
        """The slots that hold a step. Raises Overtaken where one does not, or they do not fit together."""
        found = []
        for rank in ranks:
            headers = self._headers[rank]
            slot = headers.find(step)
            if slot is None or (header := headers.read(slot)).state is not SlotState.COMPLETE or header.step != step:
                raise Overtaken
            found.append((rank, slot, header))
        if len({header.layout for _, _, header in found}) > 1:
            raise Overtaken  # of two attempts with different states
        return found

    def write_layout(self, folder: Path, first: Found) -> list[FileEntry]:
        """What tells where everything is, for us and for Distributed Checkpoint: every slot ends with it.

        Raises:
            EvidenceError: it is not what the ranks wrote.
        """
        rank, slot, header = first
        try:
            _, layout, metadata = unpack(image_path(self._folder, rank, slot), header.layout)
        except EvidenceError:
            self._raise_if_overtaken(first)
            raise
        return write_common(folder, layout, metadata)

    def write(self, folder: Path, found: Sequence[Found]) -> list[FileEntry]:
        """The files of these ranks; the slots must be the same before and after.

        Raises:
            Overtaken: they were not.
            EvidenceError: a slot is not what its header says.
            OSError: the disk is full or broken.
        """
        entries = []
        for one in found:
            entries += [self._write_image(folder, one), self._write_rest(folder, one)]
            self._moved()
        step = found[0][2].step
        if [(rank, slot) for rank, slot, _ in self.find(step, [rank for rank, _, _ in found])] != [
            (rank, slot) for rank, slot, _ in found
        ]:
            raise Overtaken
        return entries

    def _write_image(self, folder: Path, found: Found) -> FileEntry:
        rank, slot, header = found
        path = image_path(self._folder, rank, slot)
        seal, crc = Seal(), Crc32()

        def look(piece: memoryview) -> None:
            seal.update(piece)
            crc.update(piece)
            self._moved()

        with self._open(path, found) as file:
            # Tested before it is mapped: a new attempt makes the file anew, and it is empty for a moment.
            is_sound = os.fstat(file.fileno()).st_size == header.image_bytes > 0
            if is_sound:
                with mmap.mmap(file.fileno(), header.image_bytes, access=mmap.ACCESS_READ) as content:
                    write_past_cache(folder / tensors_name(rank), content, look)
                is_sound = seal.value() == header.image_seal
        if not is_sound:
            raise self._changed(found)
        return FileEntry(
            name=tensors_name(rank),
            rank=rank,
            size_bytes=header.image_bytes,
            digest=crc.hexdigest(),
            seal=header.image_seal,
        )

    def _write_rest(self, folder: Path, found: Found) -> FileEntry:
        rank, slot, header = found
        with self._open(rest_path(self._folder, rank, slot), found) as file:
            content = file.read()
        if len(content) != header.rest_bytes or zlib.crc32(content) != header.rest_seal:
            raise self._changed(found)
        return write_small(folder, manifests.rest_name(rank), content, rank=rank)

    def _open(self, path: Path, found: Found) -> BinaryIO:
        """A slot's file; one that is gone is no failure of the disk."""
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise self._changed(found) from None

    def _changed(self, found: Found) -> EvidenceError:
        """What to raise for a slot that is not what its header says. Raises Overtaken where the header changed, too."""
        self._raise_if_overtaken(found)
        rank, _, header = found
        return EvidenceError(f"step {header.step}: the memory of rank {rank} was changed after it was written")

    def _raise_if_overtaken(self, found: Found) -> None:
        rank, slot, header = found
        if self._headers[rank].read(slot) != header:
            raise Overtaken
