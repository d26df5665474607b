"""Which ranks hold the same part of a DTensor, so that each of them needs to keep a share of it only.

That follows from placements and places in the mesh, and is believed only where the bytes are the same: nothing makes
the replicas of `fully_shard` begin alike.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from everstep.worker.format import layout as layouts
from everstep.worker.format.frame import arrange
from everstep.worker.format.pieces import Live, live
from everstep.worker.format.rank_file import seal_of_tensors
from everstep.worker.ranks import Ranks
from everstep.worker.state import Sharing, TrainingState, is_dtensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that hold one part.

    Attributes:
        name: 32 hexadecimal digits, the same on these ranks and on no other.
        number, count: which of how many this rank is.
    """

    name: str
    number: int
    count: int


def replicas_of(parameter: Tensor, states: Iterable[Any]) -> Replicas | None:
    """Who else holds this rank's part of a parameter and of its sharded states; None where nobody does for certain."""
    if not is_dtensor(parameter):
        return None
    sharded = cast("Any", parameter)
    place = sharded.device_mesh, tuple(sharded.placements)
    for state in states:
        if is_dtensor(state) and (state.device_mesh, tuple(state.placements)) != place:
            return None
    return _found(*place)


@lru_cache(maxsize=1024)
def _found(mesh: Any, placements: tuple[Any, ...]) -> Replicas | None:
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placements):
        return None
    sizes, whole = tuple(mesh.mesh.shape), [placement.is_replicate() for placement in placements]
    count = prod(size for size, same in zip(sizes, whole, strict=True) if same)
    if count < 2:
        return None
    number = 0
    for size, at, same in zip(sizes, coordinate, whole, strict=True):
        number = number * size + at if same else number
    part = [-1 if same else at for at, same in zip(coordinate, whole, strict=True)]
    text = repr((sizes, mesh.mesh.flatten().tolist(), part))
    return Replicas(name=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), number=number, count=count)


def agree_on_replicas(state: TrainingState, ranks: Ranks) -> frozenset[str]:
    """The names of the replicas that hold the very same bytes, on all of them. A collective where DTensors are."""
    if state.sharing is not Sharing.SHARDED or ranks.world_size == 1:
        return frozenset()
    with torch.no_grad():
        state.reshard()
        groups = _parts(state)
        mine = {name: (replicas.count, _digest(lives)) for name, (replicas, lives) in groups.items()}
    found: dict[str, list[tuple[int, str]]] = {}
    for word in ranks.gather(msgspec.json.encode(mine)):
        for name, told in msgspec.json.decode(word, type=dict[str, tuple[int, str]]).items():
            found.setdefault(name, []).append(told)
    return frozenset(name for name, told in found.items() if len(told) == told[0][0] and len(set(told)) == 1)


def _parts(state: TrainingState) -> dict[str, tuple[Replicas, list[Live]]]:
    groups: dict[str, tuple[Replicas, list[Live]]] = {}
    for name, parameter in state.model.named_parameters():
        held = state.optimizer.state.get(parameter, {})
        if (replicas := replicas_of(parameter, held.values())) is not None:
            lives = groups.setdefault(replicas.name, (replicas, []))[1]
            lives.append(live(name, parameter))
            lives += [live(f"{name} {key}", value) for key, value in held.items() if is_dtensor(value)]
    return groups


def _digest(lives: list[Live]) -> str:
    layout = arrange(lives)
    return f"{layouts.digest_of(msgspec.json.encode(layout))}{seal_of_tensors(layout, [one.tensor for one in lives]):x}"
