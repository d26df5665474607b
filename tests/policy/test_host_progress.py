"""A host's progress is what all of its ranks have done, in the order of the marks' own times."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.domain.progress import Mark
from everstep.policy.host_progress import FinishedStep, GroupPhase, HostProgress


def step(rank: int, number: int, at_s: float) -> Mark:
    return Mark(at_s=at_s, rank=Rank(rank), step=number, phase=Phase.TRAINING, is_step=True)


def enters(rank: int, phase: Phase, at_s: float, *, at_step: int = 0) -> Mark:
    return Mark(at_s=at_s, rank=Rank(rank), step=at_step, phase=phase, is_step=False)


def of(*ranks: int) -> HostProgress:
    return HostProgress([Rank(rank) for rank in ranks])


def steps_in(told: list[FinishedStep | GroupPhase]) -> list[tuple[int, float]]:
    return [(item.step, item.at_s) for item in told if isinstance(item, FinishedStep)]


def phases_in(told: list[FinishedStep | GroupPhase]) -> list[tuple[Phase, float]]:
    return [(item.phase, item.at_s) for item in told if isinstance(item, GroupPhase)]


def test_a_step_is_finished_when_its_slowest_rank_has_finished_it() -> None:
    progress = of(0, 1)
    assert steps_in(progress.take([step(0, 1, 1.0)])) == []
    assert steps_in(progress.take([step(1, 1, 1.4)])) == [(1, 1.4)]
    assert progress.step == 1


def test_marks_that_come_in_any_order_are_taken_in_the_order_of_their_times() -> None:
    progress = of(0, 1)
    marks = [step(0, 1, 1.0), step(0, 2, 2.0), step(1, 1, 1.5), step(1, 2, 2.5)]
    assert steps_in(progress.take(marks[::-1])) == [(1, 1.5), (2, 2.5)]


def test_a_resumed_job_counts_on_from_where_its_first_step_is() -> None:
    progress = of(0, 1)
    told = progress.take([step(0, 101, 1.0), step(1, 101, 1.1), step(0, 102, 2.0), step(1, 102, 2.1)])
    assert steps_in(told) == [(101, 1.1), (102, 2.1)]


def test_numbers_that_a_rank_jumps_over_are_told_with_the_step_it_reached() -> None:
    progress = of(0)
    progress.take([step(0, 1, 1.0)])
    assert [number for number, _ in steps_in(progress.take([step(0, 4, 2.0)]))] == [2, 3, 4]


def test_a_rank_that_never_steps_does_not_hide_the_others_for_ever() -> None:
    progress = of(0, 1, 2)
    early = [step(rank, number, float(number)) for number in range(1, 20) for rank in (0, 1)]
    assert steps_in(progress.take(early)) == []
    told = steps_in(progress.take([step(0, 20, 20.0), step(1, 20, 20.5)]))
    assert [number for number, _ in told] == list(range(1, 21))
    assert steps_in(progress.take([step(0, 21, 21.0), step(1, 21, 21.5)])) == [(21, 21.5)]


def test_a_phase_is_told_when_the_group_as_a_whole_changes_it() -> None:
    progress = of(0, 1)
    assert phases_in(progress.take([enters(0, Phase.STARTING, 0.1)])) == [(Phase.STARTING, 0.1)]
    assert phases_in(progress.take([enters(1, Phase.STARTING, 0.2)])) == []
    assert phases_in(progress.take([enters(0, Phase.TRAINING, 1.0)])) == []  # rank 1 still starts
    assert phases_in(progress.take([enters(1, Phase.TRAINING, 1.2)])) == [(Phase.TRAINING, 1.2)]
    assert phases_in(progress.take([enters(1, Phase.SAVING, 2.0)])) == [(Phase.SAVING, 2.0)]
    assert progress.phase is Phase.SAVING
    assert phases_in(progress.take([enters(1, Phase.TRAINING, 3.0)])) == [(Phase.TRAINING, 3.0)]


def test_a_step_is_told_before_the_phase_that_it_ends() -> None:
    progress = of(0)
    progress.take([enters(0, Phase.STARTING, 0.1)])
    told = progress.take([step(0, 1, 1.0)])
    assert [type(item) for item in told] == [FinishedStep, GroupPhase]
    assert told[1] == GroupPhase(phase=Phase.TRAINING, at_s=1.0, step=1)


def test_a_host_without_ranks_has_no_progress() -> None:
    assert of().take([]) == []
    assert of().step == 0


@given(
    paces=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    first=st.integers(1, 500),
)
def test_however_the_marks_are_batched_each_common_step_is_told_once_and_in_order(
    paces: list[int], cuts: list[int], first: int
) -> None:
    marks = sorted(
        (
            step(rank, first + number, float(number + 1) * pace)
            for rank, pace in enumerate(paces)
            for number in range(10)
        ),
        key=lambda mark: mark.at_s,
    )
    progress, told, start = of(*range(len(paces))), [], 0
    for cut in [*sorted(cuts), len(marks)]:
        told += steps_in(progress.take(marks[start:cut]))
        start = max(start, cut)
    assert [number for number, _ in told] == list(range(first, first + 10))
    times = [at_s for _, at_s in told]
    assert times == sorted(times)
