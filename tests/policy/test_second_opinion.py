"""What the operations say about silences and ends, and where they are not asked."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from everstep.domain.causes import Cause
from everstep.domain.events import WorkerExited
from everstep.domain.evidence import Frame, ProcessState, RankSummary
from everstep.domain.ids import Attempt, HostId, Rank
from everstep.domain.phases import Phase
from everstep.domain.recorder import GroupTrace, HostState, Membership, Operation, OpState, RankTrace
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.blame import blame
from everstep.policy.group_creation import CREATION, judge_creation
from everstep.policy.second_opinion import opinion_on_ends, opinion_on_silence

HOST = HostId("h")
EVERYBODY = Membership(identity="all", ranks=tuple(map(Rank, range(4))))
OPEN = Verdict(
    trouble=Trouble.UNKNOWN, ranks=(), hosts=(), reason="?", cause=Cause(component="", category=""), signature=""
)


def group(signatures: Sequence[str], *, done: int, name: str = "0") -> GroupTrace:
    tail = tuple(
        Operation(
            seq=seq,
            kind=signature.split()[0],
            signature=signature,
            state=OpState.DONE if seq <= done else OpState.STARTED,
            stack=f"train.py:{seq} in main",
            order=seq,
        )
        for seq, signature in enumerate(signatures, start=1)
    )
    return GroupTrace(
        name=name, members="all", enqueued=len(tail), started=len(tail), completed=done, tail=tail, ordered=False
    )


def summary(rank: int, part: GroupTrace, *, state: HostState = HostState.IN_OPERATION) -> RankSummary:
    return RankSummary(
        rank=Rank(rank),
        host=HOST,
        process=ProcessState.SLEEPING,
        phase=Phase.TRAINING,
        step=3,
        silence_s=2.0,
        stack=(Frame(file="train.py", line=9, function="main"),),
        trace=RankTrace(
            rank=Rank(rank),
            host=HOST,
            groups=(part,),
            host_state=state,
            blocked_order=part.completed + 1 if part.enqueued > part.completed else -1,
        ),
        memberships=(EVERYBODY,) if rank == 0 else (),
    )


def mismatched(culprit: int) -> list[RankSummary]:
    usual, other = ["all_reduce of [4] float32"] * 3, ["all_reduce of [4] float32"] * 2 + ["all_reduce of [4] float64"]
    return [summary(rank, group(other if rank == culprit else usual, done=2)) for rank in range(4)]


@pytest.mark.parametrize("culprit", range(4))
def test_the_rank_with_the_other_operation_is_named(culprit: int) -> None:
    opinion = opinion_on_silence(OPEN, mismatched(culprit))
    assert opinion is not None
    verdict, excuse = opinion
    assert (verdict.trouble, verdict.ranks, excuse) == (Trouble.MISMATCH, (culprit,), None)
    assert "float64" in verdict.reason


@pytest.mark.parametrize("trouble", [Trouble.SLOW, Trouble.FROZEN, Trouble.DEAD])
def test_what_the_kernel_says_stands(trouble: Trouble) -> None:
    assert opinion_on_silence(replace(OPEN, trouble=trouble, ranks=(Rank(1),)), mismatched(2)) is None


def test_without_a_record_of_operations_nothing_changes() -> None:
    assert opinion_on_silence(OPEN, [replace(one, trace=None) for one in mismatched(2)]) is None


def exited(rank: int, code: int, *, message: str = "", phase: Phase = Phase.TRAINING) -> WorkerExited:
    return WorkerExited(
        at_s=1.0 + rank / 100,
        attempt=Attempt(1),
        host=HOST,
        rank=Rank(rank),
        pid=100 + rank,
        exit_code=code,
        phase=phase,
        step=3,
        error_type="RuntimeError" if message else "",
        error_message=message,
        last_lines="terminate called after throwing an instance of 'gloo::EnforceNotMet'" if code == -6 else "",
    )


LOST = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:16769."


@pytest.mark.parametrize("innocent", [0, 1, 3])
def test_the_neighbour_that_gloo_aborts_is_not_named(innocent: int) -> None:
    exits = [exited(innocent, -6), *(exited(rank, 1, message=LOST) for rank in range(4) if rank != innocent)]
    ended = [replace(one, exit_code=1) for one in mismatched(2)]
    found = blame(exits, world_size=4)
    assert found is not None
    better = opinion_on_ends(found, exits, ended)
    assert (better.verdict.trouble, better.verdict.ranks) == (Trouble.MISMATCH, (2,))
    assert f"rank {innocent}" in better.verdict.evidence[-1]


def test_ends_whose_operations_agree_keep_their_verdict() -> None:
    exits = [exited(rank, 1, message=LOST) for rank in range(4)]
    agreed = [summary(rank, group(["all_reduce of [4] float32"], done=1)) for rank in range(4)]
    found = blame(exits, world_size=4)
    assert found is not None
    assert opinion_on_ends(found, exits, agreed) is found
    assert not found.verdict.ranks


def test_who_left_the_loop_early_is_named_by_what_it_never_entered() -> None:
    exits = [exited(1, 0, phase=Phase.ENDING), *(exited(rank, 1, message=LOST) for rank in (0, 2, 3))]
    parts = [summary(rank, group(["barrier"] * (2 if rank == 1 else 3), done=2)) for rank in range(4)]
    found = blame(exits, world_size=4)
    assert found is not None
    better = opinion_on_ends(found, exits, parts).verdict
    assert (better.trouble, better.ranks) == (Trouble.LOOP_BOUND, (1,))


def test_a_raised_error_stays_the_cause_whatever_the_operations_say() -> None:
    exits = [exited(3, 1, message="the loss is NaN"), *(exited(rank, 1, message=LOST) for rank in range(3))]
    found = blame(exits, world_size=4)
    assert found is not None
    assert opinion_on_ends(found, exits, mismatched(2)) is found


def creation(
    rank: int, begun: int, ranks: str, *, stuck: bool = True, state: HostState = HostState.IN_OPERATION
) -> RankTrace:
    tail = (
        Operation(
            seq=begun,
            kind="new_group",
            signature=f"new_group of ranks {ranks}",
            state=OpState.STARTED if stuck else OpState.DONE,
            order=1,
        ),
    )
    part = GroupTrace(name=CREATION, members="all", enqueued=begun, started=begun, completed=begun - stuck, tail=tail)
    return RankTrace(rank=Rank(rank), host=HOST, groups=(part,), host_state=state, stack=("train.py:9 in main",))


def test_who_asks_for_other_members_disagrees_about_the_group() -> None:
    found = judge_creation([creation(rank, 2, "[0, 1, 2, 3]" if rank == 1 else "[0, 2, 3]") for rank in range(4)])
    assert found is not None
    assert (found.trouble, found.ranks) == (Trouble.GROUP_CREATION, (1,))


@pytest.mark.parametrize(
    ("state", "trouble"),
    [(HostState.ELSEWHERE, Trouble.NEVER_ENTERED), (HostState.IN_OPERATION, Trouble.GROUP_CREATION)],
)
def test_who_never_comes_to_a_creation_is_late_or_has_skipped_it(state: HostState, trouble: Trouble) -> None:
    traces = [creation(rank, 2, "[0, 1, 2]") for rank in (0, 1)]
    found = judge_creation([*traces, creation(2, 1, "[0, 1, 2, 3]", stuck=False, state=state)])
    assert found is not None
    assert (found.trouble, found.ranks) == (trouble, (2,))


def test_without_a_creation_under_way_there_is_nothing_to_judge() -> None:
    assert judge_creation([creation(0, 2, "[0, 1]", stuck=False)]) is None
    assert judge_creation([]) is None
