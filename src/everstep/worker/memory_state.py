"""The state as the memory tier keeps it: large tensors, found once and copied at each save, and a small, fresh rest.

`Bulk` is this rank's share; `assemble` makes of all shares the parts that `TrainingState.put_back` takes. It knows
tensors and names, neither files nor slots.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from everstep.domain.errors import ConfigError
from everstep.worker.state import (
    BUFFERS,
    OWN,
    REST,
    WEIGHTS,
    Parts,
    Sharing,
    TrainingState,
    compact,
    local,
    names_of_states,
    places_of,
    plain,
)

LARGE_ELEMENTS = 4096
"""Tensors of other objects (an averaged model) from this size on are copied into the slot rather than written anew."""
_PLACE = "everstep.tensor"


class Unfit(Exception):
    """The state cannot be kept in memory slots; the text says why."""


class Bulk:
    """The tensors that keep their size and place from step to step.

    Attributes:
        parts: what a slot's file holds, with the live tensors.

    Args:
        share, share_count: which part of the replicated state is this rank's.

    Raises:
        Unfit: the optimizer keeps something else than tensors and numbers.
    """

    def __init__(self, state: TrainingState, *, share: int, share_count: int) -> None:
        self._state = state
        self._watched: list[tuple[Any, Any, Tensor, int]] = []  # owner, key, tensor, its address
        self._sizes: list[tuple[Any, int]] = []
        with torch.no_grad():
            state.reshard()
            optimizer = self._optimizer_part()
            names = [name for name, _ in state.model.named_parameters()]
            mine = _shares(names, self._loads(optimizer), share_count)[share]
            self._watch_modules()
            self.parts: dict[str, Any] = {
                WEIGHTS: {
                    "parameters": {name: _live(p) for name, p in state.model.named_parameters() if name in mine},
                    "names": names,
                    "places": places_of(state.model),
                    "optimizer": _only(optimizer, self._indices(mine, share)),
                },
                BUFFERS: {name: _live(buffer) for name, buffer in state.model.named_buffers()},
                REST: list(split(state.rest())[1]),
            }
        self._fixed = [*tensors_in(self.parts[WEIGHTS]), *tensors_in(self.parts[BUFFERS])]

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in tensors_in(self.parts))

    def to_save(self) -> dict[str, Any]:
        """`parts` with nothing larger than what is meant: a view is cut out of what it is a view of."""
        found: dict[str, Any] = mapped(self.parts, compact)
        return found

    def layout(self) -> str:
        """A digest of names, shapes and types."""
        described = mapped(self.parts, lambda t: [_PLACE, list(t.shape), str(t.dtype)])
        content = msgspec.json.encode([described, str(torch.__version__)])
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def has_moved(self) -> bool:
        """Whether a tensor was replaced, added or taken away since."""
        return any(len(owner) != size for owner, size in self._sizes) or any(
            owner.get(key) is not tensor or _address(tensor) != address for owner, key, tensor, address in self._watched
        )

    def capture(self) -> tuple[list[Tensor], dict[str, Any]]:
        """What to copy now, in the order of the file's tensors; and the small rest, to be written anew.

        Raises:
            Unfit: something is not as it was when the slot was laid out.
        """
        with torch.no_grad():
            self._state.reshard()
            if self.has_moved():
                raise Unfit("a parameter, buffer or optimizer state was replaced or has a new place")
            skeleton, large = split(self._state.rest())
            if [(t.shape, t.dtype) for t in large] != [(t.shape, t.dtype) for t in self.parts[REST]]:
                raise Unfit("a tensor in scheduler or extra has another size than before")
            small = {
                "groups": [
                    plain({k: v for k, v in group.items() if k != "params"}, "optimizer")
                    for group in self._state.optimizer.param_groups
                ],
                "numbers": self._numbers(),
                REST: skeleton,
                OWN: {"gradients": self._state.gradients()},
            }
        return [*self._fixed, *large], small

    def _optimizer_part(self) -> dict[str, Any]:
        optimizer = self._state.optimizer
        content = optimizer.state_dict()
        live = list(self._state.parameters_of(content))
        sharded: dict[Any, list[str]] = {}
        state: dict[Any, dict[str, Tensor]] = {}
        for parameter, (index, values) in zip(live, content["state"].items(), strict=True):
            owner = optimizer.state.get(parameter) if parameter is not None else None
            if owner is None:
                raise Unfit("the optimizer keeps a state that belongs to no parameter")
            state[index] = {}
            self._sizes.append((owner, len(owner)))
            for key, value in values.items():
                if isinstance(value, Tensor):
                    if owner.get(key) is not value:
                        raise Unfit("the optimizer gives out copies of its state")
                    state[index][key] = _live(value)
                    self._watched.append((owner, key, value, _address(value)))
                    if local(value) is not value:
                        sharded.setdefault(index, []).append(key)
                elif not isinstance(value, int | float | bool | type(None)):
                    raise Unfit(f"the optimizer's {key!r} is a {type(value).__name__}")
        self._sizes.append((optimizer.state, len(optimizer.state)))
        groups = plain(content["param_groups"], "optimizer")
        return {
            "content": {"state": state, "param_groups": groups},
            "sharded": sharded,
            "names": names_of_states(self._state, content),
            "order": list(state),
            "keys": {index: list(values) for index, values in content["state"].items()},
        }

    def _numbers(self) -> dict[Any, dict[str, Any]]:
        """States of the optimizer that are no tensors."""
        found: dict[Any, dict[str, Any]] = {}
        for (index, keys), owner in zip(self._keys.items(), self._owners, strict=True):
            numbers = {key: owner[key] for key in keys if not isinstance(owner[key], Tensor)}
            if numbers:
                found[index] = numbers
        return found

    def _loads(self, optimizer: dict[str, Any]) -> dict[str, int]:
        """Bytes of each parameter with its optimizer state, by name."""
        self._keys = optimizer["keys"]
        self._owners = [owner for owner, _ in self._sizes[:-1]]
        by_parameter = {
            id(parameter): index
            for parameter, index in zip(
                self._state.parameters_of(optimizer["content"]), optimizer["order"], strict=True
            )
        }
        self._index_of = {
            name: by_parameter.get(id(parameter)) for name, parameter in self._state.model.named_parameters()
        }
        loads = {}
        for name, parameter in self._state.model.named_parameters():
            states = optimizer["content"]["state"].get(self._index_of[name], {})
            loads[name] = sum(t.numel() * t.element_size() for t in [_live(parameter), *states.values()])
        return loads

    def _indices(self, mine: set[str], share: int) -> set[Any]:
        """The optimizer's states of this share; what belongs to no parameter of the model is the first share's."""
        own = {self._index_of[name] for name in mine}
        strangers = set(self._keys) - set(self._index_of.values()) if share == 0 else set()
        return own | strangers

    def _watch_modules(self) -> None:
        for module in self._state.model.modules():
            for owner in (module._parameters, module._buffers):
                self._sizes.append((owner, len(owner)))
                for key, value in owner.items():
                    if value is not None:
                        self._watched.append((owner, key, value, _address(value)))


def shares_of(sharing: Sharing, rank: int, world_size: int) -> tuple[int, int]:
    """Which share of the weights a rank keeps: its part of what all have, else all of its own."""
    return (rank, world_size) if sharing is Sharing.REPLICATED else (0, 1)


def assemble(images: Sequence[dict[str, Any]], own: int, small: dict[str, Any]) -> Parts:
    """The parts to put back, unshared with the images except for parameters, which are copied in anyway.

    See `weights_of` for what stays shared.

    Args:
        images: what the files of all shares hold; one where every rank keeps all of its own.
        own: which of them is this rank's.
    """
    weights = weights_of(images, small)
    content = weights["optimizer"]["content"]
    state = {
        index: {key: _unshared(value) for key, value in values.items()} for index, values in content["state"].items()
    }
    large = [t.clone() for t in images[own][REST]]
    return {
        WEIGHTS: {**weights, "optimizer": {**weights["optimizer"], "content": {**content, "state": state}}},
        BUFFERS: {name: t.clone() for name, t in images[own][BUFFERS].items()},
        REST: fill(small[REST], large),
        OWN: small[OWN],
    }


def weights_of(images: Sequence[dict[str, Any]], small: dict[str, Any]) -> dict[str, Any]:
    """WEIGHTS of all shares together, in the images' own memory."""
    first = images[0][WEIGHTS]
    parameters = {name: t for image in images for name, t in image[WEIGHTS]["parameters"].items()}
    states = {i: s for image in images for i, s in image[WEIGHTS]["optimizer"]["content"]["state"].items()}
    numbers = small["numbers"]
    state = {}
    for index in first["optimizer"]["order"]:
        values = {**states[index], **numbers.get(index, {})}
        state[index] = {key: values[key] for key in first["optimizer"]["keys"][index]}
    groups = [
        {**now, "params": saved["params"]}
        for now, saved in zip(small["groups"], first["optimizer"]["content"]["param_groups"], strict=True)
    ]
    sharded = {i: keys for image in images for i, keys in image[WEIGHTS]["optimizer"]["sharded"].items()}
    return {
        "parameters": {name: parameters[name] for name in first["names"]},
        "optimizer": {"content": {"state": state, "param_groups": groups}, "sharded": sharded},
    }


def split(value: Any) -> tuple[Any, list[Tensor]]:
    """The value with a placeholder for each large tensor, and these tensors."""
    large: list[Tensor] = []

    def cut(tensor: Tensor) -> Any:
        if tensor.numel() < LARGE_ELEMENTS:
            return tensor
        large.append(tensor)
        return {_PLACE: len(large) - 1}

    return mapped(value, cut), large


def fill(skeleton: Any, large: Sequence[Tensor]) -> Any:
    """The value that `split` took apart."""
    match skeleton:
        case dict():
            if skeleton.keys() == {_PLACE}:
                return large[skeleton[_PLACE]]
            items = [(key, fill(item, large)) for key, item in skeleton.items()]
            return type(skeleton)(items) if type(skeleton) is not dict else dict(items)
        case list() | tuple() if not isinstance(skeleton, torch.Size):
            return type(skeleton)(fill(item, large) for item in skeleton)
    return skeleton


def mapped(value: Any, change: Any) -> Any:
    """The value with each tensor changed; dicts and lists are new ones of their kind."""
    match value:
        case Tensor():
            return change(value)
        case dict():
            items = {key: mapped(item, change) for key, item in value.items()}
            return type(value)(items) if type(value) is not dict else items
        case list() | tuple() if not isinstance(value, torch.Size):
            return type(value)(mapped(item, change) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested dicts and lists, in their order."""
    match value:
        case Tensor():
            return [value]
        case dict():
            return [tensor for item in value.values() for tensor in tensors_in(item)]
        case list() | tuple():
            return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _live(value: Tensor) -> Tensor:
    return local(value).detach()


def _address(value: Tensor) -> int:
    """Where a tensor's data lies; for a DTensor, that of its local part."""
    inner: Tensor = getattr(value, "_local_tensor", value)
    return inner.data_ptr()


def _unshared(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _only(optimizer: dict[str, Any], indices: set[Any]) -> dict[str, Any]:
    state = {index: values for index, values in optimizer["content"]["state"].items() if index in indices}
    sharded = {index: keys for index, keys in optimizer["sharded"].items() if index in indices}
    return {**optimizer, "content": {**optimizer["content"], "state": state}, "sharded": sharded}


def _shares(names: Sequence[str], loads: dict[str, int], count: int) -> list[set[str]]:
    """The names in `count` shares of about the same load, alike on every rank: largest first to the lightest share."""
    shares: list[set[str]] = [set() for _ in range(count)]
    weights = [0] * count
    for name in sorted(names, key=lambda name: (-loads[name], name)):
        lightest = weights.index(min(weights))
        shares[lightest].add(name)
        weights[lightest] += loads[name]
    return shares


def checked(parts: Any, path: str) -> dict[str, Any]:
    """What a file held, if it is what a slot holds.

    Raises:
        ConfigError: another version of everstep wrote it.
    """
    if isinstance(parts, dict) and parts.keys() == {WEIGHTS, BUFFERS, REST}:
        return parts
    raise ConfigError(f"{path} was written by another version of everstep; give attach() another directory")
