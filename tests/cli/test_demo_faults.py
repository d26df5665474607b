"""The demo's plan of faults: Llama 3's shares, the seed's word, room for recoveries; and flags that are refused."""

import argparse
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.cli import demo
from everstep.cli.demo_faults import FIRST_STEP, GAP_STEPS_MIN, LAST_SHARE, FaultChoice, plan_faults, steps_needed
from everstep.domain.causes import LLAMA3, FaultKind
from everstep.domain.errors import ConfigError
from everstep.domain.faults import PlannedFault

LLAMA3_CHOICE = FaultChoice(llama3=True)


def plan(choice: FaultChoice = LLAMA3_CHOICE, *, seed: int, count: int = 8, steps: int = 0) -> tuple[PlannedFault, ...]:
    steps = steps or steps_needed(count)
    return plan_faults(choice, seed=seed, fault_count=count, step_count=steps, worker_count=4)


def test_a_seed_decides_every_fault() -> None:
    assert plan(seed=3) == plan(seed=3)
    assert plan(seed=3) != plan(seed=4)


def test_more_steps_move_the_faults_and_leave_kinds_and_ranks_alone() -> None:
    few, many = plan(seed=3), plan(seed=3, steps=5000)
    assert [(f.kind, f.rank, f.cause) for f in few] == [(f.kind, f.rank, f.cause) for f in many]


def test_over_many_draws_the_causes_come_as_often_as_in_llama3() -> None:
    drawn = [fault for seed in range(400) for fault in plan(seed=seed, count=25)]
    counts = Counter(fault.cause for fault in drawn)
    for row in LLAMA3:
        expected = row.share * len(drawn)
        assert abs(counts[row.cause] - expected) <= 5 * expected**0.5, row
    assert all(next(row for row in LLAMA3 if row.cause == fault.cause).fault is fault.kind for fault in drawn)
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}


def test_the_default_demo_shows_several_kinds() -> None:
    count = LLAMA3_CHOICE.count(demo.DEFAULT_MINUTES * 60)
    assert len({fault.kind for fault in plan(seed=demo.DEFAULT_SEED, count=count)}) >= 5


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3000))
def test_faults_leave_room_for_learning_recovering_and_ending(seed: int, count: int, spare_steps: int) -> None:
    steps = steps_needed(count) + spare_steps
    due = [fault.step for fault in plan(seed=seed, count=count, steps=steps)]
    assert len(due) == count
    assert due[0] >= FIRST_STEP
    assert due[-1] <= LAST_SHARE * steps
    assert all(after - before >= GAP_STEPS_MIN - 1 for before, after in pairwise(due))


def test_kinds_that_are_asked_for_come_in_turn() -> None:
    choice = FaultChoice.parse("kill, freeze")
    assert [fault.kind for fault in plan(choice, seed=1, count=5)] == ["kill", "freeze", "kill", "freeze", "kill"]
    assert all(fault.cause is None for fault in plan(choice, seed=1))


def test_the_count_grows_with_the_time_and_holds_every_kind_that_was_asked_for() -> None:
    assert FaultChoice.parse("none").count(600) == 0
    assert LLAMA3_CHOICE.count(1) == 1
    assert LLAMA3_CHOICE.count(180) == 2 * LLAMA3_CHOICE.count(90)
    assert FaultChoice.parse("kill,freeze,gil").count(1) == 3
    assert plan(FaultChoice.parse("none"), seed=1, count=0) == ()


def test_an_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(ConfigError) as caught:
        FaultChoice.parse("kill,meteor")
    assert "'meteor'" in str(caught.value)
    assert all(kind in str(caught.value) for kind in FaultKind)


def test_a_slow_machine_gets_as_many_steps_as_the_faults_need() -> None:
    asked = demo.DemoPlan(choice=LLAMA3_CHOICE, minutes=1.5, worker_count=4, seed=0, run_dir=Path("x"))
    assert asked.step_count(step_s=0.1) == 900
    assert asked.step_count(step_s=60.0) == steps_needed(asked.fault_count)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "1"], "2 or more"),
        (["--workers", "100000"], "too many"),
        (["--minutes", "0"], "above 0"),
        (["--minutes", "-1"], "above 0"),
        (["--minutes", "nan"], "above 0"),
        (["--seed", "-1"], "0 or more"),
        (["--faults", ""], "no fault ''"),
        (["--run-dir", "/"], "not empty"),
    ],
)
def test_a_silly_flag_is_refused_with_a_sentence(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        demo.plan_demo(parse(flags))


def test_without_torch_the_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'everstep\[torch\]'"):
        demo.plan_demo(parse([]))


def parse(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *flags])
