"""Rings become traces: ends, messages matched across ranks, the host's state, group creations."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep.adapters.evidence.operation_names import OPERATIONS, REDUCE_OPS
from everstep.adapters.evidence.operation_ring import RingGroup, RingReader, RingWriter, TextKind, create_ring
from everstep.adapters.evidence.ring_trace import RankFacts, drained_groups, reduce_rings
from everstep.domain.evidence import Frame, ProcessState
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import ChannelTrace, HostState, Membership, OpState, RankTrace
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis import diagnose
from everstep.policy.trace_summary import identity_of

WORLD = RingGroup(name="0", description="default_pg", ranks=(Rank(0), Rank(1)), created=1)
IN_TORCH = (Frame(file="/x/torch/distributed/distributed_c10d.py", line=1, function="recv"),)
IN_SCRIPT = (Frame(file="train.py", line=5, function="main"),)


class Op(NamedTuple):
    name: str
    seq: int
    peer: int = -1
    done: bool = True
    reduces: str = ""


class Host:
    """Two ranks' rings."""

    def __init__(self, folder: Path) -> None:
        self._writers, self._readers = [], []
        for rank in range(2):
            create_ring(folder / f"{rank}.ring", rank=rank)
            self._writers.append(RingWriter(folder / f"{rank}.ring"))
            self._readers.append(RingReader(folder / f"{rank}.ring"))
            self._writers[rank].add_group(TextKind.GROUP, 1, WORLD)

    def write(self, rank: int, *operations: Op) -> None:
        for op in operations:
            place = (1, op.seq, op.peer, 0)
            unseen = op.name == "reduce_scatter"
            what = (OPERATIONS.index(op.name), 1, REDUCE_OPS.index(op.reduces), unseen)
            number = self._writers[rank].record(place, what, (1, 8), (8,))
            if op.done and not unseen:
                self._writers[rank].done(number)

    def create(self, rank: int, ranks: Sequence[int] | None, *, begun: int) -> None:
        group = RingGroup(name="1", ranks=tuple(map(Rank, ranks)), created=begun) if ranks is not None else None
        self._writers[rank].add_group(TextKind.CREATING, 0, group)
        self._writers[rank].count_creations(begun)

    def traces(self, *facts: RankFacts) -> list[RankTrace]:
        known = facts or (RankFacts(process=ProcessState.SLEEPING, stack=IN_TORCH),) * 2
        views = {Rank(rank): reader.view() for rank, reader in enumerate(self._readers)}
        found, lists = reduce_rings(HostId("h"), views, dict(zip(views, known, strict=True)))
        assert {group.members for trace in found.values() for group in trace.groups} <= {one.identity for one in lists}
        return [found[Rank(rank)] for rank in range(2)]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def channel(trace: RankTrace) -> ChannelTrace:
    (only,) = trace.channels
    return only


def test_a_rank_waits_in_its_oldest_operation_that_has_not_ended(host: Host) -> None:
    host.write(0, Op("all_reduce", 1), Op("broadcast", 2, peer=1, done=False), Op("barrier", 3, done=False))
    host.write(1, Op("all_reduce", 1))
    waiting, idle = host.traces(
        RankFacts(process=ProcessState.SLEEPING, stack=IN_TORCH),
        RankFacts(process=ProcessState.SLEEPING, stack=IN_SCRIPT, in_lock=False),
    )
    (group,) = waiting.groups
    assert (group.enqueued, group.completed, waiting.blocked_order) == (3, 1, 1)
    assert [op.signature for op in group.tail] == [
        "all_reduce of [8] float32",
        "broadcast of [8] float32 root 1",
        "barrier",
    ]
    assert [op.state for op in group.tail] == [OpState.DONE, OpState.STARTED, OpState.STARTED]
    assert (waiting.host_state, idle.host_state, idle.blocked_order) == (
        HostState.IN_OPERATION,
        HostState.ELSEWHERE,
        -1,
    )


def test_ranks_that_reduce_in_different_ways_do_not_match(host: Host) -> None:
    host.write(0, Op("all_reduce", 1, reduces="sum", done=False))
    host.write(1, Op("all_reduce", 1, reduces="max", done=False))
    traces = host.traces()
    assert [trace.groups[0].tail[0].signature for trace in traces] == [
        "all_reduce sum of [8] float32",
        "all_reduce max of [8] float32",
    ]
    verdict = diagnose(traces, [Membership(identity=identity_of(WORLD.ranks), ranks=WORLD.ranks)], moved=())
    assert (verdict.trouble, verdict.suspects) == (Trouble.MISMATCH, WORLD.ranks)


def test_a_message_that_both_ends_have_posted_is_through_though_nobody_waited_for_it(host: Host) -> None:
    host.write(0, Op("send", 1, peer=1, done=False), Op("send", 2, peer=1, done=False))
    host.write(1, Op("recv", 1, peer=0, done=False))
    sender, receiver = (channel(trace) for trace in host.traces())
    assert (sender.posted, sender.done, sender.order) == (2, 1, 1)
    assert (receiver.posted, receiver.done, receiver.order) == (1, 1, -1)


def test_reduce_scatter_is_over_once_anything_follows_or_the_host_is_elsewhere(host: Host) -> None:
    host.write(0, Op("reduce_scatter", 1))
    assert host.traces()[0].groups[0].completed == 0
    elsewhere = RankFacts(process=ProcessState.SLEEPING, stack=IN_SCRIPT)
    assert host.traces(elsewhere, elsewhere)[0].groups[0].completed == 1
    host.write(0, Op("all_reduce", 2))
    assert host.traces()[0].groups[0].completed == 2


def test_what_python_could_not_say_the_recorder_of_pytorch_does(host: Host) -> None:
    host.write(0, Op("all_reduce", 1, done=False))
    facts = RankFacts(process=ProcessState.RUNNING, gil_free=False, drained=drained_groups([("0 (default_pg)", 1, 1)]))
    trace = host.traces(facts, facts)[0]
    assert trace.groups[0].completed == 1
    assert trace.host_state is HostState.FROZEN


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (RankFacts(process=ProcessState.STOPPED), HostState.FROZEN),
        (RankFacts(process=ProcessState.GONE, exit_code=-9), HostState.ENDED),
        (RankFacts(process=ProcessState.SLEEPING, stack=IN_SCRIPT, in_lock=True), HostState.IN_OPERATION),  # req.wait()
        (RankFacts(process=ProcessState.SLEEPING, stack=IN_SCRIPT, in_lock=False), HostState.ELSEWHERE),
        (RankFacts(process=ProcessState.SLEEPING), HostState.UNKNOWN),
    ],
)
def test_the_state_of_the_host_with_an_operation_under_way(host: Host, facts: RankFacts, state: HostState) -> None:
    host.write(0, Op("recv", 1, peer=1, done=False))
    assert host.traces(facts, facts)[0].host_state is state


def test_a_group_that_is_being_created_is_an_operation_of_everybody(host: Host) -> None:
    host.create(0, (0, 1), begun=2)
    host.create(1, None, begun=1)
    stuck, absent = (trace.groups[-1] for trace in host.traces())
    assert stuck.name == absent.name == "group creation"
    assert (stuck.enqueued, stuck.completed, absent.enqueued) == (2, 1, 1)
    assert stuck.tail[-1].signature == "new_group of ranks [0, 1]"
