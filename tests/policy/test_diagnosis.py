"""Verdicts on small jobs of every class: the culprit, the class, and never a rank that waits."""

from dataclasses import replace
from typing import Any

import pytest
from tests.policy.dumping import collective, dump, job, message

from everstep.domain.diagnosis import HangVerdict
from everstep.domain.recorder import HostState
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis import diagnose

ALL = {"0": (0, 1, 2, 3)}


def done(until: int, **changes: Any) -> list[dict[str, Any]]:
    return [collective(seq, **changes) for seq in range(1, until + 1)]


def stuck(seq: int, **changes: Any) -> dict[str, Any]:
    return collective(seq, **{"state": "scheduled", "retired": False, **changes})


def judged(dumps: dict[int, dict[str, Any]], states: dict[int, HostState] | None = None, **changes: Any) -> HangVerdict:
    traces, memberships = job(dumps, states)
    return diagnose(traces, memberships, **changes)


def everybody_but(rank: int, other: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Four ranks that wait in number 3, and one that does something else."""
    return {r: other if r == rank else dump([*done(2), stuck(3)], ALL) for r in range(4)}


def test_a_rank_that_never_entered_is_named_alone() -> None:
    verdict = judged(everybody_but(2, dump(done(2), ALL)))
    assert (verdict.trouble, verdict.ranks, verdict.hosts) == (Trouble.NEVER_ENTERED, (2,), ("host1",))
    assert "number 3 of group 0" in verdict.reason
    assert "number 2 of group 0" in verdict.last_agreed
    assert verdict.waits[0].waiting == (0, 1, 3)
    assert verdict.waits[0].missing == (2,)


@pytest.mark.parametrize(
    ("state", "exit_code", "trouble"),
    [
        (HostState.ENDED, -9, Trouble.DEAD),
        (HostState.ENDED, 0, Trouble.LOOP_BOUND),
        (HostState.FROZEN, None, Trouble.FROZEN),
    ],
)
def test_what_the_process_does_decides_the_class(state: HostState, exit_code: int | None, trouble: Trouble) -> None:
    traces, memberships = job(everybody_but(1, dump(done(2), ALL)))
    traces[1] = replace(traces[1], host_state=state, exit_code=exit_code)
    verdict = diagnose(traces, memberships)
    assert (verdict.trouble, verdict.ranks) == (trouble, (1,))


def test_a_rank_frozen_inside_an_operation_that_all_have_entered_is_named() -> None:
    dumps = {rank: dump([*done(2), stuck(3)], ALL) for rank in range(4)}
    verdict = judged(dumps, {3: HostState.FROZEN})
    assert (verdict.trouble, verdict.ranks) == (Trouble.FROZEN, (3,))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"profiling_name": "nccl:broadcast"}, "another operation"),
        ({"input_sizes": [[18]]}, "another shape"),
        ({"input_dtypes": ["Double"]}, "another dtype"),
    ],
)
def test_the_minority_of_a_mismatch_is_named(change: dict[str, Any], word: str) -> None:
    verdict = judged(everybody_but(2, dump([*done(2), stuck(3, **change)], ALL)))
    assert (verdict.trouble, verdict.ranks) == (Trouble.MISMATCH, (2,))
    assert word in verdict.reason


def test_sizes_of_all_to_all_may_differ() -> None:
    dumps = {
        rank: dump([*done(2), stuck(3, profiling_name="nccl:all_to_all", input_sizes=[[rank]])], ALL)
        for rank in range(4)
    }
    assert judged(dumps).trouble is Trouble.INSIDE_OP


def test_two_members_that_differ_are_both_suspected_and_neither_is_blamed() -> None:
    pair = {"0": (0, 1)}
    dumps = {0: dump([stuck(1)], pair), 1: dump([stuck(1, input_sizes=[[3]])], pair)}
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks, verdict.suspects) == (Trouble.MISMATCH, (), (0, 1))


def test_sister_groups_decide_between_two() -> None:
    def one(group: str, size: int) -> dict[str, Any]:
        config = {"1": (0, 1), "2": (2, 3)}
        entry = stuck(1, group=group, input_sizes=[[size]]) | {"process_group": (group, "TENSOR")}
        return dump([entry], {group: config[group]})

    verdict = judged({0: one("1", 8), 1: one("1", 9), 2: one("2", 8), 3: one("2", 8)})
    assert (verdict.trouble, verdict.ranks) == (Trouble.MISMATCH, (1,))


def test_a_rank_with_one_collective_too_many_is_found_by_the_shift() -> None:
    def row(kinds: str) -> dict[str, Any]:
        names = {"a": "_all_gather_base", "r": "_reduce_scatter_base", "x": "all_reduce", "b": "broadcast"}
        entries = [collective(1), collective(2)]
        entries += [stuck(3 + i, profiling_name=f"nccl:{names[kind]}") for i, kind in enumerate(kinds)]
        return dump(entries, ALL)

    verdict = judged({r: row("barx" if r == 1 else "arxb") for r in range(4)})
    assert (verdict.trouble, verdict.ranks) == (Trouble.EXTRA_COLLECTIVE, (1,))


def test_all_inside_names_nobody() -> None:
    verdict = judged({rank: dump([*done(2), stuck(3)], ALL) for rank in range(4)})
    assert (verdict.trouble, verdict.ranks, verdict.suspects) == (Trouble.INSIDE_OP, (), (0, 1, 2, 3))


def test_the_gpu_that_never_started_is_named_when_timing_is_on() -> None:
    dumps = {r: dump([*done(2), stuck(3, state="scheduled" if r == 1 else "started")], ALL) for r in range(4)}
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.GPU_SIDE, (1,))


def test_a_rank_that_shows_as_unfinished_what_its_peers_passed_long_ago_has_a_gpu_fault() -> None:
    lagging = dump([*done(2), *(stuck(seq) for seq in range(3, 9))], ALL)
    dumps = {r: lagging if r == 2 else dump([*done(8), stuck(9)], ALL) for r in range(8)}
    verdict = judged(dumps)
    assert verdict.trouble is Trouble.GPU_SIDE
    assert verdict.ranks == (2,)


def test_one_unfinished_operation_that_peers_passed_is_inside_it_and_two_in_two_groups_are_a_gpu_fault() -> None:
    groups = {"0": (0, 1, 2, 3), "1": (0, 1, 2, 3)}

    def rank(*unfinished: str) -> dict[str, Any]:
        entries = [
            collective(1, record=1 + int(group), group=group, state="scheduled" if group in unfinished else "completed")
            for group in groups
        ]
        return dump([*entries, stuck(2, record=9)], groups)

    healthy = {r: rank() for r in (0, 1, 3)}
    for unfinished, trouble in ((("0",), Trouble.INSIDE_OP), (("0", "1"), Trouble.GPU_SIDE)):
        verdict = judged({**healthy, 2: rank(*unfinished)})
        assert (verdict.trouble, verdict.ranks) == (trouble, (2,))


def test_a_second_rank_that_waits_for_nobody_is_named_although_nobody_has_come_to_wait_for_it() -> None:
    groups = {"0": (0, 1), "1": (1, 2)}
    dumps = {
        0: dump([], {"0": groups["0"]}),
        1: dump([stuck(1, record=1, group="0"), stuck(1, record=2, group="1")], groups),
        2: dump([collective(0, record=0, group="1")], {"1": groups["1"]}),
    }
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (0, 2))


def test_a_rank_past_the_place_where_its_peers_wait_has_left_something_out() -> None:
    groups = {"0": (0, 1, 2), "1": (0, 1, 2)}
    usual = [collective(1, record=0), collective(1, record=1, group="1"), collective(2, record=2)]
    peer = dump([*usual, stuck(3, record=3)], groups)
    early = [stuck(2, record=4, group="1")]
    verdict = judged({0: peer, 1: peer, 2: dump([*usual, *early], groups)})
    assert (verdict.trouble, verdict.ranks) == (Trouble.MISMATCH, (2,))
    assert "left out" in verdict.reason


def test_a_rank_that_is_absent_because_it_waits_itself_is_not_blamed() -> None:
    groups = {"0": (0, 1, 2, 3), "1": (2, 3)}
    waits_for_all = dump([*done(2), stuck(3, record=9)], {"0": groups["0"]})
    dumps = {
        0: waits_for_all,
        1: waits_for_all,
        2: dump([*done(2), stuck(1, record=9, group="1")], groups),
        3: dump(done(2), groups),
    }
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (3,))
    assert "3 other ranks wait" in verdict.reason


def test_two_ranks_in_opposite_orders_are_a_circle() -> None:
    groups = {"0": (0, 1), "1": (0, 1)}
    first, second = stuck(1, record=1, group="0"), stuck(1, record=1, group="1")
    verdict = judged({0: dump([first], groups), 1: dump([second], groups)})
    assert (verdict.trouble, verdict.ranks) == (Trouble.ORDER_DEADLOCK, (0, 1))


def test_both_sending_first_is_a_circle() -> None:
    pair = {"0": (0, 1)}
    verdict = judged(
        {0: dump([message("send 0->1", 1, record=0)], pair), 1: dump([message("send 1->0", 1, record=0)], pair)}
    )
    assert (verdict.trouble, verdict.ranks) == (Trouble.ORDER_DEADLOCK, (0, 1))


def test_a_pipeline_leads_to_the_rank_that_sends_nothing() -> None:
    line = {"0": (0, 1, 2, 3)}
    dumps = {r: dump([message(f"recv {r}<-{r - 1}", 1, record=0)], line) for r in (1, 2, 3)}
    verdict = judged({0: dump([], line), **dumps})
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (0,))


def test_a_link_between_two_that_have_both_posted_names_neither() -> None:
    pair = {"0": (0, 1)}
    verdict = judged(
        {0: dump([message("send 0->1", 1, record=0)], pair), 1: dump([message("recv 1<-0", 1, record=0)], pair)}
    )
    assert (verdict.trouble, verdict.ranks, verdict.suspects) == (Trouble.INSIDE_OP, (), (0, 1))


def test_a_batch_waits_for_the_peer_that_posted_nothing() -> None:
    line = {"0": (0, 1, 2)}
    middle = [
        message("recv 1<-0", 1, record=0),
        message("send 1->2", 1, record=1),
        message("coalesced", 1, record=2),
    ]
    dumps = {0: dump([], line), 1: dump(middle, line), 2: dump([message("recv 2<-1", 1, record=0)], line)}
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (0,))


def test_ranks_that_created_a_group_with_other_members() -> None:
    dumps = {r: dump([stuck(1)], {"0": (0, 1, 2) if r < 3 else (0, 1, 2, 3)}) for r in range(4)}
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.GROUP_CREATION, (3,))


def test_halves_of_a_split_share_a_name_and_agree() -> None:
    dumps = {r: dump([stuck(1)], {"0": (0, 1) if r < 2 else (2, 3)}) for r in range(4)}
    assert judged(dumps).trouble is Trouble.INSIDE_OP


def test_the_only_rank_without_a_dump_that_all_wait_for_is_dead_or_frozen() -> None:
    dumps = {r: dump([*done(2), stuck(3)], ALL) for r in (0, 1, 3)}
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.DEAD, (2,))
    assert "no dump of rank 2" in verdict.missing


def test_two_ranks_without_a_dump_are_suspected_and_neither_is_named() -> None:
    verdict = judged({r: dump([*done(2), stuck(3)], ALL) for r in (0, 1)})
    assert (verdict.trouble, verdict.ranks, verdict.suspects) == (Trouble.UNKNOWN, (), (2, 3))
    assert "no dump of ranks 2-3" in verdict.reason


def test_a_lost_dump_does_not_hide_a_culprit_that_shows_itself() -> None:
    dumps = everybody_but(2, dump(done(2), ALL))
    del dumps[0]
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (2,))


def test_movement_between_two_looks_is_no_hang() -> None:
    verdict = judged(everybody_but(2, dump(done(2), ALL)), moved={2})
    assert (verdict.trouble, verdict.ranks) == (Trouble.SLOW, ())


def test_nobody_waiting_is_healthy_and_nothing_at_all_is_unknown() -> None:
    assert judged({r: dump(done(3), ALL) for r in range(4)}).trouble is Trouble.HEALTHY
    assert judged({}).trouble is Trouble.UNKNOWN


def test_a_rank_in_an_operation_that_is_not_recorded_is_not_blamed() -> None:
    verdict = judged(everybody_but(2, dump(done(2), ALL)), {2: HostState.IN_OPERATION})
    assert (verdict.trouble, verdict.ranks) == (Trouble.UNKNOWN, ())


def test_a_silent_shift_is_a_mismatch_with_the_first_number_that_differs() -> None:
    def rows(lines: list[int]) -> list[dict[str, Any]]:
        frames = [[{"name": "f", "filename": "/job/t.py", "line": line}] for line in lines]
        return [collective(seq, frames=frame) for seq, frame in enumerate(frames, 1)]

    waiting = stuck(7, frames=[{"name": "f", "filename": "/job/t.py", "line": 1}])
    usual = [1, 2, 3, 1, 2, 3]
    dumps = {r: dump([*rows(usual), waiting], ALL) for r in range(4)}
    dumps[2] = dump(rows([1, 2, 3, 1, 3, 1]), ALL)
    verdict = judged(dumps)
    assert (verdict.trouble, verdict.ranks) == (Trouble.MISMATCH, (2,))
    assert "number 5" in verdict.reason


def test_where_the_culprits_python_stands_is_said() -> None:
    traces, memberships = job(everybody_but(2, dump(done(2), ALL)))
    for line, word in (
        ("/job/loader.py:3 in next_batch", "data loader"),
        ("/x/site-packages/torch/serialization.py:9 in save", "checkpoint"),
        ("/x/site-packages/torch/_inductor/codecache.py:1 in load", "compilation"),
    ):
        traces[2] = replace(traces[2], stack=(line,))
        assert word in diagnose(traces, memberships).reason
