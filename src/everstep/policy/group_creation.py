"""Who disagrees about a process group that others are creating and cannot finish; it judges nothing else.

Group names come from a counter in each process, so one that skipped a creation, or asked for other members, shifts all
that follow. PyTorch's recorder shows nothing of it. Here a creation is a collective of everybody, by that counter.
"""

import re
from collections import Counter
from collections.abc import Sequence

from everstep.domain.diagnosis import HangVerdict
from everstep.domain.ids import Rank
from everstep.domain.recorder import GroupTrace, HostState, Operation, OpState, RankTrace
from everstep.domain.verdicts import Trouble
from everstep.policy.wording import name_ranks

CREATION = "group creation"
"""Name of the group whose operations are the creations of groups; one of a group without this rank has no signature."""


def without_creations(trace: RankTrace) -> tuple[GroupTrace, ...]:
    return tuple(group for group in trace.groups if group.name != CREATION)


def judge_creation(traces: Sequence[RankTrace]) -> HangVerdict | None:
    """The verdict about the earliest creation that does not end; None when no rank is at one."""
    creations = {trace.rank: group for trace in traces for group in trace.groups if group.name == CREATION}
    stuck = {rank: group.tail[-1] for rank, group in creations.items() if group.tail[-1].state is not OpState.DONE}
    if not stuck:
        return None
    number = min(operation.seq for operation in stuck.values())
    asked = {
        rank: operation
        for rank, group in creations.items()
        for operation in group.tail
        if operation.seq == number and operation.signature
    }
    votes = Counter(operation.signature for operation in asked.values())
    if len(votes) > 1:
        return _different_members(asked, votes, number)
    members = _ranks(next(iter(votes)))
    absent = [
        trace
        for trace in traces
        if trace.rank in members and _begun(creations.get(trace.rank)) < number and trace.rank not in stuck
    ]
    if not absent:
        return None
    elsewhere = all(trace.host_state is HostState.ELSEWHERE for trace in absent)
    ranks = tuple(sorted(trace.rank for trace in absent))
    where = f": it stands at {absent[0].stack[0]}" if absent[0].stack else ""
    return HangVerdict(
        trouble=Trouble.NEVER_ENTERED if elsewhere else Trouble.GROUP_CREATION,
        ranks=ranks,
        hosts=tuple(sorted({trace.host for trace in absent})),
        reason=f"{name_ranks(ranks)} never came to the creation of group {number} with ranks {sorted(members)}, "
        f"in which {name_ranks(sorted(stuck))} wait{where}.",
        evidence=(f"group creations begun: {_counts(creations, ranks)}",),
        stack=absent[0].stack,
        operation=f"new_group of ranks {sorted(members)}",
        rank_count=len(traces),
    )


def _different_members(asked: dict[Rank, Operation], votes: Counter[str], number: int) -> HangVerdict:
    fewest = min(votes.values())
    tie = fewest == max(votes.values())
    ranks = tuple(sorted(rank for rank, op in asked.items() if tie or votes[op.signature] == fewest))
    sides = "; ".join(
        f"{name_ranks(sorted(rank for rank, op in asked.items() if op.signature == signature))}: {signature}"
        for signature, _ in votes.most_common()
    )
    return HangVerdict(
        trouble=Trouble.GROUP_CREATION,
        ranks=ranks,
        reason=f"The ranks disagree about the creation of process group {number}, and {name_ranks(ranks)} "
        f"{'are as many as the others' if tie else 'differ from the others'}: {sides}.",
        evidence=(sides,),
        operation=f"creation of group {number}",
        rank_count=len(asked),
    )


def _ranks(signature: str) -> frozenset[Rank]:
    return frozenset(Rank(int(text)) for text in re.findall(r"\d+", signature))


def _begun(group: GroupTrace | None) -> int:
    return group.enqueued if group else 0


def _counts(creations: dict[Rank, GroupTrace], ranks: Sequence[Rank]) -> str:
    return ", ".join(f"rank {rank} {_begun(creations.get(rank))}" for rank in ranks)
