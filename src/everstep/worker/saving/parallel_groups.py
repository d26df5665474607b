"""Which ranks are lost together, as the state of a job tells, so that no copy lies with those that it is a copy of.

A parallel group that loses a member is useless, and may be sent away as a whole. It is known once the ranks have
built their model: then they choose anew who keeps whose copies, all alike and before there are any.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from everstep.adapters.checkpoints.peer_files import PeerRoster, write_roster
from everstep.policy.peers import choose_keepers
from everstep.worker.state import TrainingState, is_dtensor

Group = tuple[int, ...]


def groups_led_by(rank: int, state: TrainingState) -> tuple[Group, ...]:
    """The groups along which parameters are sharded, of which this rank is the first."""
    meshes: dict[int, tuple[Any, set[int]]] = {}
    for _, parameter in state.model.named_parameters():
        if is_dtensor(parameter):
            sharded = cast("Any", parameter)
            _, dimensions = meshes.setdefault(id(sharded.device_mesh), (sharded.device_mesh, set()))
            dimensions.update(n for n, placement in enumerate(sharded.placements) if not placement.is_replicate())
    found = {group for mesh, dimensions in meshes.values() for group in _groups(mesh, dimensions)}
    return tuple(sorted(group for group in found if group[0] == rank))


def arranged(roster: PeerRoster, groups: Iterable[Group]) -> PeerRoster:
    """The roster with keepers that heed these groups."""
    keepers = choose_keepers(roster.ranks, roster.racks, groups=sorted(set(groups)), before=roster.keepers)
    return replace(roster, keepers=keepers)


def arrange_keepers(folder: Path, roster: PeerRoster, groups: Iterable[Group]) -> None:
    """Write the roster of a host anew where these groups ask for other keepers. For one rank of the host.

    Raises:
        OSError: the folder is gone or full.
    """
    if (better := arranged(roster, groups)) != roster:
        write_roster(folder, better)


def _groups(mesh: Any, dimensions: set[int]) -> Iterator[Group]:
    """Of each dimension, and of all together: the ranks that hold one whole parameter."""
    ranks = mesh.mesh
    for chosen in {*((dimension,) for dimension in dimensions), tuple(sorted(dimensions))}:
        if not chosen:
            continue
        rest = [number for number in range(ranks.ndim) if number not in chosen]
        size = 1
        for dimension in chosen:
            size *= ranks.shape[dimension]
        for row in ranks.permute(*rest, *chosen).reshape(-1, size).tolist():
            yield tuple(sorted(row))
