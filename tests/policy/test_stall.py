"""A silence becomes suspicious after a time that this run itself has taught, and no sooner than a stated floor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.domain.phases import Phase
from everstep.policy.stall import StallConfig, StallWatch

CONFIG = StallConfig(floor_s=1.5, factor=4.0, learn_from=5, window=200, unlearned_s=300.0)
SPECIAL = (Phase.SAVING, Phase.EVALUATING, Phase.RESTORING)


def training(steps_s: list[float], config: StallConfig = CONFIG) -> StallWatch:
    """A watch that has seen an attempt with steps of these lengths, after a first one that teaches nothing."""
    watch = StallWatch(config)
    watch.begin_attempt(0.0)
    now_s = 100.0
    watch.enter(Phase.TRAINING, now_s)
    watch.finish_step(now_s)
    for step_s in steps_s:
        now_s += step_s
        watch.finish_step(now_s)
    return watch


def test_before_enough_steps_were_seen_the_allowance_is_generous_and_says_why() -> None:
    deadline = training([0.1] * 4).deadline()
    assert deadline.allowed_s == 300.0
    assert deadline.learned_from == "only 4 of 5 steps seen"


def test_long_steps_give_a_multiple_of_their_slow_end() -> None:
    deadline = training([2.0] * 5).deadline()
    assert deadline.allowed_s == pytest.approx(8.0)
    assert deadline.learned_from == "4 times 2.000 s, the slow end of the last 5 steps"


def test_short_steps_give_the_floor() -> None:
    deadline = training([0.01] * 50).deadline()
    assert deadline.allowed_s == 1.5
    assert "the floor" in deadline.learned_from


def test_one_unannounced_checkpoint_does_not_blind_the_watch() -> None:
    assert training([0.5] * 60 + [100.0] + [0.5] * 60).deadline().allowed_s == pytest.approx(2.0)


def test_only_the_latest_steps_count() -> None:
    config = StallConfig(floor_s=1.0, factor=4.0, learn_from=5, window=10)
    assert training([50.0] * 10 + [1.0] * 10, config).deadline().allowed_s == pytest.approx(4.0)


def test_the_first_step_of_an_attempt_teaches_nothing_and_what_was_learned_survives_a_restart() -> None:
    watch = training([0.5] * 10)
    watch.begin_attempt(1000.0)
    watch.enter(Phase.TRAINING, 1060.0)
    watch.finish_step(1060.0)
    assert watch.deadline().allowed_s == pytest.approx(2.0)


def test_a_step_with_a_special_phase_in_it_teaches_nothing() -> None:
    watch = training([0.5] * 5)
    watch.enter(Phase.SAVING, 200.0)
    watch.enter(Phase.TRAINING, 290.0)
    watch.finish_step(291.0)
    watch.finish_step(291.5)
    assert watch.deadline().allowed_s == pytest.approx(2.0)


def test_steps_that_are_told_late_all_at_once_teach_nothing() -> None:
    """A rank that does not step holds back the others' steps; their common moment is no duration."""
    watch = training([0.0] * 30)
    assert watch.deadline().allowed_s == 300.0


@pytest.mark.parametrize("phase", SPECIAL)
def test_a_special_phase_is_allowed_a_multiple_of_the_longest_one_seen(phase: Phase) -> None:
    watch = training([0.5] * 5)
    watch.enter(phase, 200.0)
    assert watch.deadline().allowed_s == 300.0
    watch.enter(Phase.TRAINING, 240.0)
    watch.enter(phase, 250.0)
    assert watch.deadline().allowed_s == pytest.approx(5 * 40.0)
    assert watch.deadline().learned_from == f"the longest {phase.name.lower()} so far took 40.0 s"


def test_a_short_special_phase_still_gets_its_floor() -> None:
    watch = training([0.5] * 5)
    watch.enter(Phase.SAVING, 200.0)
    watch.enter(Phase.TRAINING, 200.1)
    watch.enter(Phase.SAVING, 201.0)
    assert watch.deadline().allowed_s == 60.0


@pytest.mark.parametrize("phase", [Phase.UNOBSERVED, Phase.ENDING])
def test_phases_that_may_take_any_time_keep_their_allowance(phase: Phase) -> None:
    watch = StallWatch(CONFIG)
    watch.begin_attempt(0.0)
    watch.enter(phase, 1.0)
    watch.enter(Phase.TRAINING, 2.0)
    watch.enter(phase, 3.0)
    assert watch.deadline().allowed_s == 300.0


def test_the_mark_that_an_attempt_starts_with_is_no_start_that_took_no_time() -> None:
    watch = StallWatch(CONFIG)
    watch.begin_attempt(10.0)
    watch.enter(Phase.STARTING, 10.2)
    assert watch.deadline().allowed_s == 300.0
    watch.enter(Phase.TRAINING, 50.0)
    watch.begin_attempt(100.0)
    watch.enter(Phase.STARTING, 100.2)
    assert watch.deadline().allowed_s == 5 * 40.0


def test_patience_stretches_the_present_silence_only() -> None:
    watch = training([0.5] * 10)
    watch.be_patient(2.0)
    watch.be_patient(3.0)
    assert watch.deadline().allowed_s == pytest.approx(12.0)
    watch.finish_step(200.0)
    watch.finish_step(200.5)
    assert watch.deadline().allowed_s == pytest.approx(2.0)


def test_patience_ends_with_the_phase_and_with_the_attempt() -> None:
    watch = training([0.5] * 10)
    watch.be_patient(100.0)
    watch.enter(Phase.SAVING, 200.0)
    assert watch.deadline().allowed_s == 300.0
    watch.be_patient(100.0)
    watch.begin_attempt(300.0)
    assert watch.deadline().allowed_s == 5 * 100.0  # the first start took 100 s


@given(steps_s=st.lists(st.floats(0.001, 1000.0), max_size=60))
def test_no_silence_shorter_than_the_floor_is_ever_suspicious(steps_s: list[float]) -> None:
    assert training(steps_s).deadline().allowed_s >= CONFIG.floor_s
