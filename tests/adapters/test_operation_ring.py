"""The ring: what is written comes back, also when it has wrapped, was torn, or its table is full."""

from pathlib import Path

import pytest

from everstep.adapters.evidence.operation_ring import (
    RING_BYTES,
    SLOT_COUNT,
    TABLE_BYTES,
    RingGroup,
    RingReader,
    RingWriter,
    TextKind,
    create_ring,
    parse_ring,
)
from everstep.domain.errors import EvidenceError, WorldError
from everstep.domain.ids import Rank


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_ring(tmp_path / "3.ring", rank=3)
    return tmp_path / "3.ring"


def write(writer: RingWriter, seq: int, dims: tuple[int, ...] = (8, 4)) -> int:
    return writer.record((1, seq, -1, 2), (1, 1, 0, False), (1, 32), dims)


def test_an_operation_comes_back_with_its_end(path: Path) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    number = write(writer, 7)
    (record,) = reader.view().records
    assert (record.number, record.group, record.seq, record.peer, record.site) == (0, 1, 7, -1, 2)
    assert record.dims == (8, 4)
    assert record.done_ns == 0
    writer.done(number)
    assert reader.view().records[0].done_ns >= record.at_ns


@pytest.mark.parametrize("dims", [(), (5,), (1, 2, 3), (1, 2, 3, 4, 5), (2**33,)])
def test_any_shape_can_be_written(path: Path, dims: tuple[int, ...]) -> None:
    write(RingWriter(path), 1, dims)
    assert RingReader(path).view().records[0].dims == tuple(size % 2**32 for size in dims[:4])


def test_a_wrapped_ring_keeps_the_newest_and_says_so(path: Path) -> None:
    writer = RingWriter(path)
    for seq in range(SLOT_COUNT + 10):
        write(writer, seq)
    writer.done(3)  # long overwritten: must not mark another's end
    view = RingReader(path).view()
    assert view.wrapped
    assert [record.number for record in view.records] == list(range(10, SLOT_COUNT + 10))
    assert not any(record.done_ns for record in view.records)


def test_groups_and_sites_come_back_and_the_newest_word_counts(path: Path) -> None:
    writer = RingWriter(path)
    group = RingGroup(name="1", description="tp", ranks=(Rank(0), Rank(3)), created=2)
    writer.add_group(TextKind.GROUP, 1, group)
    writer.add_text(TextKind.SITE, 1, "train.py:3 in main")
    writer.add_group(TextKind.CREATING, 0, group)
    writer.count_creations(2)
    view = RingReader(path).view()
    assert (view.rank, view.groups, view.sites) == (3, {1: group}, {1: "train.py:3 in main"})
    assert (view.creating, view.creations) == (group, 2)
    writer.add_group(TextKind.CREATING, 0, None)
    assert RingReader(path).view().creating is None


def test_a_full_table_takes_no_more_and_stays_readable(path: Path) -> None:
    writer = RingWriter(path)
    assert writer.add_text(TextKind.SITE, 1, "x" * (TABLE_BYTES // 2))
    assert not writer.add_text(TextKind.SITE, 2, "y" * (TABLE_BYTES // 2))
    assert writer.add_text(TextKind.SITE, 3, "z")
    assert sorted(RingReader(path).view().sites) == [1, 3]


def test_what_is_no_ring_is_refused(path: Path, tmp_path: Path) -> None:
    for content in (b"", b"EVSTEPR1", bytes(RING_BYTES)):
        with pytest.raises(EvidenceError):
            parse_ring(content)
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(EvidenceError):
            RingReader(tmp_path / "other")
    with pytest.raises(WorldError):
        create_ring(path, rank=3)
