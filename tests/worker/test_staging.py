"""A copy is whole before an optimizer writes, and one of a state that changed meanwhile is given up and said so."""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everstep.adapters.checkpoints.memory_slots import RankSlots, SavePages, SavePlan
from everstep.policy.checkpoints import SlotState
from everstep.policy.staging import Course, Way
from everstep.worker.format.frame import arrange
from everstep.worker.format.layout import RankLayout
from everstep.worker.format.pieces import live
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.saving.memory_image import Image, lay_out
from everstep.worker.saving.memory_state import Bulk
from everstep.worker.saving.memory_tier import MemoryTier, draft_of
from everstep.worker.saving.samples import Sampler
from everstep.worker.saving.schedule import SaveConfig
from everstep.worker.saving.staging import CHANGED, Staged, Stager, frozen
from everstep.worker.state import OWN, TrainingState


class SlowImage(Image):
    """Does not copy before it may."""

    def __init__(self, path: Path, layout: RankLayout) -> None:
        super().__init__(path, layout)
        self.may_copy = threading.Event()

    def copy_in(self, tensors: Any, *, at: int = 0) -> None:
        assert self.may_copy.wait(10)
        super().copy_in(tensors, at=at)


@pytest.fixture
def image(tmp_path: Path) -> SlowImage:
    layout = arrange([live("w", torch.zeros(1000))])
    lay_out(tmp_path / "slot", layout)
    return SlowImage(tmp_path / "slot", layout)


def begun(image: Image, tensor: Tensor, *, is_test: bool = False) -> tuple[Stager, list[str]]:
    stager, told = Stager(), []  # type: ignore[var-annotated]
    staged = Staged(
        image=image,
        tensors=[tensor],
        complete=lambda: told.append("complete"),
        discard=lambda: told.append("discarded"),
        is_test=is_test,
    )
    stager.begin(staged)
    return stager, told


def test_the_optimizer_waits_until_the_copy_is_whole(image: SlowImage) -> None:
    tensor = torch.ones(1000)
    stager, told = begun(image, tensor)
    threading.Timer(0.05, image.may_copy.set).start()
    assert stager.hold_writers() > 0.02
    assert image.equals([tensor])
    tensor.zero_()  # the optimizer
    assert stager.finish() == ""
    assert told == ["complete"]
    assert stager.hold_writers() == 0.0
    stager.close()


def test_a_state_that_is_written_to_while_it_is_copied_is_given_up(image: SlowImage) -> None:
    tensor = torch.ones(1000)
    stager, told = begun(image, tensor)
    tensor.mul_(2)
    image.may_copy.set()
    stager.hold_writers()
    assert stager.finish() == CHANGED
    assert told == ["discarded"]
    stager.close()


def test_a_test_sees_what_no_counter_shows_and_keeps_the_state_as_it_was(image: SlowImage) -> None:
    image.may_copy.set()
    tensor = torch.ones(1000)
    stager, told = begun(image, tensor, is_test=True)
    tensor.data.mul_(2)
    assert tensor._version == 0
    stager.hold_writers()
    assert stager.finish() == CHANGED
    assert told == ["complete"]
    assert image.equals([torch.ones(1000)])
    stager.close()


@pytest.mark.parametrize("share", [1.0, 0.02])
def test_a_copy_of_what_data_changed_meanwhile_is_given_up_though_no_counter_shows_it(
    image: SlowImage, share: float
) -> None:
    image.may_copy.set()
    tensor = torch.ones(1000)
    stager, told = begun(image, tensor)
    assert stager.finish() == ""  # the step that was looked at: the script changes nothing in it
    for _ in range(100):
        tensor = torch.rand(1000)
        image.may_copy.clear()
        stager.begin(Staged(image=image, tensors=[tensor], complete=list, discard=lambda: told.append("discarded")))
        tensor.data[torch.rand(1000) < share] += 1
        assert tensor._version == 0
        image.may_copy.set()
        if problem := stager.finish():
            break
    assert problem == CHANGED
    assert told == ["complete", "discarded"]
    stager.close()


def test_samples_pass_over_all_of_a_state(tmp_path: Path) -> None:
    tensors = [
        torch.zeros(4000),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(3, 5).t(),
        *torch.zeros(200, 50).unbind(),
    ]
    layout = arrange([live(f"w{number}", tensor) for number, tensor in enumerate(tensors)])
    lay_out(tmp_path / "slot", layout)
    image, sampler, changed = Image(tmp_path / "slot", layout), Sampler(), set()
    for number, tensor in enumerate(tensors):
        sample = [sampler.take(image, tensors) for _ in range(8)]
        image.copy_in(tensors)
        assert all(one.is_copied() for one in sample)
        image.copy_in([tensor + 1], at=number)
        changed |= {number for one in sample if not one.is_copied()}
    assert changed == {0, 1, *range(4, len(tensors))}  # no empty ones, and none whose memory is in another order


def test_an_error_of_the_thread_comes_out_where_training_waits(image: SlowImage) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    stager = Stager()
    stager.begin(Staged(image=image, tensors=[torch.ones(1000)], complete=full, discard=full))
    image.may_copy.set()
    with pytest.raises(OSError, match="No space"):
        stager.finish()
    stager.close()


def test_frozen_values_share_nothing_that_changes() -> None:
    tensor = torch.ones(2)
    value = {"a": [tensor, (1, 2)], "b": (tensor, {"c": [3]})}
    kept = frozen(value)
    tensor.zero_()
    value["b"][1]["c"].append(4)
    assert kept["a"][0].tolist() == kept["b"][0].tolist() == [1.0, 1.0]
    assert kept["b"][1] == {"c": [3]}


class Trained:
    """One rank with an open memory tier that overlaps every save."""

    def __init__(self, memory: Path) -> None:
        self.model = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, scheduler=None, extra={})
        self.memory, self.step = memory, 0
        self.tier = MemoryTier(memory, Ranks(), Observer(None), SaveConfig())
        self.train()
        self.tier.open(self.state, memory, 1)
        course = Course(stride=1, way=Way.OVERLAPPED)
        SavePages(memory).write_plan(SavePlan(from_step=1, course=course, world_size=1))

    def train(self) -> None:
        self.state.begin_body()
        self.model(torch.ones(300)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tier.note_step()

    def save(self) -> None:
        self.tier.save(self.step, {"random": None, "data": None}, draft_of(self.step, 1, 1, (), False))

    def steps_in_memory(self) -> list[int]:
        slots = RankSlots(self.memory, 0).slots()
        return sorted(slot.step for slot in slots if slot.state is SlotState.COMPLETE)


def test_saves_that_overlap_hold_each_step_as_it_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Trained(tmp_path)
    for _ in range(6):
        run.train()
        expected = [p.detach().clone() for p in run.model.parameters()]
        run.save()
        run.train()
        run.tier.finish()
        slot = RankSlots(tmp_path, 0).find(run.step - 1)
        assert slot is not None
        pieces = Bulk(run.state, share=0, share_count=1).offer.rank.pieces
        content = (tmp_path / f"rank-00000.slot-{slot}.pt").read_bytes()
        for piece, tensor in zip(pieces, expected, strict=False):  # the parameters are the first
            blob = io.BytesIO(content[piece.blob_at : piece.blob_at + piece.blob_bytes])
            assert torch.equal(torch.load(blob, weights_only=True), tensor)
    assert not caplog.records


def test_a_script_that_clips_weights_before_the_optimizer_is_saved_in_line_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Trained(tmp_path)
    for _ in range(4):
        run.train()
        run.save()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.data.clamp_(-0.01, 0.01)
    run.tier.finish()
    assert run.steps_in_memory() == [3, 4, 5]
    [record] = caplog.records
    assert "training waits for each copy" in record.getMessage()


def test_the_rest_is_kept_as_it_was_at_the_end_of_the_step(tmp_path: Path) -> None:
    run = Trained(tmp_path)
    run.train()
    run.optimizer.param_groups[0]["lr"] = 0.5
    run.save()
    run.optimizer.param_groups[0]["lr"] = 0.25
    run.train()
    run.tier.finish()
    slot = RankSlots(tmp_path, 0).find(2)
    rest = torch.load(tmp_path / f"rank-00000.rest-{slot}.pt", weights_only=True)
    assert rest["groups"][0]["lr"] == 0.5
    assert OWN in rest
