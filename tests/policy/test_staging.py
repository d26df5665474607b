"""The cheaper way of saving is chosen from what both cost, and its cost sets how far saves are apart."""

import pytest

from everstep.policy.staging import STRIDE_MAX, CommitWatch, Course, Pace, SaveTimes, Way, cost_s, way_of

TRIAL = Course(stride=1, way=Way.TRIAL)


def trained(
    *, saves: int, in_line_s: float, hidden_s: float, extra_s: float, step_s: float = 1.0, course: Course = TRIAL
) -> tuple[Pace, Course]:
    """A pace after so many saves; the first announcement takes effect at once."""
    pace, now_s = Pace(), 0.0
    pace.end_step(now_s)
    for turn in range(saves):
        way = way_of(course.way, turn)
        stall_s = in_line_s if way is Way.IN_LINE else 0.001
        now_s += stall_s
        pace.saved(way, stall_s=stall_s, now_s=now_s)
        now_s += step_s
        if way is Way.OVERLAPPED:
            now_s += extra_s
            pace.copied(waited_s=0.0, busy_s=hidden_s)
        pace.end_step(now_s)
        if (wanted := pace.decide(course)) != course:
            course = wanted
            pace.announced()
    return pace, course


def test_ways_take_turns_in_a_trial_and_stay_otherwise() -> None:
    assert [way_of(Way.TRIAL, turn) for turn in range(4)] == [Way.IN_LINE, Way.OVERLAPPED] * 2
    assert {way_of(Way.IN_LINE, turn) for turn in range(4)} == {Way.IN_LINE}


def test_a_copy_that_hides_is_overlapped_and_made_at_every_step() -> None:
    _, course = trained(saves=20, in_line_s=0.05, hidden_s=0.06, extra_s=0.0)
    assert course == Course(stride=1, way=Way.OVERLAPPED)


def test_a_copy_that_takes_more_from_training_than_it_hides_is_made_in_line() -> None:
    _, course = trained(saves=20, in_line_s=0.05, hidden_s=0.2, extra_s=0.15)
    assert course == Course(stride=5, way=Way.IN_LINE)


def test_the_stride_follows_the_true_cost_and_not_the_stall_alone() -> None:
    _, course = trained(saves=20, in_line_s=0.1, hidden_s=0.06, extra_s=0.039)
    assert course == Course(stride=4, way=Way.OVERLAPPED)


def test_nothing_is_decided_before_both_were_tried_often_enough() -> None:
    _, course = trained(saves=8, in_line_s=0.05, hidden_s=0.06, extra_s=0.0)
    assert course == TRIAL


def test_a_rank_that_may_not_overlap_settles_in_line() -> None:
    pace, now_s = Pace(), 0.0
    pace.end_step(now_s)
    for _ in range(20):
        pace.saved(Way.IN_LINE, stall_s=0.001, now_s=now_s)
        now_s += 1.0
        pace.end_step(now_s)
    assert pace.decide(TRIAL) == Course(stride=1, way=Way.IN_LINE)


def test_after_many_saves_both_ways_are_tried_again() -> None:
    _, course = trained(saves=10 + 256, in_line_s=0.05, hidden_s=0.06, extra_s=0.0)
    assert course == TRIAL


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(0.5, 0.03), (1.02, 0.03), (1.1, 0.11), (9.0, 0.21)],
    ids=["shorter by chance", "within the wait", "as measured", "longer than the copy took"],
)
def test_chance_never_makes_a_save_cost_less_than_its_waits_or_more_than_the_whole_copy(
    step_s: float, expected: float
) -> None:
    save = SaveTimes(stall_s=0.01, waited_s=0.02, busy_s=0.2, step_s=step_s)
    assert cost_s([save], 1.0) == pytest.approx(expected)


def test_without_a_step_to_compare_with_each_step_is_saved_and_the_stride_has_an_end() -> None:
    pace = Pace()
    assert pace.stride_for(5.0) == 1
    assert pace.decide(TRIAL) == TRIAL
    pace.end_step(0.0)
    pace.end_step(1e-6)
    assert pace.stride_for(5.0) == STRIDE_MAX


def test_commits_are_missing_after_some_saves_and_longer_than_news_may_take() -> None:
    watch = CommitWatch()
    assert not watch.are_missing(0.0, patience_s=0.0)
    for number in range(20):
        watch.note(newest=number // 2, now_s=float(number))
        assert not watch.are_missing(float(number), patience_s=0.0)
    for number in range(20, 28):
        watch.note(newest=9, now_s=float(number))
    assert watch.are_missing(27.0, patience_s=0.0)
    assert watch.are_missing(28.0, patience_s=10.0)
    assert not watch.are_missing(27.0, patience_s=10.0)
    watch.note(newest=10, now_s=29.0)
    assert not watch.are_missing(100.0, patience_s=0.0)
