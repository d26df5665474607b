"""A file is read to where it belongs in one pass, by one thread or several, and every changed byte of it is found."""

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.adapters.checkpoints.memory_slots import RankSlots, SlotHeader, image_path
from everstep.domain.errors import EvidenceError
from everstep.policy.checkpoints import SlotState
from everstep.worker.format.frame import arrange
from everstep.worker.format.layout import RankLayout
from everstep.worker.format.pieces import live
from everstep.worker.format.rank_file import seal_of_tensors, write_rank_file
from everstep.worker.format.seal import BLOCK_BYTES, Seal, seal_of
from everstep.worker.restoring import reading, slot_maps
from everstep.worker.restoring.read_plan import run_in
from everstep.worker.restoring.reading import Segment, Source, read_into

SIZES = [(), (0,), (3,), (1000,), (700, 300), (1 << 20,), (5,), (300_001,)]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Source, list[torch.Tensor]]:
    tensors = [
        torch.randn(size).to(torch.bfloat16 if number % 2 else torch.float32) for number, size in enumerate(SIZES)
    ]
    layout = arrange([live(str(number), tensor) for number, tensor in enumerate(tensors)])
    path = tmp_path / "file"
    seal, _ = write_rank_file(path, layout, tensors, lambda: None)
    assert seal == seal_of_tensors(layout, tensors) == seal_of(path.read_bytes())
    return Source(path=path, name="file", layout=layout, size_bytes=layout.size_bytes, seal=seal), tensors


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Path]:
    """The path of rank 0's first slot; nothing stays mapped afterwards."""
    folder = tmp_path / "memory"
    folder.mkdir()
    RankSlots(folder, 0).close()
    yield image_path(folder, 0, 0)
    slot_maps.map_slots(tmp_path, 0)


def targets(layout: RankLayout) -> tuple[list[Segment], list[torch.Tensor]]:
    tensors = [torch.empty(piece.shape, dtype=getattr(torch, piece.dtype)) for piece in layout.pieces]
    memories = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    return [Segment(at=p.at, memory=m) for p, m in zip(layout.pieces, memories, strict=True)], tensors


@pytest.mark.parametrize("threads", [1, 3])
def test_every_tensor_comes_back_and_every_changed_byte_is_found(
    threads: int, written: tuple[Source, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_thread_count", lambda: threads)
    monkeypatch.setattr(reading, "_BLOCKS_FOR_THREADS", 2)
    source, tensors = written
    segments, found = targets(source.layout)
    read_into(source, segments, lambda: None, test_all=False)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    content, chance = source.path.read_bytes(), random.Random(3)
    for at in [0, len(content) - 1, source.layout.table_at, *(chance.randrange(len(content)) for _ in range(20))]:
        changed = bytearray(content)
        changed[at] ^= 1 << chance.randrange(8)
        source.path.write_bytes(changed)
        with pytest.raises(EvidenceError, match="file was changed after it was written"):
            read_into(source, segments, lambda: None, test_all=True)
    source.path.write_bytes(content[:-5000])
    with pytest.raises(EvidenceError, match=r"ends after|changed"):
        read_into(source, segments, lambda: None, test_all=True)


def test_a_file_is_what_torch_reads_piece_by_piece(written: tuple[Source, list[torch.Tensor]]) -> None:
    source, tensors = written
    for piece, tensor in zip(source.layout.pieces, tensors, strict=True):
        with source.path.open("rb") as file:
            file.seek(piece.blob_at)
            blob = file.read(piece.blob_bytes)
        path = source.path.with_name("blob")
        path.write_bytes(blob)
        assert torch.equal(torch.load(path, weights_only=True), tensor)
        assert piece.blob_at % 64 == piece.at % 64 == 0
    assert source.layout.size_bytes % 4096 == 0


def test_the_seal_of_a_file_in_pieces_is_that_of_the_whole() -> None:
    content = random.Random(1).randbytes(3 * BLOCK_BYTES + 1001)
    seal = Seal()
    for at in range(0, len(content), BLOCK_BYTES):
        seal.update(content[at : at + BLOCK_BYTES])
    assert seal.value() == seal_of(content)
    swapped = content[BLOCK_BYTES : 2 * BLOCK_BYTES] + content[:BLOCK_BYTES] + content[2 * BLOCK_BYTES :]
    assert seal_of(swapped) != seal_of(content)


def test_a_box_is_one_run_of_an_array_or_it_is_not() -> None:
    whole = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    chance, runs = random.Random(2), 0
    for _ in range(500):
        low = [chance.randrange(n) for n in whole.shape]
        high = [chance.randint(o + 1, n) for o, n in zip(low, whole.shape, strict=True)]
        box = whole[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].reshape(-1)
        start = run_in([0, 0, 0], whole.shape, low, high)
        is_run = bool(np.array_equal(box, np.arange(box[0], box[0] + box.size)))
        assert (start is not None) == is_run, (low, high)
        runs += is_run
        assert start is None or start == box[0]
    assert runs > 50


def test_a_file_that_is_mapped_already_is_copied_from_there_and_its_damage_is_found(
    written: tuple[Source, list[torch.Tensor]], slot: Path
) -> None:
    source, tensors = written
    source = replace(source, path=slot)
    slot.write_bytes(written[0].path.read_bytes())
    slot_maps.map_slots(slot.parent, 0)
    while slot_maps.populate_some():
        pass
    with slot.open("rb") as file:
        there = slot_maps.mapped(file.fileno())
    assert there is not None
    assert there.ready_bytes == source.size_bytes
    segments, found = targets(source.layout)
    read_into(source, segments, lambda: None, test_all=True)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    with slot.open("r+b") as file:
        file.seek(source.layout.pieces[5].at + 1000)
        file.write(b"!")
    with pytest.raises(EvidenceError, match="a checksum is another between"):
        read_into(source, segments, lambda: None, test_all=True)
    slot.write_bytes(written[0].path.read_bytes()[:-5000])  # shorter than its mapping, which must not be touched
    with pytest.raises(EvidenceError, match=r"ends after|changed"):
        read_into(source, segments, lambda: None, test_all=True)


def test_slots_that_were_replaced_are_mapped_anew_and_those_that_went_are_let_go(slot: Path) -> None:
    slot.write_bytes(b"a" * 5000)
    slot_maps.map_slots(slot.parent, 0)
    with slot.open("rb") as old:
        slot.unlink()
        slot.write_bytes(b"b" * 5000)
        assert slot_maps.mapped(old.fileno()) is not None
        slot_maps.map_slots(slot.parent, 0)
        assert slot_maps.mapped(old.fileno()) is None
    with slot.open("rb") as new:
        there = slot_maps.mapped(new.fileno())
        assert there is not None
        assert bytes(there.content[:3]) == b"bbb"
    del there
    slot.unlink()
    slot_maps.map_slots(slot.parent, 0)
    assert str(slot) not in Path("/proc/self/maps").read_text()


def test_a_rank_maps_its_own_slots_and_where_ranks_share_their_state_those_of_all(slot: Path) -> None:
    other = image_path(slot.parent, 1, 2)
    with contextlib.closing(RankSlots(slot.parent, 1)):
        slot.write_bytes(b"a" * 5000)
        other.write_bytes(b"b" * 5000)
    with contextlib.closing(RankSlots(slot.parent, 0)) as headers, other.open("rb") as file:
        slot_maps.map_slots(slot.parent, 0)
        assert slot_maps.mapped(file.fileno()) is None
        headers.write(0, SlotHeader(state=SlotState.COMPLETE, step=1, facts=b'{"replicated":true,"step":1}'))
        slot_maps.map_slots(slot.parent, 0)
        assert slot_maps.mapped(file.fileno()) is not None
        slot_maps.release_later(0.0)
        deadline_s = time.monotonic() + 10
        while slot_maps.mapped(file.fileno()) is not None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert slot_maps.mapped(file.fileno()) is None
