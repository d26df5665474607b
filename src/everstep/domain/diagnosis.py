"""What a diagnosis says about a job that does not move; it knows nothing of how one comes to it."""

from dataclasses import dataclass

from everstep.domain.ids import HostId, Rank
from everstep.domain.verdicts import Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One explanation that fits, with what speaks for it.

    Attributes:
        trouble: its class.
        ranks: the ranks it names, ascending; empty when it names none.
        suspects: ranks among which the culprit is, when the evidence goes no further; none of them is blamed.
        reason: one sentence.
        evidence: the facts it rests on, one sentence each.
        blocked: how many ranks wait, directly or through others, for what it names.
    """

    trouble: Trouble
    ranks: tuple[Rank, ...] = ()
    suspects: tuple[Rank, ...] = ()
    reason: str
    evidence: tuple[str, ...] = ()
    blocked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An arrow of the waits-for picture: ranks that wait in one operation, and the ranks they wait for.

    Attributes:
        waiting: ranks that wait, ascending.
        operation: what they wait in, such as `all_reduce of [[17]], number 12 of group 3 (TENSOR)`.
        missing: ranks that keep it from ending, ascending; empty when all are in it.
        why: `not entered`, `no dump`, …
    """

    waiting: tuple[Rank, ...]
    operation: str
    missing: tuple[Rank, ...]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Why a job does not move.

    Attributes:
        trouble: the class; HEALTHY and SLOW are no hangs.
        ranks: the ranks at fault, ascending; never one that waits for others; empty when unknown or nobody's.
        hosts: their hosts, sorted, where known.
        suspects: ranks among which the culprit is, when the evidence goes no further; none of them is blamed.
        reason: one paragraph for the person on call.
        evidence: the facts it rests on, one sentence each.
        alternatives: other explanations that fit, likeliest first.
        operation: the operation that everything waits for; empty when there is none.
        stack: of the first culprit, innermost first; empty when unknown.
        stack_is_now: it is where its Python stands; else where its newest, or the disputed, operation was called from.
        last_agreed: the newest operation that all ranks of that group are known to have finished; empty when unknown.
        waits: who waits for whom, the cause first.
        waits_left_out: how many more kinds of waits there are, farther from the cause.
        missing: what was not there: ranks without a dump, files that could not be read, clocks.
        silent: expected ranks without a trace, ascending.
        rank_count: ranks that were expected.
    """

    trouble: Trouble
    ranks: tuple[Rank, ...] = ()
    hosts: tuple[HostId, ...] = ()
    suspects: tuple[Rank, ...] = ()
    reason: str
    evidence: tuple[str, ...] = ()
    alternatives: tuple[Explanation, ...] = ()
    operation: str = ""
    stack: tuple[str, ...] = ()
    stack_is_now: bool = False
    last_agreed: str = ""
    waits: tuple[Waiting, ...] = ()
    waits_left_out: int = 0
    missing: tuple[str, ...] = ()
    silent: tuple[Rank, ...] = ()
    rank_count: int = 0
