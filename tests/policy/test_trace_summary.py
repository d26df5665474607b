"""One rank's dump, reduced: what is done, what it waits in, and what the recorder's traps would make of it."""

from tests.policy.dumping import collective, dump, message, reduced

from everstep.domain.recorder import OpState
from everstep.policy.trace_summary import MemberLists, identity_of

PAIR = {"0": (0, 1)}


def test_counts_and_the_oldest_unfinished_operation_come_from_the_newest_entries() -> None:
    entries = [collective(seq) for seq in (1, 2)] + [
        collective(seq, state="scheduled", retired=False) for seq in (3, 4)
    ]
    trace = reduced(dump(entries, PAIR))
    (group,) = trace.groups
    assert (group.enqueued, group.completed, trace.blocked_order) == (4, 2, 3)
    assert [op.seq for op in group.tail] == [1, 2, 3, 4]
    assert group.members == identity_of((0, 1))


def test_gloo_says_done_by_retired_alone_and_nccl_by_its_state() -> None:
    gloo = [collective(1, profiling_name="gloo:all_reduce", state="scheduled", retired=True)]
    assert reduced(dump(gloo, PAIR)).groups[0].completed == 1
    nccl = [collective(1, state="scheduled", retired=True)]
    assert reduced(dump(nccl, PAIR)).groups[0].completed == 0


def test_a_started_operation_is_neither_done_nor_only_enqueued() -> None:
    entries = [collective(1), collective(2, state="started", retired=False)]
    (group,) = reduced(dump(entries, PAIR)).groups
    assert (group.started, group.completed, group.tail[-1].state) == (2, 1, OpState.STARTED)


def test_the_ring_is_read_backwards_and_no_further_than_needed() -> None:
    entries = [collective(seq) for seq in range(1, 2001)]
    entries[100]["collective_seq_id"] = -5  # would show if it were read
    trace = reduced(dump(entries, PAIR))
    assert trace.groups[0].enqueued == 2000
    assert len(trace.groups[0].tail) == 24


def test_members_of_a_batch_take_the_state_of_their_marker() -> None:
    done = [
        message("send 0->1", 1, record=0),
        message("recv 0<-1", 1, record=1),
        message("coalesced", 1, record=2, state="completed"),
    ]
    trace = reduced(dump(done, PAIR))
    assert trace.blocked_order == -1
    assert {(c.posted, c.done) for c in trace.channels} == {(1, 1)}
    stuck = reduced(dump([*done[:2], message("coalesced", 1, record=2)], PAIR))
    assert {c.order for c in stuck.channels} == {2}
    assert stuck.blocked_order == 2


def test_group_ranks_of_messages_become_global_ranks() -> None:
    trace = reduced(dump([message("send 1->0", 1, record=0)], {"0": (3, 7)}), rank=7)
    assert [(c.peer, c.sends, c.posted - c.done) for c in trace.channels] == [(3, True, 1)]


def test_a_rank_without_entries_has_its_counts_from_pg_status_by_order_of_creation() -> None:
    status = {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 9}
    raw = dump([], {"0": (0, 1), "35": (0, 1)}, pg_status={"0": status, "5": status | {"last_enqueued_collective": 9}})
    groups = {group.name: group for group in reduced(raw).groups}
    assert set(groups) == {"0", "35"}
    assert not groups["35"].counted
    assert groups["35"].enqueued == 9


def test_pg_status_is_not_matched_by_order_when_an_entry_contradicts_it() -> None:
    status = {"last_enqueued_collective": 1, "last_started_collective": -1, "last_completed_collective": 1}
    entry = collective(1) | {"pg_id": 5, "process_group": ("0", "GROUP0")}
    raw = dump([entry], {"0": (0, 1), "35": (0, 1)}, pg_status={"0": status, "5": status})
    assert [group.name for group in reduced(raw).groups] == ["0"]


def test_dumps_of_active_entries_alone_end_before_the_oldest() -> None:
    entries = [collective(seq, record=80 + seq, state="scheduled", retired=False) for seq in (31, 32)]
    (group,) = reduced(dump(entries, PAIR)).groups
    assert (group.completed, group.enqueued) == (30, 32)


def test_sizes_count_where_they_have_to_agree_and_not_where_they_may_differ() -> None:
    def signature(kind: str) -> str:
        return reduced(dump([collective(1, profiling_name=f"nccl:{kind}")], PAIR)).groups[0].tail[0].signature

    assert "[[17]]" in signature("all_reduce")
    assert "[[17]]" in signature("_all_gather_base")
    for kind in ("all_to_all", "all_to_allv", "scatter", "gather", "all_gather_v", "reduce_scatter_v"):
        assert "[[17]]" not in signature(kind), kind


def test_a_coalesced_collective_is_one_operation_with_its_members_signatures() -> None:
    entries = [
        collective(1, record=0, state="scheduled", profiling_name="nccl:_all_gather_base"),
        collective(1, record=1, state="completed", profiling_name="nccl:ALLGATHER_coalesced"),
    ]
    (group,) = reduced(dump(entries, PAIR)).groups
    assert group.completed == 1
    assert len(group.tail) == 1
    assert "_all_gather_base" in group.tail[0].signature


def test_the_stack_is_the_scripts_own_innermost_lines() -> None:
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "step", "filename": "/job/train.py", "line": 12},
    ]
    (group,) = reduced(dump([collective(1, frames=frames)], PAIR)).groups
    assert group.tail[0].stack == "/job/train.py:12 in step"


def test_a_gloo_rank_inside_an_operation_that_is_not_recorded_is_not_elsewhere() -> None:
    status = {"last_enqueued_collective": "5", "last_started_collective": "-1", "last_completed_collective": "4"}
    entries = [collective(1, profiling_name="gloo:all_reduce", state="scheduled", retired=True)]
    assert reduced(dump(entries, PAIR, pg_status={"0": status})).host_state.value == "in_operation"


def test_member_lists_travel_once_and_torn_ones_not_at_all() -> None:
    lists = MemberLists()
    first, again = lists.of("[0, 1]"), lists.of([0, 1])
    assert first == again
    for torn in ("[0, 1", "", "[]", '["a"]', "{}"):
        assert lists.of(torn) is None
    assert len(lists.memberships()) == 1
