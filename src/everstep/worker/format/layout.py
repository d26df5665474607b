"""Where each tensor lies in the files of a checkpoint, in memory and on disk alike; kept as JSON beside them.

A rank's file is what PyTorch's Distributed Checkpoint writes: one `torch.save` of a tensor after the other. After them
comes a table with a checksum for each block. It knows numbers and names, nothing of torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from everstep.domain.errors import EvidenceError
from everstep.worker.format.seal import BLOCK_BYTES

PAGE_BYTES = 4096
SUM_BYTES = 8
ALIGNMENT = 64
LAYOUT_NAME = "layout.json"
METADATA_NAME = ".metadata"
VALUES_KEY = "everstep.values"
"""The piece of rank 0 that holds numbers and the like for Distributed Checkpoint, each in a place of its own."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's part of one tensor.

    Attributes:
        key: what it is, the same on every rank.
        known_as: its paths in the state dict that Distributed Checkpoint reads; empty where that has no place for it.
        dtype: torch's name for it, like `float32`.
        shape, whole, offset: of the part, of the whole tensor, and where in this the part begins.
        device: kind of the device that it was on.
        is_sharded: it came from a DTensor.
        is_private: ranks may have different ones.
        at, size_bytes: the data in the file.
        blob_at, blob_bytes: the `torch.save` around the data.
    """

    key: str
    known_as: tuple[Path, ...] = ()
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    device: str = "cpu"
    is_sharded: bool = False
    is_private: bool = False
    at: int
    size_bytes: int
    blob_at: int
    blob_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Something that is no tensor, for Distributed Checkpoint; its place begins `at` bytes into VALUES_KEY's piece."""

    path: Path
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """One rank's file.

    Attributes:
        pieces: in the order of the file.
        table_at: where the checksums of the blocks before begin, itself the begin of a block.
    """

    pieces: tuple[Piece, ...]
    table_at: int

    @property
    def block_count(self) -> int:
        return self.table_at // BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """Of the file up to the end of its table; a memory slot goes on with a trailer."""
        return self.table_at + max(PAGE_BYTES, round_up(SUM_BYTES * self.block_count, PAGE_BYTES))

    @property
    def table_bytes(self) -> int:
        return SUM_BYTES * self.block_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank brings to a layout; what follows `rank` is the same on all, and the first one's counts.

    Attributes:
        parameters: names in the model's order.
        states: the keys of the optimizer's state of each parameter that has one, in their order.
    """

    rank: RankLayout
    values: tuple[Value, ...] = ()
    parameters: tuple[str, ...] = ()
    states: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of all ranks."""

    torch: str
    ranks: tuple[RankLayout, ...]
    values: tuple[Value, ...]
    parameters: tuple[str, ...]
    states: dict[str, tuple[str, ...]]


def combine(offers: Sequence[Offer], torch_version: str) -> Layout:
    """The layout of all ranks' offers, in their order."""
    first = offers[0]
    return Layout(
        torch=torch_version,
        ranks=tuple(offer.rank for offer in offers),
        values=first.values,
        parameters=first.parameters,
        states=first.states,
    )


def encode(layout: Layout) -> bytes:
    return msgspec.json.encode(layout)


def decode(content: bytes, digest: str) -> Layout:
    """The layout of its JSON.

    Args:
        digest: what `digest_of` said of it.

    Raises:
        EvidenceError: it is another one.
    """
    if digest_of(content) != digest:
        raise EvidenceError(f"{LAYOUT_NAME} was changed after it was written: its checksum is another")
    try:
        return msgspec.json.decode(content, type=Layout)
    except msgspec.MsgspecError as error:
        raise EvidenceError(f"{LAYOUT_NAME} is malformed: {error}") from error


def digest_of(content: bytes) -> str:
    """32 hexadecimal digits that name a layout."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def tensors_name(rank: int) -> str:
    """The file of a rank's tensors, as Distributed Checkpoint calls it."""
    return f"__{rank}_0.distcp"


def round_up(size: int, to: int) -> int:
    return size + -size % to
