"""Asks the analyser, which reads operations, where counts and stacks alone leave a silence or an end open.

It changes no verdict that rests on what the kernel says. Whoever waits stays innocent here as there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from everstep.domain.causes import Cause
from everstep.domain.diagnosis import HangVerdict
from everstep.domain.events import WorkerExited
from everstep.domain.evidence import RankSummary
from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.domain.recorder import GroupTrace, HostState, Operation, OpState, RankTrace
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.blame import Blame
from everstep.policy.diagnosis import diagnose
from everstep.policy.excuses import excuse_for
from everstep.policy.group_creation import judge_creation, without_creations
from everstep.policy.wording import fold_ranks, name_ranks, own_line

_ABORTED = -6
_SAYS_MORE = frozenset(
    (
        *(Trouble.MISMATCH, Trouble.ORDER_DEADLOCK, Trouble.EXTRA_COLLECTIVE, Trouble.LOOP_BOUND),
        *(Trouble.GROUP_CREATION, Trouble.NEVER_ENTERED, Trouble.GPU_SIDE),
    )
)
_CAUSES = {
    Trouble.NEVER_ENTERED: Cause(component="Stuck Before a Collective", category="Software"),
    Trouble.GPU_SIDE: Cause(component="GPU", category="Hardware"),
}
_DISAGREEMENT = Cause(component="Disagreeing Collectives", category="Software")


def opinion_on_silence(verdict: Verdict, now: Sequence[RankSummary]) -> tuple[Verdict, Phase | None] | None:
    """A better verdict on a silence, with the excuse on the culprit's stack; None when there is none.

    Args:
        verdict: what counts and stacks say.
        now: the later snapshot.
    """
    by_rank = {summary.rank: summary for summary in now}
    traces = [summary.trace for summary in now if summary.trace is not None]
    if not traces or not _open_to_doubt(verdict, by_rank):
        return None
    found = judge_creation(traces) or _ask(traces, now)
    if found.trouble not in _SAYS_MORE or not (found.ranks or found.suspects):
        return None
    if found.trouble is verdict.trouble and found.ranks == verdict.ranks:
        return None
    idle = found.trouble is Trouble.NEVER_ENTERED and found.ranks
    excuse = excuse_for(by_rank[found.ranks[0]].stack) if idle else None
    return _verdict(found, by_rank), excuse


def _open_to_doubt(verdict: Verdict, now: dict[Rank, RankSummary]) -> bool:
    if verdict.trouble is Trouble.DEAD:  # one that ended well may be the first to leave, or just done
        return all(now[rank].exit_code == 0 for rank in verdict.ranks)
    return verdict.trouble in (Trouble.UNKNOWN, Trouble.INSIDE_OP, Trouble.NEVER_ENTERED)


def _ask(traces: Sequence[RankTrace], now: Sequence[RankSummary]) -> HangVerdict:
    """The analyser's verdict. A defect in it must not take a running job along: then it knows nothing, and says so."""
    try:
        return diagnose(
            [replace(trace, groups=without_creations(trace)) for trace in traces],
            [membership for summary in now for membership in summary.memberships],
            expected_ranks=[summary.rank for summary in now],
            moved=(),
        )
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        return HangVerdict(trouble=Trouble.UNKNOWN, reason=f"The analyser failed ({type(error).__name__}: {error}).")


def _verdict(found: HangVerdict, now: dict[Rank, RankSummary]) -> Verdict:
    line = own_line(now[found.ranks[0]].stack) if found.ranks else None
    where = str(line) if line else (found.stack[0] if found.stack else "")
    return Verdict(
        trouble=found.trouble,
        ranks=found.ranks,
        hosts=tuple(sorted({now[rank].host for rank in found.ranks})),
        reason=found.reason,
        evidence=found.evidence,
        where=where,
        cause=_CAUSES.get(found.trouble, _DISAGREEMENT),
        signature=f"hang {found.trouble} {where} {fold_ranks(found.ranks)}",
    )


def opinion_on_ends(found: Blame, exits: Sequence[WorkerExited], now: Sequence[RankSummary]) -> Blame:
    """The blame for ends that look like those of victims, when the rings show what the ranks disagreed on.

    gloo ends the process of an often innocent neighbour when sizes differ, and the others lose their connections.
    """
    by_rank = {summary.rank: summary for summary in now}
    traces = [summary.trace for summary in now if summary.trace is not None]
    aborted = found.verdict.trouble is Trouble.DEAD and found.culprit.exit_code == _ABORTED
    if not traces or not (aborted or found.verdict.trouble is Trouble.LOST_CONNECTION):
        return found
    told = _ask(_up_to_the_first_difference(traces), now)
    if told.trouble in _SAYS_MORE and told.ranks and told.operation:
        return replace(found, verdict=_with_aborts(_verdict(told, by_rank), exits), certain=True)
    if early := _left_early(traces, exits):
        return replace(found, verdict=_left_verdict(early, exits, by_rank), certain=True)
    return found


def _with_aborts(verdict: Verdict, exits: Sequence[WorkerExited]) -> Verdict:
    ended = [end.rank for end in exits if end.exit_code == _ABORTED]
    if not ended:
        return verdict
    return replace(verdict, evidence=(*verdict.evidence, f"the library then aborted {name_ranks(ended)}"))


def _up_to_the_first_difference(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces as they were while the ranks were in the first operation on which they disagreed.

    A failure ends whatever was under way, so nothing seems to be waited for; what was asked for still tells.
    """
    parts: dict[tuple[str, str], list[GroupTrace]] = {}
    for trace in traces:
        for group in trace.groups:
            parts.setdefault((group.name, group.members), []).append(group)
    differences = {key: seq for key, groups in parts.items() if (seq := _first_difference(groups)) is not None}
    return [_cut(trace, differences) for trace in traces]


def _first_difference(parts: Sequence[GroupTrace]) -> int | None:
    signatures: dict[int, Counter[str]] = {}
    for part in parts:
        for operation in part.tail:
            signatures.setdefault(operation.seq, Counter())[operation.signature] += 1
    return min((seq for seq, votes in signatures.items() if len(votes) > 1), default=None)


def _cut(trace: RankTrace, differences: dict[tuple[str, str], int]) -> RankTrace:
    groups = []
    blocked = -1
    for group in trace.groups:
        seq = differences.get((group.name, group.members))
        if seq is None:
            groups.append(replace(group, completed=group.enqueued, tail=tuple(map(_done, group.tail))))
            continue
        tail = tuple(_done(op) if op.seq < seq else replace(op, state=OpState.STARTED) for op in group.tail)
        first = next((op for op in tail if op.seq == seq), None)
        blocked = first.order if first else blocked
        groups.append(replace(group, completed=min(group.enqueued, seq - 1), tail=tail))
    state = HostState.IN_OPERATION if blocked >= 0 else HostState.UNKNOWN
    return replace(
        trace, groups=tuple(groups), channels=(), host_state=state, blocked_order=blocked, exit_code=None, stack=()
    )


def _done(operation: Operation) -> Operation:
    return replace(operation, state=OpState.DONE)


def _left_early(traces: Sequence[RankTrace], exits: Sequence[WorkerExited]) -> list[Rank]:
    """Ranks whose script came to its end while others had entered collectives that they never did."""
    entered = {trace.rank: sum(group.enqueued for group in without_creations(trace)) for trace in traces}
    leavers = [end.rank for end in exits if end.phase is Phase.ENDING and not end.error_type and end.rank in entered]
    others = [entered[rank] for rank in entered if rank not in leavers]
    if not leavers or not others:
        return []
    return sorted(rank for rank in leavers if entered[rank] < max(others))


def _left_verdict(early: Sequence[Rank], exits: Sequence[WorkerExited], now: dict[Rank, RankSummary]) -> Verdict:
    ranks = tuple(early)
    first = now[ranks[0]]
    step = next(end.step for end in exits if end.rank == ranks[0])
    stack = _last_place(first)
    return Verdict(
        trouble=Trouble.LOOP_BOUND,
        ranks=ranks,
        hosts=tuple(sorted({now[rank].host for rank in ranks})),
        reason=f"{name_ranks(ranks)} left the loop after step {step} and ended, while the other ranks went on "
        f"to a collective that {'it' if len(ranks) == 1 else 'they'} never entered"
        f"{f'; its last one was at {stack}' if stack else ''}.",
        evidence=(f"{name_ranks([end.rank for end in exits if end.rank not in ranks])} lost the connection to a peer",),
        where=stack,
        cause=_DISAGREEMENT,
        signature=f"hang {Trouble.LOOP_BOUND} {stack} {fold_ranks(ranks)}",
    )


def _last_place(summary: RankSummary) -> str:
    operations = [op for group in (summary.trace.groups if summary.trace else ()) for op in group.tail]
    return max(operations, key=lambda op: op.order).stack if operations else ""
