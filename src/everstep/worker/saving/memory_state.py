"""The state as it is saved: large tensors, found once and copied at each save, and a small, fresh rest.

`Bulk` is this rank's share, in memory and on disk alike. It knows tensors and names, neither files nor slots.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from everstep.worker.format.dcp_values import TooLarge, Values
from everstep.worker.format.frame import arrange
from everstep.worker.format.layout import VALUES_KEY, Offer, Path
from everstep.worker.format.pieces import (
    Live,
    clean,
    live,
    live_buffers,
    live_parameters,
    rest_key,
    state_key,
    state_path,
)
from everstep.worker.state import OWN, REST, Sharing, TrainingState, is_dtensor, plain

LARGE_ELEMENTS = 4096
"""Tensors of other objects (an averaged model) from this size on are copied into the slot rather than written anew."""
_PLACE = "everstep.tensor"


class Unfit(Exception):
    """The state cannot be kept in memory slots; the text says why."""


class Bulk:
    """The tensors that keep their size and place from step to step.

    Attributes:
        quiet_count: how many of the first ones change in no other place than the optimizer's step.
        offer: their places in this rank's file.

    Args:
        share, share_count: which part of the replicated state is this rank's.
        whole_optimizer: save an optimizer that does not fit with the rest, all of it anew each time.

    Raises:
        Unfit: the optimizer keeps something else than tensors and numbers.
        ConfigError: a tensor that cannot be saved.
    """

    def __init__(self, state: TrainingState, *, share: int, share_count: int, whole_optimizer: bool = False) -> None:
        self._state = state
        self._places: list[tuple[Any, Any]] = []  # owner and key of each watched tensor
        self._tensors: list[Tensor] = []
        self._where: list[Callable[[], int]] = []
        self._addresses: list[int] = []
        self._sizes: list[tuple[Any, int]] = []
        self._owners: dict[str, Any] = {}  # the optimizer's states by the names of their parameters
        self._group_names: dict[int, list[str]] = {}
        self._whole_optimizer = False
        with torch.no_grad():
            state.reshard()
            try:
                states = self._watch_optimizer()
            except Unfit:
                if not whole_optimizer:
                    raise
                self._whole_optimizer, states = True, {}
                self._owners, self._sizes = {}, []
                self._places, self._tensors, self._where, self._addresses = [], [], [], []
            self._watch_modules()
            self._named = list(state.model.named_parameters())
            parameters = live_parameters(state.model)
            mine = _shares(list(parameters), _loads(parameters, states), share_count)[share]
            fixed = [found for name, found in parameters.items() if name in mine]
            strangers = set(states) - set(parameters) if share == 0 else set()
            fixed += [found for name, held in states.items() if name in mine | strangers for found in held]
            self.quiet_count = len(fixed)
            fixed += live_buffers(state.model)
            self._values = Values(self._numbers_for_dcp()) if share == 0 else None
            if self._values is not None and self._values.places:
                fixed.append(live(VALUES_KEY, self._values.tensor, is_private=True))
            self._large = [(t.shape, t.dtype) for t in split(state.rest())[1]]
            large = [live(rest_key(i), t, is_private=True) for i, t in enumerate(split(state.rest())[1])]
        self.lives: list[Live] = [*fixed, *large]
        self._fixed = [found.tensor for found in fixed]
        self.offer = Offer(
            rank=arrange(self.lives),
            values=self._values.places if self._values else (),
            parameters=tuple(parameters),
            states={name: tuple(owner) for name, owner in self._owners.items()},
        )

    @property
    def size_bytes(self) -> int:
        """Of the tensors."""
        return sum(found.size_bytes for found in self.lives if found.key != VALUES_KEY)

    def has_moved(self) -> bool:
        """Whether a tensor was replaced, added or taken away since."""
        if any(len(owner) != size for owner, size in self._sizes):
            return True
        now = [owner.get(key) for owner, key in self._places]
        return not all(map(is_, now, self._tensors)) or [where() for where in self._where] != self._addresses

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
            if [(t.shape, t.dtype) for t in large] != self._large:
                raise Unfit("a tensor in scheduler or extra has another size than before")
            small = {
                "groups": self._state.held.groups(),
                "numbers": self._numbers(),
                REST: skeleton,
                OWN: {"gradients": self._state.gradients(self._named)},
            }
            if self._whole_optimizer:
                small["optimizer"] = self._state.held.whole()
            if self._values is not None:
                try:
                    self._values.write(self._numbers_for_dcp())
                except TooLarge as problem:
                    raise Unfit(str(problem)) from problem
        return [*self._fixed, *large], small

    def _watch_optimizer(self) -> dict[str, list[Live]]:
        """The tensors of the optimizer's state, by the names of their parameters."""
        optimizer, found = self._state.optimizer, {}
        if not self._state.held.tells_plainly:
            raise Unfit("the optimizer gives out copies of its state")
        names = self._state.held.names()
        if strangers := [key for key in optimizer.state if id(key) not in names]:
            raise Unfit(f"the optimizer keeps a state that belongs to no parameter, but to {strangers[0]!r:.40}")
        for parameter, owner in optimizer.state.items():
            name = names[id(parameter)]
            self._owners[name] = owner
            self._sizes.append((owner, len(owner)))
            found[name] = [
                live(state_key(name, key), value, [state_path(name, key)])
                for key, value in owner.items()
                if self._is_tensor(owner, key, value)
            ]
        self._sizes.append((optimizer.state, len(optimizer.state)))
        return found

    def _is_tensor(self, owner: Any, key: Any, value: object) -> bool:
        """Whether it is one, and then watch it."""
        if isinstance(value, Tensor):
            self._watch(owner, key, value)
            return True
        if not isinstance(value, int | float | bool | type(None)) or not isinstance(key, str):
            raise Unfit(f"the optimizer's {key!r} is a {type(value).__name__}")
        return False

    def _numbers(self) -> dict[str, dict[str, Any]]:
        """States of the optimizer that are no tensors."""
        found = {}
        for name, owner in self._owners.items():
            if numbers := {key: value for key, value in owner.items() if not isinstance(value, Tensor)}:
                found[name] = numbers
        return found

    def _numbers_for_dcp(self) -> dict[Path, Any]:
        """The optimizer's numbers as PyTorch's `get_state_dict` names them."""
        if self._whole_optimizer:
            return {}
        found: dict[Path, Any] = {}
        for number, group in enumerate(self._state.optimizer.param_groups):
            for key, value in group.items():
                kept = self._names_in(number, value) if key == "params" else plain(value, key)
                found["optimizer", "param_groups", number, key] = kept
        for name, numbers in self._numbers().items():
            for key, value in numbers.items():
                found[state_path(name, key)] = value
        return found

    def _names_in(self, number: int, parameters: list[Tensor]) -> list[str]:
        """The names of a group's parameters. They are looked up again where the group has another number of them."""
        if len(self._group_names.get(number, ())) != len(parameters):
            names = self._state.held.names()
            self._group_names[number] = [clean(names[id(parameter)]) for parameter in parameters]
        return self._group_names[number]

    def _watch(self, owner: Any, key: Any, value: Tensor) -> None:
        where = _place_of(value)
        self._places.append((owner, key))
        self._tensors.append(value)
        self._where.append(where)
        self._addresses.append(where())

    def _watch_modules(self) -> None:
        for module in self._state.model.modules():
            for owner in (module._parameters, module._buffers):
                self._sizes.append((owner, len(owner)))
                for key, value in owner.items():
                    if value is not None:
                        self._watch(owner, key, value)


def shares_of(sharing: Sharing, rank: int, world_size: int) -> tuple[int, int]:
    """Which share of the weights a rank keeps: its part of what all have, else all of its own."""
    return (rank, world_size) if sharing is Sharing.REPLICATED else (0, 1)


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


def _place_of(value: Tensor) -> Callable[[], int]:
    """What says where a tensor's data lies now; for a DTensor, that of its local part."""
    if is_dtensor(value):
        sharded: Any = value
        return lambda: int(sharded._local_tensor.data_ptr())  # the local tensor itself may be another one by then
    return value.data_ptr


def _loads(parameters: dict[str, Live], states: dict[str, list[Live]]) -> dict[str, int]:
    """Bytes of each parameter with its optimizer state, by name."""
    return {
        name: found.size_bytes + sum(held.size_bytes for held in states.get(name, ()))
        for name, found in parameters.items()
    }


def _shares(names: Sequence[str], loads: dict[str, int], count: int) -> list[set[str]]:
    """The names in `count` shares of about the same load, alike on every rank: largest first to the lightest share."""
    shares: list[set[str]] = [set() for _ in range(count)]
    weights = [0] * count
    for name in sorted(names, key=lambda name: (-loads[name], name)):
        lightest = weights.index(min(weights))
        shares[lightest].add(name)
        weights[lightest] += loads[name]
    return shares
