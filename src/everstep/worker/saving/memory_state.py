"""The state as it is saved: large tensors, found once and copied at each save, and a small, fresh rest.

`Bulk` is this rank's share, in memory and on disk alike. It knows tensors and names, neither files nor slots.
"""

from collections.abc import Collection, Sequence
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
from everstep.worker.saving.replicas import Replicas, replicas_of
from everstep.worker.saving.watched import Watched
from everstep.worker.state import OWN, REST, Sharing, TrainingState

LARGE_ELEMENTS = 4096
"""Tensors of other objects (an averaged model) from this size on are copied into the slot rather than written anew."""
_PLACE = "everstep.tensor"
MOVED = "a parameter, buffer or optimizer state was replaced or has a new place"


class Unfit(Exception):
    """The state cannot be kept in memory slots; the text says why."""


class Bulk:
    """The tensors that keep their size and place from step to step.

    Attributes:
        quiet: the first ones, which change in no other place than the optimizer's step.
        offer: their places in this rank's file.

    Args:
        share, share_count: which part of the replicated state is this rank's.
        replicas: names of those of which each keeps a share of what they all hold (worker/saving/replicas.py).
        whole_optimizer: save an optimizer that does not fit with the rest, all of it anew each time.

    Raises:
        Unfit: the optimizer keeps something else than tensors and numbers.
        ConfigError: a tensor that cannot be saved.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        share: int,
        share_count: int,
        replicas: Collection[str] = (),
        whole_optimizer: bool = False,
    ) -> None:
        self._state = state
        self._in_modules, self._in_optimizer = Watched(), Watched()
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
                self._owners, self._in_optimizer = {}, Watched()
            self._watch_modules()
            self._in_modules.settle()
            self._in_optimizer.settle()
            self._numbered = [name for name, owner in self._owners.items() if _numbers_in(owner)]
            self._named = list(state.model.named_parameters())
            parameters = live_parameters(state.model)
            loads = _loads(parameters, states)
            mine = _shares(list(parameters), loads, share_count)[share]
            if replicas:
                mine -= self._left_to_replicas(loads, replicas)
            fixed = [found for name, found in parameters.items() if name in mine]
            strangers = set(states) - set(parameters) if share == 0 else set()
            fixed += [
                found
                for name, held in states.items()
                for found in held
                if name in mine | strangers or (replicas and not found.is_sharded)  # it may be another on each shard
            ]
            quiet_count = len(fixed)
            fixed += live_buffers(state.model)
            self._values = Values(self._numbers_for_dcp(state.held.groups(), self._numbers())) if share == 0 else None
            if self._values is not None and self._values.places:
                fixed.append(live(VALUES_KEY, self._values.tensor, is_private=True))
            self._large = [(t.shape, t.dtype) for t in split(state.rest())[1]]
            large = [live(rest_key(i), t, is_private=True) for i, t in enumerate(split(state.rest())[1])]
        self.lives: list[Live] = [*fixed, *large]
        tensors = [found.tensor for found in fixed]
        self.quiet, self._loud = tensors[:quiet_count], tensors[quiet_count:]
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
        """Whether a tensor was replaced, added or taken away since, or has another place."""
        return self._in_modules.has_changed() or self.has_moved_inside()

    def has_moved_inside(self) -> bool:
        """The same, except for what is another tensor in a module: FSDP2 puts other ones there for a while."""
        return self._in_optimizer.has_changed() or self._in_optimizer.has_moved() or self._in_modules.has_moved()

    def capture(self) -> tuple[list[Tensor], dict[str, Any]]:
        """What to copy now, in the order of the file's tensors; and the small rest, to be written anew.

        Raises:
            Unfit: something is not as it was when the slot was laid out.
        """
        loud, small = self.capture_loud()
        if self.has_moved_inside():
            raise Unfit(MOVED)
        return [*self.quiet, *loud], small

    def capture_loud(self) -> tuple[list[Tensor], dict[str, Any]]:
        """The same without the quiet tensors, and without looking at each of them; `has_moved_inside` is still to ask.

        Raises:
            Unfit: something is not as it was when the slot was laid out.
        """
        with torch.no_grad():
            if self._in_modules.has_changed():
                self._state.reshard()
                if self._in_modules.has_changed():
                    raise Unfit(MOVED)
            skeleton, large = split(self._state.rest())
            if [(t.shape, t.dtype) for t in large] != self._large:
                raise Unfit("a tensor in scheduler or extra has another size than before")
            groups, numbers = self._state.held.groups(), self._numbers()
            small = {
                "groups": groups,
                "numbers": numbers,
                REST: skeleton,
                OWN: {"gradients": self._state.gradients(self._named)},
            }
            if self._whole_optimizer:
                small["optimizer"] = self._state.held.whole()
            if self._values is not None:
                try:
                    self._values.write(self._numbers_for_dcp(groups, numbers))
                except TooLarge as problem:
                    raise Unfit(str(problem)) from problem
        return [*self._loud, *large], small

    def _left_to_replicas(self, loads: dict[str, int], agreed: Collection[str]) -> set[str]:
        """The parameters that other replicas of the same part keep."""
        groups: dict[Replicas, list[str]] = {}
        for name, parameter in self._named:
            found = replicas_of(parameter, self._state.optimizer.state.get(parameter, {}).values())
            if found is not None and found.name in agreed:
                groups.setdefault(found, []).append(name)
        left: set[str] = set()
        for found, names in groups.items():
            left |= set(names) - _shares(names, loads, found.count)[found.number]
        return left

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
            self._in_optimizer.add_dict(owner)
            found[name] = [
                live(state_key(name, key), value, [state_path(name, key)])
                for key, value in owner.items()
                if self._is_tensor(owner, key, value)
            ]
        self._in_optimizer.add_whole(optimizer.state)
        self._in_optimizer.add(vars(optimizer), "state")
        return found

    def _is_tensor(self, owner: Any, key: Any, value: object) -> bool:
        """Whether it is one, and then watch it."""
        if isinstance(value, Tensor):
            self._in_optimizer.add(owner, key)
            return True
        if not isinstance(value, int | float | bool | type(None)) or not isinstance(key, str):
            raise Unfit(f"the optimizer's {key!r} is a {type(value).__name__}")
        return False

    def _numbers(self) -> dict[str, dict[str, Any]]:
        """States of the optimizer that are no tensors."""
        return {name: _numbers_in(self._owners[name]) for name in self._numbered}

    def _numbers_for_dcp(self, groups: Sequence[dict[str, Any]], numbers: dict[str, dict[str, Any]]) -> dict[Path, Any]:
        """The optimizer's numbers as PyTorch's `get_state_dict` names them."""
        if self._whole_optimizer:
            return {}
        found: dict[Path, Any] = {}
        for number, group in enumerate(groups):
            for key, value in group.items():
                found["optimizer", "param_groups", number, key] = self._names_in(number) if key == "params" else value
        for name, held in numbers.items():
            for key, value in held.items():
                found[state_path(name, key)] = value
        return found

    def _names_in(self, number: int) -> list[str]:
        """The names of a group's parameters. They are looked up again where the group has another number of them."""
        parameters = self._state.optimizer.param_groups[number]["params"]
        if len(self._group_names.get(number, ())) != len(parameters):
            names = self._state.held.names()
            self._group_names[number] = [clean(names[id(parameter)]) for parameter in parameters]
        return self._group_names[number]

    def _watch_modules(self) -> None:
        for module in self._state.model.modules():
            for owner in (module._parameters, module._buffers):
                self._in_modules.add_dict(owner)
                for key, value in owner.items():
                    if value is not None:
                        self._in_modules.add(owner, key)


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


def _numbers_in(owner: Any) -> dict[str, Any]:
    return {key: value for key, value in owner.items() if not isinstance(value, Tensor)}


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
