"""A resumed run is the uninterrupted one, bit for bit: parameters, optimizer, buffers, chance and data of each step."""

from typing import Any

import pytest

KILLED = -9
DDP3 = {"kind": "ddp", "world": 3}
CASES: dict[str, dict[str, Any]] = {
    "ddp of three": DDP3,
    "ddp of four": {"kind": "ddp", "world": 4},
    "ddp of three with several buckets": {**DDP3, "width": 700, "ddp": {"bucket_cap_mb": 1}},
    "ddp of three without a rehearsal": {**DDP3, "attach": {"rehearse": False}},
    "ddp of three with a rehearsal": {**DDP3, "attach": {"rehearse": True}},
    "ddp of three with a static graph": {**DDP3, "ddp": {"static_graph": True}},
    "ddp of three with gradients in its buckets, zeroed": {
        **DDP3,
        "ddp": {"gradient_as_bucket_view": True},
        "set_to_none": False,
    },
    "ddp of two": {"kind": "ddp", "world": 2},
    "fsdp2 of two that evaluates": {"kind": "fsdp", "world": 2, "evaluate": True},
    "ddp of three with buffers of their own": {**DDP3, "ddp": {"broadcast_buffers": False}},
    "fsdp2 of two": {"kind": "fsdp", "world": 2},
    "three ranks that sum gradients themselves": {"kind": "manual", "world": 3},
    "one process": {"kind": "alone", "world": 1},
    "one process with two loader workers": {"kind": "alone", "world": 1, "num_workers": 2},
    "a loader with its own generator": {"kind": "alone", "world": 1, "loader": "generator"},
    "a list of batches": {"kind": "alone", "world": 1, "loader": "list"},
    "a loader that keeps its position": {"kind": "alone", "world": 1, "loader": "stateful"},
    "the checkpoint at the end of the first of two loops": {**DDP3, "first_loop_until": 6, "halve": True},
    "the checkpoint in the second of two loops": {**DDP3, "first_loop_until": 4},
    "in the middle of an accumulation": {"kind": "alone", "world": 1, "accumulate": 4},
}


def killed_and_resumed(lab: Any, spec: dict[str, Any], save_every: int, die_at: int = 8) -> tuple[Any, Any]:
    """The steps of an uninterrupted run after the save, and of one that was killed in a step and resumed."""
    attach = {"save_every_steps": save_every, **spec.pop("attach", {})}
    whole = lab.train("whole", **spec, until=12, attach=attach, directory=str(lab.folder / "other"))
    lab.train("first", **spec, until=12, attach=attach, die_at=die_at, code=KILLED)
    second = lab.train("second", **spec, until=12, attach=attach, seed=99)
    saved = (die_at - 1) // save_every * save_every
    assert lab.restored_step("second") == saved
    return [rank[saved:] for rank in whole], second


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bit_identical_with(case: str, lab: Any) -> None:
    expected, resumed = killed_and_resumed(lab, dict(CASES[case]), save_every=6)
    assert [len(rank) for rank in resumed] == [6] * CASES[case]["world"]
    assert resumed == expected
    assert "may not be bit-identical" not in lab.errors("second")


@pytest.mark.parametrize(
    "spec", [{"kind": "ddp", "world": 3}, {"kind": "alone", "world": 1, "loader": "list"}], ids=str
)
def test_a_checkpoint_at_the_very_end_of_an_epoch_resumes_with_the_next(spec: dict[str, Any], lab: Any) -> None:
    every = 4 if spec["kind"] == "ddp" else 5  # batches in an epoch
    expected, resumed = killed_and_resumed(lab, dict(spec), save_every=every)
    assert resumed == expected


def rehearsed(lab: Any, name: str) -> bool:
    return any(kind == "WorkerReady" and body["part"] == "rehearsed" for kind, body in lab.notes(name))


def test_a_rehearsal_is_for_those_who_ask_and_for_checkpoints_that_know_no_buckets(lab: Any) -> None:
    expected, resumed = killed_and_resumed(lab, dict(DDP3), save_every=1, die_at=2)
    assert resumed == expected
    assert rehearsed(lab, "second")
    lab.train("third", **DDP3, until=14, attach={"save_every_steps": 2})
    assert lab.restored_step("third") == 12
    assert not rehearsed(lab, "third")
    lab.train("fourth", **DDP3, until=16, attach={"rehearse": True})
    assert rehearsed(lab, "fourth")


def test_with_neither_buckets_nor_a_rehearsal_ddp_of_three_gets_other_parameters_and_says_so(lab: Any) -> None:
    expected, resumed = killed_and_resumed(lab, {**DDP3, "attach": {"rehearse": False}}, save_every=1, die_at=2)
    assert [rank[0]["data"] for rank in resumed] == [rank[0]["data"] for rank in expected]
    assert [rank[-1]["parameters"] for rank in resumed] != [rank[-1]["parameters"] for rank in expected]
    assert "rehearse=False" in lab.errors("second")


def test_a_finished_run_returns_at_once_when_run_again(lab: Any) -> None:
    spec = {"kind": "alone", "world": 1}
    lab.train("first", **spec, until=3)
    assert lab.train("again", **spec, until=3) == [[]]
    whole = lab.train("whole", **spec, until=6, directory=str(lab.folder / "other"))
    assert lab.train("longer", **spec, until=6) == [whole[0][3:]]
