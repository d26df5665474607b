"""Random damage to any file of any tier is found, never loaded, and the best of what is left is used."""

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.adapters.checkpoints.memory_slots import HEADER_BYTES, SLOT_COUNT, RankSlots, image_path, rest_path
from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.errors import WorldError
from everstep.policy.checkpoints import SlotState
from everstep.worker.format.manifest import complete_steps
from everstep.worker.mirror.store_copies import Mirror
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.restoring.restore import Restoring
from everstep.worker.saving.saver import Saver
from everstep.worker.state import TrainingState

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
import train

KILLED = -9
DAMAGE_COUNT = 200


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


def restored(folder: Path) -> tuple[int, str] | None:
    """Step and content of what a new attempt would begin with; None also where it is spoilt and would not begin."""
    model = train.Net(24)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    extra = {"average": train.Average(model)}
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
    paths = WorkerPaths(run="damage", attempt=2, rank=0, mirror=f"file://{folder / 'mirror'}")
    try:
        found = Restoring(state, folder / "disk", folder / "memory", Ranks(), Observer(paths), 2).run()
    except WorldError:
        return None
    if found is None:
        return None
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    content = [t.tolist() for t in [*tensors, *extra["average"].values]]
    return found.manifest.step, json.dumps([content, found.own["random"]["torch"].tolist()])


def holdings(folder: Path) -> dict[tuple[str, int], list[bytes]]:
    """What each tier holds of each step: the content of all files that belong to it."""
    found: dict[tuple[str, int], list[bytes]] = {}
    for tier in ("disk", "mirror"):
        for path in (folder / tier).glob("step-*"):
            files = sorted(path.iterdir())
            found[tier, int(path.name[5:])] = [file.name.encode() + file.read_bytes() for file in files]
    memory, headers = folder / "memory", folder / "memory" / "rank-00000.headers"
    if headers.exists() and headers.stat().st_size == SLOT_COUNT * HEADER_BYTES:
        slots = RankSlots(memory, 0)
        for number in range(SLOT_COUNT):
            header = slots.read(number)
            files = [image_path(memory, 0, number), rest_path(memory, 0, number)]
            if header.state is SlotState.COMPLETE and all(file.exists() for file in files):
                found["memory", header.step] = [repr(header).encode(), *(file.read_bytes() for file in files)]
    return found


@pytest.fixture
def kept(lab: Any, tmp_path: Path) -> Path:
    """Steps in three tiers: memory has the newest, disk two, the mirror one that the disk lacks and one older."""
    folder = tmp_path / "kept"
    memory = folder / "memory"
    memory.mkdir(parents=True)
    spec = {"kind": "alone", "world": 1, "attach": {"save_every_steps": 2}}
    mirror = Mirror(ObjectStore(f"file://{folder / 'mirror'}"))
    for die_at in (6, 8, 10):
        lab.train(f"to {die_at}", **spec, until=12, memory=str(memory), die_at=die_at, code=KILLED)
        Saver(memory).turn()
        newest = complete_steps(lab.directory)[0]
        if die_at < 10:
            mirror.upload(lab.directory, newest)
    shutil.copytree(lab.directory, folder / "disk")
    shutil.rmtree(folder / "disk" / f"step-{sorted(complete_steps(lab.directory))[0]:08d}")
    return folder


def test_no_damage_to_any_tier_is_ever_loaded_and_the_best_of_what_is_left_is(kept: Path, tmp_path: Path) -> None:
    whole, truth = holdings(kept), {}
    for tier, step in whole:  # each alone
        alone = tmp_path / f"{tier}-{step}"
        shutil.copytree(kept, alone)
        for other, number in whole:
            if (other, number) != (tier, step):
                if other == "memory" and (slot := RankSlots(alone / "memory", 0).find(number)) is not None:
                    image_path(alone / "memory", 0, slot).unlink()
                elif other != "memory":
                    shutil.rmtree(alone / other / f"step-{number:08d}")
        found = restored(alone)
        assert found is not None
        assert found[0] == step, tier
        assert truth.setdefault(step, found[1]) == found[1]  # the same bits, whatever tier they come from
        shutil.rmtree(alone)
    assert {tier for tier, _ in whole} == {"memory", "disk", "mirror"}
    assert len(truth) >= 4
    chance, count, used = random.Random(11), 0, Counter[int]()
    while count < DAMAGE_COUNT:
        folder = tmp_path / "round"
        shutil.copytree(kept, folder)
        kinds = {".pt", ".distcp", ".headers", ".json", ""}
        files = [p for p in folder.rglob("*") if p.is_file() and p.suffix in kinds]
        files = [p for p in files if p.name not in {"job.json", "plan", "saver"} and "stop-" not in p.name]
        for _ in range(chance.randint(1, 8)):
            path = chance.choice([p for p in files if p.exists() and p.stat().st_size])
            chance.choice(DAMAGES)(path, chance)
            count += 1
        sound = [step for (tier, step), content in holdings(folder).items() if content == whole.get((tier, step))]
        found = restored(folder)
        assert (found[0] if found else 0) >= max(sound, default=0), count
        if found is not None:
            assert truth[found[0]] == found[1], count
        used[found[0] if found else 0] += 1
        shutil.rmtree(folder)
    assert len(used) >= 4, used
