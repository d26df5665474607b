"""Turns a checkpoint into what other programs read: PyTorch's Distributed Checkpoint, or one safetensors file.

It reads files alone: no process group, no model, and not as many ranks as wrote them.
"""

import io
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from everstep.domain.errors import ConfigError, EvidenceError
from everstep.worker import checkpoint_manifest as manifests
from everstep.worker.checkpoint_manifest import Manifest
from everstep.worker.durable import sync_folder
from everstep.worker.state import BUFFERS, WEIGHTS

_SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(folder: Path, to: str, target: Path) -> None:
    """Write a checkpoint in another form.

    Args:
        to: `dcp` (model and optimizer as `get_state_dict` names them) or `safetensors` (parameters and buffers).

    Raises:
        EvidenceError: the checkpoint is damaged.
        ConfigError: the target exists, or the checkpoint lacks what is needed.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; give another --out")
    model, optimizer = read_whole(folder)
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if to == "dcp":
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(fresh, sync_files=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
            save({"model": model, "optimizer": optimizer}, storage_writer=writer, no_dist=True)
        sync_folder(fresh)
    else:
        _write_safetensors(fresh, model)
    fresh.rename(target)
    sync_folder(target.parent)


def read_whole(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and buffers by name, and the optimizer's state by the names of parameters, all of them whole.

    Raises:
        EvidenceError: damaged.
        ConfigError: written before checkpoints named the optimizer's states.
    """
    manifest = manifests.read(folder)
    by_rank = [_read(folder, manifest, rank) for rank in range(manifest.world_size)]
    holders = [parts for parts in by_rank if WEIGHTS in parts]
    first = holders[0][WEIGHTS]
    if "names" not in first["optimizer"]:
        raise ConfigError(f"{folder} was written by an older everstep; save again with this one, then export")
    model: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for parts in holders:
        weights = parts[WEIGHTS]
        places, names = weights["places"], weights["optimizer"]["names"]
        for name, tensor in weights["parameters"].items():
            _put(model, name, tensor, places.get(name))
        for index, values in weights["optimizer"]["content"]["state"].items():
            state = states.setdefault(names.get(index, str(index)), {})
            for key, value in values.items():
                sharded = key in weights["optimizer"]["sharded"].get(index, ())
                _put(state, key, value, places.get(names.get(index, "")) if sharded else None)
    names = first["optimizer"]["names"]
    groups = [
        {**group, "params": [names.get(index, str(index)) for index in group["params"]]}
        for group in by_rank[0].get("groups") or first["optimizer"]["content"]["param_groups"]
    ]
    ordered = {name: states.pop(name) for name in names.values() if name in states}
    model = {name: model.pop(name) for name in first.get("names", ())} | model
    return {**model, **by_rank[0][BUFFERS]}, {"state": ordered | states, "param_groups": groups}


def _read(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """One rank's parts; of its rest only the optimizer's groups, which are newer than those beside the tensors."""
    parts: dict[str, Any] = {}
    for entry in manifest.files:
        if entry.rank != rank:
            continue
        content = io.BytesIO(manifests.read_verified(folder, entry))
        found = torch.load(content, map_location="cpu", weights_only=True)
        if "groups" in found:
            saved = parts[WEIGHTS]["optimizer"]["content"]["param_groups"]
            parts["groups"] = [{**g, "params": s["params"]} for g, s in zip(found["groups"], saved, strict=True)]
            continue
        parts |= found
    if manifest.layout and WEIGHTS not in parts:
        raise EvidenceError(f"{folder.name} has no tensors of rank {rank}")
    return parts


def _put(into: dict[str, Any], name: str, value: Any, place: tuple[list[int], list[int]] | None) -> None:
    """Put a part of a tensor into the whole one, or anything else as it is."""
    if place is None or not isinstance(value, Tensor):
        into.setdefault(name, value)
        return
    shape, offset = place
    whole = into.setdefault(name, torch.zeros(shape, dtype=value.dtype))
    whole[tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))] = value


def _write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """The safetensors format: length of the header, header, tensors one after the other (huggingface/safetensors)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _SAFETENSORS_TYPES:
            raise ConfigError(f"{name} is {tensor.dtype}, which safetensors cannot hold; export to dcp")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
