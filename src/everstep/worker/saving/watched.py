"""Tensors that must stay where they are: which dicts hold them, and where their data lies; it copies nothing.

It is asked at every save, for hundreds of tensors, while training stands still: each question is one pass in C.
"""

from collections.abc import Sequence
from operator import attrgetter, getitem, is_
from typing import Any

from torch import Tensor

from everstep.worker.state import is_dtensor

_LOCAL = attrgetter("_local_tensor")
_VERSION = attrgetter("_version")


class Watched:
    """Values in the dicts of their owners, as they were when `add` was called."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._dicts: list[Any] = []
        self._sizes: list[int] = []
        self._wholes: list[tuple[Any, list[Any]]] = []
        self._plain: list[Tensor] = []
        self._sharded: list[Tensor] = []
        self._addresses: list[int] = []

    def add(self, owner: Any, key: Any) -> None:
        """Watch one value. Call `settle` after the last one."""
        value = owner[key]
        self._owners.append(owner)
        self._keys.append(key)
        self._values.append(value)
        if isinstance(value, Tensor):
            (self._sharded if is_dtensor(value) else self._plain).append(value)

    def add_dict(self, owner: Any) -> None:
        """Watch how many entries it has."""
        self._dicts.append(owner)

    def add_whole(self, owner: Any) -> None:
        """Watch all values of a dict at once; their own insides are not looked at."""
        self._wholes.append((owner, list(owner.values())))

    def settle(self) -> None:
        """What is now is what the questions compare with."""
        self._sizes = list(map(len, self._dicts))
        self._addresses = self._places()

    def has_changed(self) -> bool:
        """Whether a value was replaced, added or taken away since."""
        if list(map(len, self._dicts)) != self._sizes:
            return True
        if not all(len(owner) == len(then) and all(map(is_, owner.values(), then)) for owner, then in self._wholes):
            return True
        try:
            now = map(getitem, self._owners, self._keys)
            return not all(map(is_, now, self._values))
        except KeyError:
            return True

    def has_moved(self) -> bool:
        """Whether the data of one of the tensors lies somewhere else."""
        return self._places() != self._addresses

    def _places(self) -> list[int]:
        """Where the data lies; of a DTensor, that of its local part, which may be another tensor by then."""
        return [*map(Tensor.data_ptr, self._plain), *map(Tensor.data_ptr, map(_LOCAL, self._sharded))]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that are others after a tensor was written to, except through `.data`."""
    return list(map(_VERSION, tensors))
