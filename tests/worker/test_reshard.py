"""What some ranks saved, other numbers of ranks go on with, sharded in other ways: every tensor bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from everstep.adapters.checkpoints.memory_slots import RankSlots, image_path
from everstep.worker.format import layout as layouts
from everstep.worker.format import manifest as manifests
from everstep.worker.format.export import export
from everstep.worker.format.trailer import unpack

CHAINS = {
    "ddp with 4, 2, 8": [("ddp", 4), ("ddp", 2), ("ddp", 8)],
    "fsdp2 with 4, 2, 4": [("fsdp", 4), ("fsdp", 2), ("fsdp", 4)],
    "hsdp 2x2, fsdp2 with 3, hsdp": [("hsdp", 4), ("fsdp", 3), ("hsdp", 4)],
    "tensor parallel 2x2, fsdp2, tensor parallel, with fsdp2, alone": [
        ("tp", 4),
        ("fsdp", 2),
        ("fsdp and tp", 4),
        ("alone", 1),
    ],
    "alone, fsdp2, ddp": [("alone", 1), ("fsdp", 2), ("ddp", 2)],
}


def whole(lab: Any, name: str, world: int) -> dict[str, torch.Tensor]:
    """All tensors put together from what each rank holds; replicas must be the same."""
    found: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank in range(world):
        content = torch.load(lab.folder / f"{name}.{rank}")
        assert content["lr"] == 0.25
        for key, tensor, shape, offset in content["held"]:
            if key == "everstep.values":
                continue
            if key not in found:
                found[key], seen[key] = torch.zeros(shape, dtype=tensor.dtype), torch.zeros(shape, dtype=torch.bool)
            place = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            if seen[key][place].any() and not key.startswith("buffer"):  # each rank's own in a DDP of these ranks
                assert torch.equal(found[key][place], tensor), key
            if not seen[key][place].any():
                found[key][place], seen[key][place] = tensor, True
    assert all(mask.all() for mask in seen.values())
    return found


FROM = [*((chain, "disk") for chain in CHAINS), *((chain, "memory") for chain in list(CHAINS)[:3])]


@pytest.mark.parametrize(("chain", "source"), FROM)
def test_another_number_of_ranks_goes_on_with_every_tensor_as_it_was(
    chain: str, source: str, lab: Any, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    spec: dict[str, Any] = {"module": "reshard", "memory": str(memory) if source == "memory" else ""}
    expected: dict[str, torch.Tensor] = {}
    for number, (kind, world) in enumerate(CHAINS[chain]):
        name = f"{number} {kind}"
        pids = lab.start(name, **spec, kind=kind, world=world, seed=number, lr=0.5 if number else 0.25)
        assert pids
        assert lab.wait() == [0] * world, lab.errors(name)
        found = whole(lab, name, world)
        assert len(found) >= 21
        expected = expected or found
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, expected[key]), f"{key} in {name}"


def start(lab: Any, kind: str, memory: Path | None, **more: Any) -> None:
    spec = {"module": "reshard", "memory": str(memory or ""), "seed": 1, "lr": 0.25, "kind": kind, "world": 4, **more}
    assert lab.start(kind, **spec)
    assert lab.wait() == [0] * 4, lab.errors(kind)


def kept(lab: Any, memory: Path | None) -> list[dict[str, int]]:
    """Bytes of what each rank keeps of the weights, by key, in memory or on disk."""
    if memory is None:
        folder = next(lab.directory.glob("step-*"))
        layout = layouts.decode((folder / "layout.json").read_bytes(), manifests.read(folder).layout)
    else:
        header = RankSlots(memory, 0).read(slot := RankSlots(memory, 0).find(1) or 0)
        layout = unpack(image_path(memory, 0, slot), header.layout)[0]
    return [{p.key: p.size_bytes for p in rank.pieces if p.is_sharded} for rank in layout.ranks]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_what_replicas_of_shards_hold_is_kept_once_and_half_by_each(where: str, lab: Any, tmp_path: Path) -> None:
    memory = tmp_path / "memory" if where == "memory" else None
    (tmp_path / "memory").mkdir()
    start(lab, "hsdp", memory)
    found = whole(lab, "hsdp", 4)
    ranks = kept(lab, memory)
    for first, second in ((0, 2), (1, 3)):  # the replicas of a shard
        assert not ranks[first].keys() & ranks[second].keys()
        sizes = [sum(ranks[rank].values()) for rank in (first, second)]
        assert max(sizes) < 0.7 * sum(sizes)
    size_bytes = sum(t.nbytes for key, t in found.items() if key in {k for rank in ranks for k in rank})
    assert sum(sum(rank.values()) for rank in ranks) == size_bytes
    if memory is None:
        folder, out = next(lab.directory.glob("step-*")), tmp_path / "exported"
        assert_dcp_loads(folder, found)
        export(folder, "dcp", out)
        assert_dcp_loads(out, found)


def assert_dcp_loads(folder: Path, found: dict[str, torch.Tensor]) -> None:
    """`dcp.load` by one process without everstep finds every tensor bit for bit."""
    names = {key: key.split(" ") for key in found if key.startswith(("parameter", "state"))}
    paths = {k: f"model.{n[1]}" if n[0] == "parameter" else f"optimizer.state.{n[1]}.{n[2]}" for k, n in names.items()}
    loaded = {path: torch.zeros_like(found[key]) for key, path in paths.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[path], found[key]) for key, path in paths.items())


def test_replicas_that_are_not_the_same_are_kept_whole_and_come_back_as_they_were(lab: Any) -> None:
    start(lab, "hsdp", None, spoilt_from=2)
    before = [torch.load(lab.folder / f"hsdp.{rank}")["held"] for rank in range(4)]
    ranks = kept(lab, None)
    assert ranks[0].keys() == ranks[2].keys()
    start(lab, "hsdp", None, seed=5)
    for rank in range(4):
        for (key, tensor, *_), (_, then, *_) in zip(
            torch.load(lab.folder / f"hsdp.{rank}")["held"], before[rank], strict=True
        ):
            assert key == "everstep.values" or torch.equal(tensor, then), key
    assert not torch.equal(before[0][0][1], before[2][0][1])
