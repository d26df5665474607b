"""The live tensors that a checkpoint keeps, with the names and places that they have in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from everstep.domain.errors import ConfigError
from everstep.worker.format.layout import Path
from everstep.worker.state import is_dtensor, local

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A tensor of this rank. `tensor` is its local part; the rest is as in `layout.Piece`."""

    key: str
    tensor: Tensor
    known_as: tuple[Path, ...] = ()
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    is_sharded: bool = False
    is_private: bool = False

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def live(key: str, value: Tensor, known_as: Sequence[Path] = (), *, is_private: bool = False) -> Live:
    """Describe a tensor or this rank's part of one. Call it under `no_grad`.

    Raises:
        ConfigError: a tensor that is more than numbers in a row.
    """
    tensor = local(value).detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConfigError(
            f"{key} is a {type(tensor).__name__} of layout {tensor.layout}, which a checkpoint cannot hold"
        )
    whole, offset = place_of(value)
    return Live(
        key=key,
        tensor=tensor,
        known_as=tuple(known_as),
        whole=whole,
        offset=offset,
        is_sharded=is_dtensor(value),
        is_private=is_private,
    )


def place_of(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole tensor, and where in it this rank's part begins."""
    if not is_dtensor(value):
        return tuple(value.shape), (0,) * value.dim()
    tensor = cast("Any", value)
    return tuple(tensor.shape), _offset(tensor.shape, tensor.device_mesh, tensor.placements)


@lru_cache(maxsize=1024)
def _offset(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    """Where this rank's part begins. Many tensors have the same place, and finding it takes longer than reading one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def live_parameters(model: nn.Module) -> dict[str, Live]:
    """The parameters by name; a shared one once, known by all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {
        name: live(parameter_key(name), p, [("model", clean(known)) for known in names[id(p)]])
        for name, p in model.named_parameters()
    }


def live_buffers(model: nn.Module) -> list[Live]:
    """The buffers; Distributed Checkpoint knows the persistent ones."""
    found = []
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        persistent = leaf not in model.get_submodule(owner)._non_persistent_buffers_set
        known = [("model", clean(name))] if persistent else []
        found.append(live(buffer_key(name), buffer, known, is_private=True))
    return found


def parameter_key(name: str) -> str:
    return f"parameter {name}"


def buffer_key(name: str) -> str:
    return f"buffer {name}"


def state_key(name: str, key: str) -> str:
    """A state of the optimizer, by the name of its parameter."""
    return f"state {name} {key}"


def rest_key(number: int) -> str:
    """A large tensor of the scheduler or an extra object."""
    return f"rest {number}"


def state_path(name: str, key: str) -> Path:
    """Where Distributed Checkpoint looks for a state of the optimizer."""
    return ("optimizer", "state", clean(name), str(key))


def clean(name: str) -> str:
    """A parameter's name without the wrappers that PyTorch's state dicts leave out."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
