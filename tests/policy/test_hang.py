"""Who holds up a job: one table of summaries for every kind of hang, and no rank that waits is ever blamed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.making import SEEN_FROM_OUTSIDE, STUCK, WAITING, absent, counts, seen, waiting

from everstep.domain.evidence import Frame, ProcessState, RankSummary
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.hang import HangFinding, locate_hang

BLIND: dict[str, Any] = {"stack": (), "groups": ()}


def found(first: list[RankSummary], second: list[RankSummary] | None = None) -> HangFinding:
    return locate_hang(first, first if second is None else second, apart_s=0.2)


def judged(first: list[RankSummary], second: list[RankSummary] | None = None) -> Verdict:
    return found(first, second).verdict


# --- something moved


@pytest.mark.parametrize(
    "moved",
    [
        absent(0, step=41),
        absent(0, phase=Phase.SAVING),
        absent(0, silence_s=0.1),
        absent(0, groups=(counts(41, 40),)),
        absent(0, groups=(counts(40, 40), counts(1, 1, "1"))),
    ],
)
def test_what_moved_between_the_snapshots_does_not_hang(moved: RankSummary) -> None:
    verdict = judged([absent(0), waiting(1)], [moved, waiting(1)])
    assert (verdict.trouble, verdict.ranks) == (Trouble.SLOW, ())
    assert verdict.reason == "Not a hang: rank 0 made progress between two snapshots."


def test_a_rank_that_only_the_second_snapshot_knows_did_not_move() -> None:
    assert judged([waiting(1)], [absent(0), waiting(1)]).trouble is Trouble.NEVER_ENTERED


def test_time_that_goes_by_is_no_movement() -> None:
    verdict = judged([absent(0), waiting(1)], [absent(0, silence_s=9.0), waiting(1, silence_s=9.0)])
    assert verdict.trouble is Trouble.NEVER_ENTERED


# --- dead


def test_a_rank_that_ended_in_the_middle_is_dead() -> None:
    gone = seen(2, process=ProcessState.GONE, exit_code=0, **BLIND)
    verdict = judged([waiting(0), waiting(1), gone])
    assert (verdict.trouble, verdict.ranks) == (Trouble.DEAD, (2,))
    assert "rank 2 on h0 ended at step 40 with exit code 0" in verdict.reason
    assert "; ranks 0-1 wait in all_reduce of [[4]]" in verdict.reason


def test_ranks_that_ended_well_are_at_fault_only_when_others_still_wait_for_them() -> None:
    well = seen(2, process=ProcessState.GONE, exit_code=0, phase=Phase.ENDING, **BLIND)
    assert judged([waiting(0), well]).ranks == (2,)
    assert judged([seen(0, stack=STUCK), well]).ranks == ()


def test_a_rank_that_ended_badly_outdoes_one_that_ended_well() -> None:
    well = seen(1, process=ProcessState.GONE, exit_code=0, phase=Phase.ENDING, **BLIND)
    badly = seen(2, process=ProcessState.GONE, exit_code=1, phase=Phase.ENDING, **BLIND)
    assert judged([waiting(0), well, badly]).ranks == (2,)


def test_when_all_that_was_seen_has_ended_well_nobody_is_blamed() -> None:
    well = [seen(rank, process=ProcessState.GONE, exit_code=0, phase=Phase.ENDING, **BLIND) for rank in (0, 1)]
    assert judged(well).trouble is Trouble.UNKNOWN


# --- frozen


def test_a_stopped_process_is_frozen_whatever_its_page_says() -> None:
    stopped = waiting(3, process=ProcessState.STOPPED)
    finding = found([absent(0), waiting(1), waiting(2), stopped])
    assert (finding.verdict.trouble, finding.verdict.ranks) == (Trouble.FROZEN, (3,))
    assert finding.stopped
    assert "is frozen since step 40: stopped by a signal, silent for 5.0 s" in finding.verdict.reason


def test_a_process_blocked_in_the_kernel_in_both_snapshots_is_frozen() -> None:
    blocked, sleeps = seen(1, process=ProcessState.BLOCKED, **BLIND), seen(1, **BLIND)
    assert judged([waiting(0), blocked]).ranks == (1,)
    assert "stuck inside the kernel" in judged([waiting(0), blocked]).reason
    assert judged([waiting(0), sleeps], [waiting(0), blocked]).ranks == ()  # a moment of disk wait is no hang


def test_a_rank_that_answers_nothing_while_others_answer_is_frozen() -> None:
    mute = seen(2, answers=False, gil_free=None, **BLIND)
    verdict = judged([waiting(0), waiting(1), mute])
    assert (verdict.trouble, verdict.ranks) == (Trouble.FROZEN, (2,))
    assert "answers nothing" in verdict.reason
    once = judged([waiting(0), waiting(1), seen(2, **BLIND)], [waiting(0), waiting(1), mute])
    assert once.ranks == ()
    nobody = [seen(rank, answers=False, gil_free=None, **BLIND) for rank in range(3)]
    assert judged(nobody).ranks == ()  # then it is the asking that does not work


def test_a_rank_in_which_no_python_can_run_holds_the_lock() -> None:
    holder = seen(1, gil_free=False, stack=STUCK)
    finding = found([waiting(0), holder])
    assert (finding.verdict.trouble, finding.verdict.ranks) == (Trouble.FROZEN, (1,))
    assert "holds Python's global lock" in finding.verdict.reason
    assert finding.verdict.where == "/home/me/train.py:12 in mine"
    once = judged([waiting(0), seen(1, stack=STUCK)], [waiting(0), holder])
    assert once.trouble is not Trouble.FROZEN


def test_a_rank_that_waits_while_it_holds_the_lock_is_not_blamed() -> None:
    assert judged([waiting(0, gil_free=False), waiting(1)]).ranks == ()


def test_ranks_that_all_seem_to_hold_the_lock_say_more_about_the_asking() -> None:
    assert judged([seen(rank, gil_free=False, **BLIND) for rank in range(3)]).ranks == ()


# --- never entered


def test_the_rank_that_is_behind_in_a_group_is_blamed_with_its_line_and_the_counts() -> None:
    verdict = judged([absent(0), waiting(1), waiting(2)])
    assert (verdict.trouble, verdict.ranks, verdict.hosts) == (Trouble.NEVER_ENTERED, (0,), ("h0",))
    assert verdict.where == "/home/me/train.py:12 in mine"
    assert verdict.reason == (
        "rank 0 on h0 never entered the collective after step 40: it stands at /home/me/train.py:12 in mine, "
        "silent for 5.0 s; ranks 1-2 wait in all_reduce of [[4]]."
    )
    assert verdict.evidence == ("group 0: the others have entered collective 41; rank 0 40",)


def test_a_laggard_that_waits_in_another_group_is_not_blamed_but_the_one_it_waits_for() -> None:
    first = [
        seen(0, stack=WAITING, groups=(counts(5, 4, "0"),)),
        seen(1, stack=WAITING, groups=(counts(4, 4, "0"), counts(3, 2, "1"))),
        seen(2, stack=STUCK, groups=(counts(2, 2, "1"),)),
    ]
    verdict = judged(first)
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (2,))
    assert verdict.evidence == ("group 1: the others have entered collective 3; rank 2 2",)


def test_a_laggard_that_waits_elsewhere_for_one_that_is_behind_in_both_groups_is_not_named_with_it() -> None:
    first = [
        seen(0, stack=WAITING, groups=(counts(5, 4, "0"),)),
        seen(1, stack=WAITING, groups=(counts(4, 4, "0"), counts(3, 2, "1"))),
        seen(2, stack=STUCK, groups=(counts(4, 4, "0"), counts(2, 2, "1"))),
    ]
    verdict = judged(first)
    assert verdict.ranks == (2,)
    assert verdict.evidence == ("group 0: the others have entered collective 5; rank 2 4",)


def test_ranks_that_wait_for_each_other_in_two_groups_are_not_blamed() -> None:
    first = [
        seen(0, stack=WAITING, groups=(counts(5, 4, "0"), counts(2, 2, "1"))),
        seen(1, stack=WAITING, groups=(counts(4, 4, "0"), counts(3, 2, "1"))),
    ]
    assert judged(first).ranks == ()


def test_without_a_recorder_the_rank_whose_stack_is_not_in_a_collective_is_blamed() -> None:
    first = [seen(0, stack=WAITING), seen(1, stack=WAITING), seen(2, stack=STUCK)]
    verdict = judged(first)
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (2,))
    assert verdict.evidence[0].startswith("no recorder: the other ranks' stacks")


def test_without_recorder_and_stacks_the_rank_that_is_a_step_behind_is_blamed() -> None:
    verdict = judged([seen(0, **BLIND), seen(1, step=39, **BLIND), seen(2, **BLIND)])
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (1,))
    assert verdict.evidence == ("no recorder: it is a step behind",)


def test_what_could_not_be_had_of_the_culprit_is_part_of_the_evidence() -> None:
    verdict = judged([absent(0, stack=(), missing=("python stack: no answer",)), waiting(1)])
    assert verdict.where == ""
    assert verdict.evidence[-1] == "rank 0: python stack: no answer"


@pytest.mark.parametrize(
    ("function", "excuse"), [("save_checkpoint", Phase.SAVING), ("evaluate", Phase.EVALUATING), ("mine", None)]
)
def test_a_culprit_is_excused_by_what_its_stack_speaks_of(function: str, excuse: Phase | None) -> None:
    stack = (Frame(file="train.py", line=1, function=function),)
    assert found([absent(0, stack=stack), waiting(1)]).excuse is excuse


def test_a_culprit_that_is_busy_in_changing_functions_is_taken_to_compute() -> None:
    def busy(cpu_s: float, function: str) -> RankSummary:
        return absent(0, cpu_s=cpu_s, stack=(Frame(file="train.py", line=1, function=function),))

    assert found([busy(1.0, "f"), waiting(1)], [busy(1.2, "g"), waiting(1)]).excuse is Phase.EVALUATING
    assert found([busy(1.0, "f"), waiting(1)], [busy(1.2, "f"), waiting(1)]).excuse is None  # a tight loop
    assert found([busy(1.0, "f"), waiting(1)], [busy(1.01, "g"), waiting(1)]).excuse is None  # hardly busy


def test_a_stack_inside_the_data_loader_names_the_data_loader() -> None:
    loader = (Frame(file="/x/site-packages/torch/utils/data/dataloader.py", line=1, function="__next__"), *STUCK)
    verdict = judged([absent(0, stack=loader), waiting(1)])
    assert verdict.cause.component == "Data Loader"
    assert verdict.where == "/home/me/train.py:12 in mine"  # the user's own line, not the library's


# --- inside, busy, unknown


def test_ranks_that_are_all_inside_the_same_collective_blame_nobody_and_name_it() -> None:
    verdict = judged([waiting(rank) for rank in range(4)])
    assert (verdict.trouble, verdict.ranks) == (Trouble.INSIDE_OP, ())
    assert verdict.reason.startswith("ranks 0-3 are all inside all_reduce of [[4]] and none comes out")


def test_one_rank_alone_is_not_inside_an_operation_with_others() -> None:
    assert judged([waiting(0)]).trouble is Trouble.UNKNOWN


def test_when_nobody_waits_for_anybody_the_ranks_are_at_work() -> None:
    finding = found([seen(0, stack=STUCK), seen(1, stack=STUCK)])
    assert (finding.verdict.trouble, finding.verdict.ranks) == (Trouble.UNKNOWN, ())
    assert finding.excuse is Phase.EVALUATING
    assert "nobody waits in a collective: rank 0 at /home/me/train.py:12 in mine" in finding.verdict.reason


def test_what_is_not_known_is_said_to_be_unknown_with_what_is_missing() -> None:
    verdict = judged([seen(0, missing=("ping: no answer",), **BLIND), seen(1, **BLIND)])
    assert (verdict.trouble, verdict.ranks) == (Trouble.UNKNOWN, ())
    assert "no stack and no recorder from ranks 0-1" in verdict.reason
    assert verdict.evidence == ("rank 0: ping: no answer",)


def test_no_summaries_at_all_blame_nobody() -> None:
    assert judged([]).trouble is Trouble.UNKNOWN


def test_the_same_hang_has_the_same_signature_at_another_step_and_silence() -> None:
    later = [absent(0, step=900, silence_s=77.0, groups=(counts(900, 900),)), waiting(1, groups=(counts(901, 900),))]
    assert judged([absent(0), waiting(1)]).signature == judged(later).signature


SUMMARIES = st.lists(SEEN_FROM_OUTSIDE, max_size=6, unique_by=lambda summary: summary.rank)


@given(before=SUMMARIES, now=SUMMARIES, same=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_rank_that_waits_is_never_blamed_unless_its_process_is_at_fault(
    before: list[RankSummary], now: list[RankSummary], same: bool
) -> None:
    verdict = locate_hang(now if same else before, now, apart_s=0.2).verdict
    by_rank = {summary.rank: summary for summary in now}
    for rank in verdict.ranks:
        summary = by_rank[rank]
        waits = any(group.enqueued > group.completed for group in summary.groups)
        no_process = summary.process in (ProcessState.STOPPED, ProcessState.GONE, ProcessState.BLOCKED)
        mute = summary.answers is False and not summary.stack
        assert not waits or no_process or mute, verdict.reason
    assert list(verdict.ranks) == sorted(set(verdict.ranks))
    assert list(verdict.hosts) == sorted({by_rank[rank].host for rank in verdict.ranks})
    assert verdict.reason.endswith(".")
