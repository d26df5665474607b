"""What some ranks saved, other numbers of ranks go on with, sharded in other ways: every tensor bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


FROM = [*((chain, "disk") for chain in CHAINS), *((chain, "memory") for chain in list(CHAINS)[:2])]


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
