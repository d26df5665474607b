"""What memory keeps of killed ranks resumes bit for bit, is never loaded damaged, and becomes durable without them."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.adapters.checkpoints.memory_slots import RankSlots, SavePages, image_path, rest_path
from everstep.policy.checkpoints import SlotState, committed_steps
from everstep.policy.saver_cost import SaverCost
from everstep.worker.format import manifest as manifests
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.saving import memory_tier
from everstep.worker.saving.memory_state import Bulk, Unfit
from everstep.worker.saving.saver import Saver
from everstep.worker.saving.schedule import SaveConfig
from everstep.worker.state import TrainingState

KILLED = -9
DDP3 = {"kind": "ddp", "world": 3}
CASES: dict[str, dict[str, Any]] = {
    "ddp of three, each a third": {**DDP3, "width": 64},
    "ddp of four": {"kind": "ddp", "world": 4},
    "ddp of two": {"kind": "ddp", "world": 2},
    "ddp of three with buffers of their own": {**DDP3, "ddp": {"broadcast_buffers": False}},
    "fsdp2 of two that evaluates": {"kind": "fsdp", "world": 2, "evaluate": True},
    "hsdp of two by two, each half of a shard": {"kind": "hsdp", "world": 4},
    "three ranks that sum gradients themselves": {"kind": "manual", "world": 3},
    "one process with a large averaged model": {"kind": "alone", "world": 1, "width": 128},
    "in the middle of an accumulation": {"kind": "alone", "world": 1, "accumulate": 4},
    "the second of two loops": {**DDP3, "first_loop_until": 4},
}


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def expected_and_resumed(lab: Any, spec: dict[str, Any], memory: Path, **second: Any) -> tuple[Any, Any]:
    """Steps of an untouched run without memory, and of one that was killed in step 8 and resumed from memory."""
    whole = lab.train("whole", **spec, until=12, directory=str(lab.folder / "other"))
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    resumed = lab.train("second", **spec, until=12, memory=str(memory), seed=99, **second)
    at = lab.restored_step("second")
    return [rank[at:] for rank in whole], resumed


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_from_memory_is_bit_identical_with(case: str, lab: Any, memory: Path) -> None:
    expected, resumed = expected_and_resumed(lab, dict(CASES[case]), memory)
    assert len(resumed[0]) >= 5  # resumed from 7 at best: how often a save is worth it is measured
    assert resumed == expected
    restored = [body for kind, body in lab.notes("second") if kind == "CheckpointRestored"]
    assert [body["path"] for body in restored] == ["memory"]
    assert "everstep:" not in lab.errors("first") + lab.errors("second")


def newest(memory: Path, rank: int) -> tuple[int, int]:
    """Step and slot of the newest complete slot."""
    slots = RankSlots(memory, rank).slots()
    return max((slot.step, number) for number, slot in enumerate(slots) if slot.state is SlotState.COMPLETE)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def damage_tensors(memory: Path, rank: int, slot: int) -> None:
    path = image_path(memory, rank, slot)
    flip(path, random.Random(1).randrange(path.stat().st_size))


def damage_rest(memory: Path, rank: int, slot: int) -> None:
    path = rest_path(memory, rank, slot)
    flip(path, path.stat().st_size // 2)


def truncate(memory: Path, rank: int, slot: int) -> None:
    path = image_path(memory, rank, slot)
    os.truncate(path, path.stat().st_size // 2)


def lose(memory: Path, rank: int, slot: int) -> None:
    image_path(memory, rank, slot).unlink()


def damage_header(memory: Path, rank: int, slot: int) -> None:
    flip(memory / f"rank-{rank:05d}.headers", slot * 4096 + 20)


@pytest.mark.parametrize("damage", [damage_tensors, damage_rest, truncate, lose, damage_header])
def test_a_damaged_slot_of_one_rank_makes_all_take_the_step_before(
    damage: Callable[[Path, int, int], None], lab: Any, memory: Path
) -> None:
    spec = {"kind": "ddp", "world": 2}
    whole = lab.train("whole", **spec, until=12, directory=str(lab.folder / "other"))
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    step, slot = newest(memory, 1)
    assert step == 7
    damage(memory, 1, slot)
    resumed = lab.train("second", **spec, until=12, memory=str(memory))
    assert lab.restored_step("second") == 6
    assert resumed == [rank[6:] for rank in whole]
    if damage is not damage_header:  # that one is as if the step had never been complete
        assert len(lab.refusals("second")) == 1
    assert committed_steps([RankSlots(memory, rank).slots() for rank in range(2)])[0] == 11


def persist(memory: Path) -> int:
    saver = Saver(memory)
    saver.flush()
    return SavePages(memory).word().durable


@pytest.mark.parametrize("spec", [{"kind": "ddp", "world": 2}, {"kind": "fsdp", "world": 2}], ids=str)
def test_what_the_saver_made_durable_resumes_without_memory(spec: dict[str, Any], lab: Any, memory: Path) -> None:
    whole = lab.train("whole", **spec, until=12, directory=str(lab.folder / "other"))
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    assert persist(memory) == 7
    assert manifests.complete_steps(lab.directory) == [7]
    assert lab.train("second", **spec, until=12) == [rank[7:] for rank in whole]


def test_a_damaged_shard_in_memory_comes_from_disk_and_the_others_from_memory(lab: Any, memory: Path) -> None:
    spec = {"kind": "ddp", "world": 2}
    whole = lab.train("whole", **spec, until=12, directory=str(lab.folder / "other"))
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    persist(memory)
    damage_tensors(memory, 0, newest(memory, 0)[1])
    assert lab.train("second", **spec, until=12, memory=str(memory)) == [rank[7:] for rank in whole]
    restored = [body for kind, body in lab.notes("second") if kind == "CheckpointRestored"]
    assert restored[0]["path"].startswith("memory and ")


def test_the_saver_never_makes_a_damaged_slot_durable(lab: Any, memory: Path) -> None:
    spec = {"kind": "alone", "world": 1}
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    damage_tensors(memory, 0, newest(memory, 0)[1])
    assert persist(memory) == 6
    assert manifests.complete_steps(lab.directory) == [6]
    assert "changed after it was written" in (memory / "saver.error").read_text()


def test_a_disk_that_fails_keeps_memory_and_says_so(lab: Any, memory: Path) -> None:
    spec = {"kind": "alone", "world": 1}
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    lab.directory.rmdir()
    lab.directory.write_text("in the way")
    assert persist(memory) == 0
    assert "could not be made durable" in (memory / "saver.error").read_text()
    lab.directory.unlink()
    assert persist(memory) == 7


def test_a_fixed_interval_makes_exactly_its_multiples_durable(lab: Any, memory: Path) -> None:
    spec = {"kind": "alone", "world": 1, "attach": {"save_every_steps": 3}}
    lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
    saver = Saver(memory)
    saver.turn()
    assert manifests.complete_steps(lab.directory) == [6]


def test_a_state_that_has_no_room_goes_to_disk_only_and_says_why(lab: Any, memory: Path) -> None:
    (memory / "rank-00000.headers").mkdir()
    spec = {"kind": "ddp", "world": 2, "attach": {"save_every_steps": 3}}
    whole = lab.train("whole", **spec, until=6, directory=str(lab.folder / "other"))
    assert lab.train("first", **spec, until=6, memory=str(memory)) == whole
    assert "keeps no checkpoints in memory: rank 0: cannot use rank-00000.headers" in lab.errors("first")
    assert manifests.complete_steps(lab.directory) == [6, 3]


def test_a_kill_at_any_moment_of_a_save_leaves_a_step_that_all_ranks_have(lab: Any, memory: Path) -> None:
    """Rounds of one long run: each is killed a little later; the next goes on, and steps never go back."""
    spec = {"kind": "ddp", "world": 2, "width": 700}
    chance, best = random.Random(5), 0
    for number in range(4):
        pids = lab.start(f"round {number}", **spec, until=1000, memory=str(memory))
        deadline_s = time.monotonic() + 30
        while not (steps := common(memory)) or steps[0] < best + 3:
            assert time.monotonic() < deadline_s, lab.errors(f"round {number}")
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        for pid in pids:
            os.kill(pid, 9)
        lab.wait()
        assert common(memory)[0] >= best + 3
        best = common(memory)[0]
    resumed = lab.train("last", **spec, until=best + 2, memory=str(memory))
    whole = lab.train("whole", **spec, until=best + 2, directory=str(lab.folder / "other"))
    assert lab.restored_step("last") == best
    assert resumed == [rank[best:] for rank in whole]


def common(memory: Path) -> list[int]:
    if not all((memory / f"rank-0000{rank}.headers").exists() for rank in range(2)):
        return []
    return committed_steps([RankSlots(memory, rank).slots() for rank in range(2)])


def small_state() -> TrainingState:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return TrainingState(model=model, optimizer=optimizer, scheduler=None, extra={})


def test_slots_that_would_take_more_than_half_of_the_free_memory_are_not_made(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_tier, "room_bytes", lambda _: 900.0)
    tier = memory_tier.MemoryTier(memory, Ranks(), Observer(None), SaveConfig())
    tier.open(small_state(), memory, 2)
    assert [tier.is_on(2), tier.is_wanted] == [False, False]
    assert "of 0.0 GB of free memory they may take half; they go to disk only" in caplog.text
    assert list(memory.glob("*.pt")) == []


def test_a_tensor_that_was_replaced_is_noticed_before_anything_is_copied() -> None:
    state = small_state()
    bulk = Bulk(state, share=0, share_count=1)
    assert not bulk.has_moved()
    bulk.capture()
    state.model.weight.data = torch.zeros(4, 4)
    assert bulk.has_moved()
    with pytest.raises(Unfit, match="has a new place"):
        bulk.capture()


def test_an_optimizer_that_loaded_a_state_is_noticed_and_so_is_a_parameter_that_was_replaced() -> None:
    state = small_state()
    bulk = Bulk(state, share=0, share_count=1)
    state.optimizer.load_state_dict(state.optimizer.state_dict())
    assert bulk.has_moved_inside()
    state = small_state()
    bulk = Bulk(state, share=0, share_count=1)
    state.model.weight = torch.nn.Parameter(torch.zeros(4, 4))
    assert bulk.has_moved()
    assert not bulk.has_moved_inside()  # the thread does not ask for it: FSDP2 does that in every forward pass
    with pytest.raises(Unfit, match="has a new place"):
        bulk.capture_loud()


def test_shares_of_the_weights_are_disjoint_whole_and_about_equal() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(9)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    state = TrainingState(model=model, optimizer=optimizer, scheduler=None, extra={})
    shares = [Bulk(state, share=number, share_count=4) for number in range(4)]
    keys = [found.key for share in shares for found in share.lives if found.key.startswith("parameter")]
    assert sorted(keys) == sorted(f"parameter {name}" for name, _ in model.named_parameters())
    sizes = [share.size_bytes for share in shares]
    assert max(sizes) < 1.6 * min(sizes)


def test_the_saver_is_told_another_interval_when_its_saves_turn_out_to_cost_training(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = memory_tier.MemoryTier(memory, Ranks(), Observer(None), SaveConfig())
    tier.open(small_state(), memory, 2)
    ordered = [json.loads((memory / "job.json").read_text())["every_s"]]
    monkeypatch.setattr(SaverCost, "pause_s", lambda _: 2.0)
    tier.tell_news(memory, 1)
    ordered.append(json.loads((memory / "job.json").read_text())["every_s"])
    assert ordered == [30.0, 600.0]
