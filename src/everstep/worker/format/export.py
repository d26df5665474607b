"""Turns a checkpoint into what other programs read: PyTorch's Distributed Checkpoint, or one safetensors file.

A checkpoint is one of the first kind already, so that is a copy, tested on its way. It needs no process group, no
model, and not as many ranks as wrote it.
"""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from everstep.domain.errors import ConfigError, EvidenceError
from everstep.worker.format import layout as layouts
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder
from everstep.worker.format.layout import LAYOUT_NAME, METADATA_NAME, Layout, Piece
from everstep.worker.format.manifest import COMMON, FileEntry, Manifest
from everstep.worker.restoring.reading import Segment, Source, read_into

_SAFETENSORS_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def export(folder: Path, to: str, target: Path) -> None:
    """Write a checkpoint in another form.

    Args:
        to: `dcp` (model and optimizer as `get_state_dict` names them) or `safetensors` (parameters and buffers).

    Raises:
        EvidenceError: the checkpoint is damaged.
        ConfigError: the target exists, or the form cannot hold what there is.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; give another --out")
    manifest = manifests.read(folder)
    fresh = target.with_name(f".{target.name}.new")
    if fresh.is_dir():
        shutil.rmtree(fresh)
    fresh.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if to == "dcp":
        fresh.mkdir()
        for entry in _needed_by_dcp(manifest):
            _copy(folder, entry, fresh / entry.name)
        sync_folder(fresh)
    else:
        _write_safetensors(fresh, folder, manifest)
    fresh.rename(target)
    sync_folder(target.parent)


def _needed_by_dcp(manifest: Manifest) -> Iterator[FileEntry]:
    tensors = {entry.name: entry for rank in range(manifest.world_size) if (entry := manifest.tensors_of(rank))}
    yield from tensors.values()
    metadata = manifest.entry(METADATA_NAME, COMMON)
    if metadata is None:
        raise EvidenceError(f"{manifests.MANIFEST_NAME} names no {METADATA_NAME}")
    yield metadata


def _copy(folder: Path, entry: FileEntry, target: Path) -> None:
    """Copy a file and sync it.

    Raises:
        EvidenceError: it is not what was written.
    """
    with target.open("xb") as copy:  # buffered: a raw write may take a part only
        for content in manifests.pieces_of(folder, entry):
            copy.write(content)
        copy.flush()
        os.fsync(copy.fileno())


def read_layout(folder: Path, manifest: Manifest) -> Layout:
    """Where everything is in this folder.

    Raises:
        EvidenceError: it was changed.
    """
    try:
        return layouts.decode((folder / LAYOUT_NAME).read_bytes(), manifest.layout)
    except OSError as error:
        raise EvidenceError(f"{LAYOUT_NAME} cannot be read: {error.strerror}") from error


def _write_safetensors(path: Path, folder: Path, manifest: Manifest) -> None:
    """The safetensors format: length of the header, header, tensors one after the other (huggingface/safetensors)."""
    layout = read_layout(folder, manifest)
    found = _tensors_of_model(layout)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, pieces in found.items():
        first = pieces[0][1]
        if first.dtype not in _SAFETENSORS_TYPES:
            raise ConfigError(f"{name} is {first.dtype}, which safetensors cannot hold; export to dcp")
        size = math.prod(first.whole) * _item_bytes(pieces)
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[first.dtype],
            "shape": list(first.whole),
            "data_offsets": [at, at + size],
        }
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for pieces in found.values():
            file.write(_whole(folder, manifest, layout, pieces))
        file.flush()
        os.fsync(file.fileno())


def _tensors_of_model(layout: Layout) -> dict[str, list[tuple[int, Piece]]]:
    """The parts of each parameter and buffer, with their ranks; of replicas the first."""
    found: dict[str, list[tuple[int, Piece]]] = {}
    for rank, ranks in enumerate(layout.ranks):
        for piece in ranks.pieces:
            kind, _, name = piece.key.partition(" ")
            if kind not in {"parameter", "buffer"} or (piece.is_private and rank):
                continue
            there = found.setdefault(name, [])
            if all((piece.offset, piece.shape) != (other.offset, other.shape) for _, other in there):
                there.append((rank, piece))
    return found


def _item_bytes(pieces: list[tuple[int, Piece]]) -> int:
    sizes = (piece.size_bytes // math.prod(piece.shape) for _, piece in pieces if piece.size_bytes)
    return next(sizes, 0)


def _whole(folder: Path, manifest: Manifest, layout: Layout, pieces: list[tuple[int, Piece]]) -> bytes:
    """A tensor put together of its parts, each tested."""
    item = _item_bytes(pieces)
    whole = np.zeros((*pieces[0][1].whole, item), dtype=np.uint8)
    for rank, piece in pieces:
        entry = manifest.tensors_of(rank)
        if entry is None:
            raise EvidenceError(f"{manifests.MANIFEST_NAME} names no tensors of rank {rank}")
        source = Source(
            path=folder / entry.name,
            name=entry.name,
            layout=layout.ranks[rank],
            size_bytes=entry.size_bytes,
            seal=entry.seal,
        )
        memory = np.empty(piece.size_bytes, dtype=np.uint8)
        read_into(source, [Segment(at=piece.at, memory=memory)], lambda: None, test_all=False)
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        whole[place] = memory.reshape(*piece.shape, item)
    return whole.tobytes()
