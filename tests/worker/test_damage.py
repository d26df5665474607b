"""Random damage to any file of any tier is found, never loaded, and the best of what is left is used."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.adapters.memory_slots import RankSlots, image_path
from everstep.worker.checkpoint_restore import Restoring
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.saver import Saver
from everstep.worker.state import OWN, WEIGHTS

KILLED = -9
ROUNDS = 60


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def lose(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (flip, flip, flip, truncate, lose)


def restored(memory: Path, directory: Path) -> tuple[int, str] | None:
    """Step and content of what a new attempt would begin with."""
    found = Restoring(directory, memory, Ranks(), Observer(None), 2).run()
    if found is None:
        return None
    weights = found.parts[WEIGHTS]
    tensors = [
        *weights["parameters"].values(),
        *(t for s in weights["optimizer"]["content"]["state"].values() for t in s.values()),
    ]
    content = [t.tolist() for t in tensors if isinstance(t, torch.Tensor)]
    return found.manifest.step, json.dumps([content, found.parts[OWN]["random"]["torch"].tolist()])


def test_no_damage_to_any_tier_is_ever_loaded(lab: Any, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    spec = {"kind": "alone", "world": 1, "attach": {"save_every_steps": 2}}
    for die_at in (6, 8):
        lab.train(f"to {die_at}", **spec, until=12, memory=str(memory), die_at=die_at, code=KILLED)
        Saver(memory).turn()
    for copy, source in (("memory", memory), ("disk", lab.directory)):
        shutil.copytree(source, tmp_path / "kept" / copy)
    truth: dict[int, str] = {}
    while (found := restored(memory, lab.directory)) is not None:
        step, truth[step] = found
        if (slot := RankSlots(memory, 0).find(step)) is not None:
            image_path(memory, 0, slot).unlink()
        shutil.rmtree(lab.directory / f"step-{step:08d}", ignore_errors=True)
        assert step == min(truth)  # ever older ones
    assert len(truth) >= 3
    chance, others = random.Random(11), 0
    for number in range(ROUNDS):
        folder = tmp_path / f"round-{number}"
        shutil.copytree(tmp_path / "kept", folder)
        files = [p for p in folder.rglob("*") if p.is_file() and p.suffix in {".pt", ".headers", ".json"}]
        files = [p for p in files if p.name != "job.json"]
        for _ in range(chance.randint(1, 4)):
            path = chance.choice([p for p in files if p.exists() and p.stat().st_size])
            chance.choice(DAMAGES)(path, chance)
        found = restored(folder / "memory", folder / "disk")
        if found is not None:
            assert truth[found[0]] == found[1], number
            others += found[0] != max(truth)
        shutil.rmtree(folder)
    assert others > 10
