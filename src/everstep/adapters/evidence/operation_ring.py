"""A rank's operation ring: its latest communication in shared memory, written by the worker, read without asking it.

It holds what PyTorch's recorder lacks on gloo: point-to-point operations, roots, ends as the host sees them, groups
with their members. Numbers go into fixed slots, texts (groups, places in the script) into a table that only grows.

Layout (little endian): header 0-63, table from 64, slots behind it. A slot is written before the count that covers it.
"""

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.shared_pages import make_page, open_page
from everstep.domain.errors import EvidenceError
from everstep.domain.ids import Rank

_MAGIC = b"EVSTEPR1"
_HEADER = struct.Struct("<8sII")  # magic, rank, reserved
_COUNTS = struct.Struct("<QQQ")  # records written, bytes of the table, group creations begun
_COUNT = struct.Struct("<Q")
_COUNTS_AT, _TABLE_BYTES_AT, _CREATIONS_AT, _TABLE_AT = (
    16,
    24,
    32,
    64,
)  # two writes for two counts: two threads may write one each
TABLE_BYTES = 128 * 1024
SLOT_COUNT = 2048
_SLOT = struct.Struct("<QQQQIIiIBBBBHHIIII")
_SLOT_BYTES = 80
_DONE_OFFSET = 16
_SLOTS_AT = _TABLE_AT + TABLE_BYTES
RING_BYTES = _SLOTS_AT + SLOT_COUNT * _SLOT_BYTES
_TEXT = struct.Struct("<IHH")  # bytes, kind, number
DIMENSIONS_MAX = 4
_READ_ATTEMPTS = 8


class TextKind(IntEnum):
    """What a text of the table is."""

    GROUP = 1
    SITE = 2
    CREATING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRecord:
    """One operation of one rank.

    Attributes:
        number: place in the rank's program, from 0.
        at_ns, done_ns: CLOCK_REALTIME at its start, and at which its end had been seen; 0 while it has not.
        numel: elements over all tensors.
        group: number of a group.
        seq: among the group's collectives, or among the messages of one direction with this peer; from 1.
        peer: group rank of the peer, or of the root; -1 for none.
        site: number of the text that says where the script called it; 0 for unknown.
        kind: index into `worker.recorder`'s list, which the reader is given.
        dtype, reduce_op: codes that are equal on all ranks.
        unseen: its end cannot be seen (reduce_scatter on gloo): done once anything comes after it.
        dims: of the first tensor, the first four.
    """

    number: int
    at_ns: int
    done_ns: int
    numel: int
    group: int
    seq: int
    peer: int
    site: int
    kind: int
    dtype: int
    reduce_op: int
    unseen: bool
    tensors: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGroup:
    """A process group as its rank sees it.

    Attributes:
        ranks: global ranks in the group's order.
        created: its place among the groups that this rank has created, from 1.
    """

    name: str
    description: str = ""
    ranks: tuple[Rank, ...]
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingView:
    """What a ring says at one moment.

    Attributes:
        records: oldest first.
        groups, sites: by their numbers.
        creating: a group that the rank is creating at this moment; None when there is none or nobody could say.
        creations: group creations that it has begun, those of groups without it too.
        wrapped: older records are lost.
    """

    rank: Rank
    records: tuple[RingRecord, ...]
    groups: dict[int, RingGroup]
    sites: dict[int, str]
    creating: RingGroup | None
    creations: int
    wrapped: bool


def create_ring(path: Path, *, rank: int) -> None:
    """Make an empty ring, mode 0600.

    Raises:
        WorldError: shared memory is full or not writable.
    """
    make_page(path, RING_BYTES, _HEADER.pack(_MAGIC, rank, 0), what="operation ring")


class RingWriter:
    """The worker's side; one thread at a time, which Python's lock sees to."""

    def __init__(self, path: Path) -> None:
        self._memory = open_page(path, RING_BYTES)
        self._count = 0
        self._table_bytes = 0

    @property
    def count(self) -> int:
        return self._count

    def record(
        self,
        place: tuple[int, int, int, int],
        what: tuple[int, int, int, bool],
        tensors: tuple[int, int],
        dims: Sequence[int],
    ) -> int:
        """An operation begins; its number is what `done` wants.

        Args:
            place: group, seq, peer, site.
            what: kind, dtype, reduce op, whether its end is unseen.
            tensors: how many, and their elements.
            dims: of the first one.
        """
        number = self._count
        group, seq, peer, site = place
        kind, dtype, reduce_op, unseen = what
        count, numel = tensors
        ndim = len(dims)
        if ndim == 1:
            d0, d1, d2, d3 = dims[0], 0, 0, 0
        else:
            d0, d1, d2, d3 = (*dims[:DIMENSIONS_MAX], 0, 0, 0, 0)[:DIMENSIONS_MAX]
        _SLOT.pack_into(
            self._memory,
            _SLOTS_AT + number % SLOT_COUNT * _SLOT_BYTES,
            number,
            time.time_ns(),
            0,
            numel,
            group,
            seq,
            peer,
            site,
            kind,
            dtype,
            reduce_op,
            unseen,
            count,
            ndim,
            d0 & 0xFFFFFFFF,
            d1 & 0xFFFFFFFF,
            d2 & 0xFFFFFFFF,
            d3 & 0xFFFFFFFF,
        )
        self._count = number + 1
        _COUNT.pack_into(self._memory, _COUNTS_AT, number + 1)
        return number

    def done(self, number: int) -> None:
        """The end of an operation has been seen."""
        if number > self._count - SLOT_COUNT:
            at = _SLOTS_AT + number % SLOT_COUNT * _SLOT_BYTES + _DONE_OFFSET
            _COUNT.pack_into(self._memory, at, time.time_ns())

    def add_text(self, kind: TextKind, number: int, text: str) -> bool:
        """Put a text into the table, which only grows; False when it is full."""
        body = text.encode()
        used = self._table_bytes
        if used + _TEXT.size + len(body) > TABLE_BYTES:
            return False
        _TEXT.pack_into(self._memory, _TABLE_AT + used, len(body), kind, number)
        self._memory[_TABLE_AT + used + _TEXT.size : _TABLE_AT + used + _TEXT.size + len(body)] = body
        self._table_bytes = used + _TEXT.size + len(body)
        _COUNT.pack_into(self._memory, _TABLE_BYTES_AT, self._table_bytes)
        return True

    def count_creations(self, count: int) -> None:
        """So many group creations have begun in this process."""
        _COUNT.pack_into(self._memory, _CREATIONS_AT, count)

    def add_group(self, kind: TextKind, number: int, group: RingGroup | None) -> bool:
        """Put a group into the table; `CREATING` with None says that the creation has ended."""
        return self.add_text(kind, number, msgspec.json.encode(group).decode())


class RingReader:
    """The agent's side of one ring.

    Raises:
        EvidenceError: not a ring.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._memory = open_page(path, RING_BYTES)
        except (OSError, ValueError) as error:
            raise EvidenceError(f"{path} is no operation ring: {error}") from error
        magic, rank, _ = _HEADER.unpack_from(self._memory, 0)
        if magic != _MAGIC:
            raise EvidenceError(f"{path} is no operation ring of this version of everstep")
        self._rank = Rank(rank)

    def view(self) -> RingView:
        """The ring as it is now. A slot that was overwritten while it was read is left out."""
        return parse_ring(self.raw())

    def raw(self) -> bytes:
        """A copy of the whole, for the evidence folder; again when the writer was at it."""
        copy = bytes(self._memory)
        for _ in range(_READ_ATTEMPTS):
            if copy[_COUNTS_AT:_TABLE_AT] == self._memory[_COUNTS_AT:_TABLE_AT]:
                break
            copy = bytes(self._memory)
        return copy

    def close(self) -> None:
        self._memory.close()


def parse_ring(memory: bytes) -> RingView:
    """Read a copy of a ring.

    Raises:
        EvidenceError: it is none, or torn.
    """
    if len(memory) != RING_BYTES or not memory.startswith(_MAGIC):
        raise EvidenceError(f"{len(memory)} bytes are no operation ring of this version of everstep")
    _, rank, _ = _HEADER.unpack_from(memory, 0)
    count, table_bytes, creations = _COUNTS.unpack_from(memory, _COUNTS_AT)
    groups: dict[int, RingGroup] = {}
    sites: dict[int, str] = {}
    creating: RingGroup | None = None
    for kind, number, text in _texts(memory, table_bytes):
        match kind:
            case TextKind.SITE:
                sites[number] = text.decode(errors="replace")
            case TextKind.GROUP:
                groups[number] = _group(text) or groups.get(number) or _nameless(number)
            case TextKind.CREATING:
                creating = _group(text)
    return RingView(
        rank=Rank(rank),
        records=tuple(_records(memory, count)),
        groups=groups,
        sites=sites,
        creating=creating,
        creations=creations,
        wrapped=count > SLOT_COUNT,
    )


def _nameless(number: int) -> RingGroup:
    return RingGroup(name=f"?{number}", ranks=(), created=0)


def _group(text: bytes) -> RingGroup | None:
    try:
        return msgspec.json.decode(text, type=RingGroup | None)
    except msgspec.MsgspecError:
        return None


def _texts(memory: bytes, table_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    at, end = _TABLE_AT, _TABLE_AT + min(table_bytes, TABLE_BYTES)
    while at + _TEXT.size <= end:
        size, kind, number = _TEXT.unpack_from(memory, at)
        yield kind, number, memory[at + _TEXT.size : at + _TEXT.size + size]
        at += _TEXT.size + size


def _records(memory: bytes, count: int) -> Iterator[RingRecord]:
    for number in range(max(0, count - SLOT_COUNT), count):
        (found, at_ns, done_ns, numel, group, seq, peer, site, kind, dtype, reduce_op, unseen, tensors, ndim, *dims) = (
            _SLOT.unpack_from(memory, _SLOTS_AT + number % SLOT_COUNT * _SLOT_BYTES)
        )
        if found == number:
            yield RingRecord(
                number=number,
                at_ns=at_ns,
                done_ns=done_ns,
                numel=numel,
                group=group,
                seq=seq,
                peer=peer,
                site=site,
                kind=kind,
                dtype=dtype,
                reduce_op=reduce_op,
                unseen=bool(unseen),
                tensors=tensors,
                dims=tuple(dims[: min(ndim, DIMENSIONS_MAX)]),
            )
