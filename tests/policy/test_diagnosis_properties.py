"""What never changes a culprit: the order of the ranks, the names of groups, healthy groups beside, a host's clock."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.diagnose import Traces
from bench.synthetic_jobs import FAULTS, Shape, hang
from everstep.domain.ids import Rank
from everstep.domain.recorder import GroupTrace, Membership, RankTrace
from everstep.policy.diagnosis import diagnose

SHAPE = Shape(2, 2, 3)
Job = tuple[list[RankTrace], list[Membership]]


def made(fault: str, seed: int) -> tuple[Job, frozenset[Rank] | None]:
    job = hang(SHAPE, fault, random.Random(seed))
    return Traces(job).all(), job.moved  # type: ignore[return-value]


def said(job: Job, moved: frozenset[Rank] | None) -> tuple[str, tuple[Rank, ...], tuple[Rank, ...]]:
    verdict = diagnose(*job, expected_ranks=[Rank(rank) for rank in range(SHAPE.ranks)], moved=moved)
    return verdict.trouble.value, verdict.ranks, verdict.suspects


faults = st.sampled_from([fault for fault in FAULTS if fault != "gpu_unstarted"])


@given(faults, st.integers(0, 10_000), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_ranks_and_member_lists_does_not_matter(fault: str, seed: int, rng: random.Random) -> None:
    (traces, memberships), moved = made(fault, seed)
    before = said((traces, memberships), moved)
    rng.shuffle(traces)
    rng.shuffle(memberships)
    assert said((traces, memberships), moved) == before


@given(faults, st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_the_names_of_groups_do_not_matter(fault: str, seed: int) -> None:
    (traces, memberships), moved = made(fault, seed)
    renamed = [
        replace(
            trace,
            groups=tuple(replace(one, name=f"g{999 - int(one.name)}") for one in trace.groups),
            channels=tuple(replace(one, group=f"g{999 - int(one.group)}") for one in trace.channels),
        )
        for trace in traces
    ]
    assert said((renamed, memberships), moved) == said((traces, memberships), moved)


@given(faults, st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_healthy_groups_beside_do_not_matter(fault: str, seed: int) -> None:
    (traces, memberships), moved = made(fault, seed)
    everybody = tuple(Rank(rank) for rank in range(SHAPE.ranks))
    idle = GroupTrace(name="888", description="IDLE", members="idle", enqueued=5, started=5, completed=5)
    wider = [replace(trace, groups=(*trace.groups, idle)) for trace in traces]
    lists = [*memberships, Membership(identity="idle", ranks=everybody)]
    assert said((wider, lists), moved) == said((traces, memberships), moved)


@given(faults, st.integers(0, 10_000), st.integers(0, 11), st.integers(-(10**12), 10**12))
@settings(max_examples=40, deadline=None)
def test_a_hosts_clock_does_not_matter(fault: str, seed: int, rank: int, shift_ns: int) -> None:
    (traces, memberships), moved = made(fault, seed)
    shifted = [
        replace(
            trace,
            last_ns=trace.last_ns + shift_ns,
            groups=tuple(
                replace(g, tail=tuple(replace(op, at_ns=op.at_ns + shift_ns) for op in g.tail)) for g in trace.groups
            ),
        )
        if trace.rank == rank
        else trace
        for trace in traces
    ]
    assert said((shifted, memberships), moved) == said((traces, memberships), moved)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", [Shape(4, 4, 4), Shape(4, 2, 4), Shape(8, 1, 4), Shape(4, 1, 1)], ids=str)
def test_no_innocent_rank_is_named(fault: str, shape: Shape) -> None:
    for seed in range(6):
        if fault == "order" and shape.dp == 1:
            continue
        job = hang(shape, fault, random.Random(seed))
        traces, memberships = Traces(job).all()
        verdict = diagnose(
            traces,
            memberships,
            expected_ranks=[Rank(rank) for rank in range(shape.ranks)],
            moved=job.moved,  # type: ignore[arg-type]
        )
        assert set(verdict.ranks) <= job.truth.ranks, f"seed {seed}: {verdict.trouble} {verdict.reason}"


@pytest.mark.parametrize("fault", ["gpu_lag", "gpu_unstarted"])
def test_two_equal_gpu_errors_in_one_group_are_both_named(fault: str) -> None:
    shape = Shape(4, 4, 4)
    for seed in range(12):
        job = hang(shape, fault, random.Random(seed))
        (rank,) = job.truth.ranks
        other = next(one for one in shape.members("tp", rank) if one != rank)
        job.missing = frozenset()
        if fault == "gpu_lag":
            job.done[other], job.entered[other] = job.done[rank], job.entered[rank]
        elif job.program(rank)[job.done[rank]].group != "tp":
            continue  # elsewhere they do not meet in one operation
        else:
            job.unstarted = frozenset((rank, other))
        traces, memberships = Traces(job).all()
        verdict = diagnose(traces, memberships, expected_ranks=[Rank(one) for one in range(shape.ranks)])
        assert (verdict.trouble.value, set(verdict.ranks)) == ("gpu_side", {rank, other}), seed
