"""The `.metadata` by which PyTorch's Distributed Checkpoint finds everything in our files."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from everstep.worker.format.frame import dtype_named
from everstep.worker.format.layout import VALUES_KEY, Layout, Offer, Path, Piece, combine, tensors_name

_VERSION = "1.0.0"
"""Of the format that torch 2.9 to 2.13 write (torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION)."""


def complete(offers: Sequence[Offer]) -> tuple[Layout, bytes]:
    """The layout of all ranks' offers, and its `.metadata`."""
    layout = combine(offers, str(torch.__version__))
    return layout, metadata_of(layout)


def metadata_of(layout: Layout) -> bytes:
    """The pickle of torch's `Metadata`. What several ranks have alike is taken from the first one."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

    tensors: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    storage: dict[Any, Any] = {}
    for rank, ranks in enumerate(layout.ranks):
        for piece in ranks.pieces:
            for path in piece.known_as:
                name = _name(path)
                if _add_chunk(tensors, name, piece):
                    paths[name] = path
                    index = MetadataIndex(name, piece.offset, len(tensors[name].chunks) - 1)
                    storage[index] = _StorageInfo(tensors_name(rank), piece.blob_at, piece.blob_bytes)
    area = next((piece for piece in layout.ranks[0].pieces if piece.key == VALUES_KEY), None)
    for value in layout.values:
        assert area is not None
        name = _name(value.path)
        tensors[name], paths[name] = BytesStorageMetadata(), value.path
        storage[MetadataIndex(name)] = _StorageInfo(tensors_name(0), area.at + value.at, value.size_bytes)
    return pickle.dumps(
        Metadata(
            state_dict_metadata=tensors,
            planner_data=paths,
            storage_data=storage,
            storage_meta=StorageMeta(),
            version=_VERSION,
        )
    )


def _name(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _add_chunk(tensors: dict[str, Any], name: str, piece: Piece) -> bool:
    """Whether this part of the tensor is new, and holds anything."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    whole = torch.Size(piece.whole)
    entry = tensors.get(name)
    if entry is not None and (entry.size != whole or not piece.size_bytes):
        return False
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.shape))
    if entry is None:
        if not piece.size_bytes and whole.numel():
            return False
        properties = TensorProperties(dtype=dtype_named(piece.dtype))
        tensors[name] = TensorStorageMetadata(properties=properties, size=whole, chunks=[chunk])
        return True
    if any(there.offsets == chunk.offsets for there in entry.chunks):
        return False
    entry.chunks.append(chunk)
    return True
