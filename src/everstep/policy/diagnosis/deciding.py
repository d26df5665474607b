"""Puts the verdict together from what was found, strongest first; knows no files.

The order is that of flight_recorder.md, section 4.3: movement, disagreements, sinks of the graph of waits.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from everstep.domain.diagnosis import Explanation, HangVerdict
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import HostState, Membership, RankTrace
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis.disagreements import creation_conflicts, disagreements
from everstep.policy.diagnosis.finding import PRIORITY, Finding, last_line, operation_text
from everstep.policy.diagnosis.picture import waiting_arrows
from everstep.policy.diagnosis.silence import excuse_the_silent
from everstep.policy.diagnosis.situation import Situation, survey
from everstep.policy.diagnosis.suspects import findings_of_idle, findings_of_lagging, findings_of_sinks
from everstep.policy.diagnosis.waits import Waits, backward, blocked_by, drop_doubts, find_sinks, point_at, trace_waits
from everstep.policy.wording import name_ranks

_TOGETHER = frozenset((Trouble.FROZEN, Trouble.LOOP_BOUND, Trouble.NEVER_ENTERED, Trouble.GPU_SIDE, Trouble.INSIDE_OP))
"""Faults of single ranks that can happen side by side without one causing the other."""
_ALTERNATIVES_MAX = 8
_COUNTED_MAX = 32
_EVIDENCE_MAX = 8
_SENTENCES_MAX = 4


def diagnose(
    traces: Sequence[RankTrace],
    memberships: Sequence[Membership],
    *,
    expected_ranks: Collection[Rank] = (),
    moved: Collection[Rank] | None = None,
) -> HangVerdict:
    """Decide.

    Args:
        traces: one for each rank that could be had, in any order.
        memberships: the member lists that the traces name.
        expected_ranks: the ranks of the job; those in traces and memberships are always expected.
        moved: ranks whose counters moved between two looks; any of them means that it is no hang.
            None when there was one look only.
    """
    situation = survey(traces, memberships, expected_ranks)
    count = len(situation.traces) + len(situation.silent)
    missing = _missing(situation, moved)
    if not situation.traces:
        return HangVerdict(
            trouble=Trouble.UNKNOWN,
            reason="Unknown, because there is no dump of any rank.",
            missing=missing,
            silent=situation.silent,
            rank_count=count,
        )
    if moved:
        return HangVerdict(
            trouble=Trouble.SLOW,
            reason=f"Not a hang: {name_ranks(sorted(moved))} made progress between two looks.",
            missing=missing,
            silent=situation.silent,
            rank_count=count,
        )
    waits = trace_waits(situation)
    excuse_the_silent(waits)
    find_sinks(waits)
    disputes = [*creation_conflicts(situation), *disagreements(situation)]
    for dispute in disputes:
        if dispute.trouble is not Trouble.GROUP_CREATION and dispute.ranks and dispute.group:
            point_at(waits, dispute.group, dispute.nodes)
    findings = _found(situation, waits, disputes)
    if findings and not findings[0].decided and drop_doubts(waits):
        findings = _found(situation, waits, disputes)
    if not findings:
        return _nobody_waits(situation, waits, missing, count)
    return _verdict(situation, waits, findings, missing)


def _missing(situation: Situation, moved: Collection[Rank] | None) -> tuple[str, ...]:
    missing = []
    if situation.silent:
        missing.append(f"no dump of {name_ranks(situation.silent)}")
    if moved is None and situation.traces:
        missing.append("a second look, which would show whether anything still moves")
    unknown = sum(1 for group in situation.groups.values() if not group.ranks)
    if unknown:
        missing.append(f"member lists of {unknown} groups")
    return tuple(missing)


def _found(situation: Situation, waits: Waits, disputes: Sequence[Finding]) -> list[Finding]:
    findings = list(disputes)
    findings += findings_of_sinks(waits)
    findings += findings_of_lagging(waits)
    findings += findings_of_idle(waits)
    findings += _halted(situation, waits)
    findings.sort(key=_rank_of_finding)
    if len(findings) > 1:
        _count_victims(waits, findings[:_COUNTED_MAX])
        findings.sort(key=lambda finding: (*_rank_of_finding(finding)[:2], -finding.blocked, finding.ranks))
    return findings


def _rank_of_finding(finding: Finding) -> tuple[int, int, tuple[Rank, ...]]:
    """Those that name somebody on their own evidence come first, then by class."""
    strength = (
        0 if finding.ranks and finding.sure else 1 if finding.ranks or finding.trouble is not Trouble.UNKNOWN else 2
    )
    return strength, PRIORITY[finding.trouble], finding.ranks or finding.suspects


def _count_victims(waits: Waits, findings: Sequence[Finding]) -> None:
    back = backward(waits)
    for finding in findings:
        reached = blocked_by(waits, finding.nodes, back)
        finding.blocked = sum(1 for node in reached if node < waits.first_stuck and node not in finding.nodes)


def _halted(situation: Situation, waits: Waits) -> list[Finding]:
    """Processes that are gone or frozen although nobody waits for them yet."""
    findings = []
    for place in situation.stopped:
        trace = situation.traces[place]
        if waits.waited_for[place] or place in situation.lagging or trace.exit_code == 0:
            continue
        ended = trace.host_state is HostState.ENDED
        findings.append(
            Finding(
                trouble=Trouble.DEAD if ended else Trouble.FROZEN,
                nodes=[place],
                ranks=(trace.rank,),
                what=f"has ended with exit code {trace.exit_code}" if ended else "is frozen",
                stack=last_line(situation, place),
            )
        )
    return findings


def _nobody_waits(situation: Situation, waits: Waits, missing: tuple[str, ...], count: int) -> HangVerdict:
    if waits.blind or any(collective or channels for collective, channels in situation.blocked):
        waiting = [i for i, (op, channels) in enumerate(situation.blocked) if op or channels or i in waits.blind]
        return HangVerdict(
            trouble=Trouble.UNKNOWN,
            reason=f"Unknown: {name_ranks(situation.ranks_of(waiting))} wait, and nothing shows for whom.",
            missing=missing,
            silent=situation.silent,
            rank_count=count,
        )
    seen = len(situation.traces)
    return HangVerdict(
        trouble=Trouble.HEALTHY,
        reason=f"Nobody waits for anybody: all {seen} ranks have finished what they entered.",
        missing=missing,
        silent=situation.silent,
        rank_count=count,
    )


def _verdict(situation: Situation, waits: Waits, findings: list[Finding], missing: tuple[str, ...]) -> HangVerdict:
    first = findings[0]
    joined = [one for one in findings if one is first or _stands_beside(first, one)]
    others = [one for one in findings if one not in joined]
    ranks = tuple(sorted({rank for one in joined for rank in one.ranks}))
    hosts = tuple(sorted({h for rank in ranks if (h := _host(situation, rank))}))
    suspects = tuple(sorted({rank for one in joined for rank in one.suspects} - set(ranks)))
    nodes = sorted({node for one in joined for node in one.nodes})
    distance = blocked_by(waits, nodes, backward(waits))
    inside = {situation.index[rank] for rank in suspects if rank in situation.index}
    victims = [
        node for node, steps in distance.items() if steps > 0 and node < len(situation.traces) and node not in inside
    ]
    arrows, left_out = waiting_arrows(waits, distance, {node for one in joined if one.ranks for node in one.nodes})
    seen = len(situation.traces)
    unsure = not ranks and first.trouble is Trouble.UNKNOWN
    return HangVerdict(
        trouble=first.trouble,
        ranks=ranks,
        hosts=hosts,
        suspects=suspects,
        reason=_reason(situation, joined, victims=len(victims), unsure=unsure, missing=missing),
        evidence=tuple(dict.fromkeys(fact for one in joined for fact in one.evidence))[:_EVIDENCE_MAX],
        alternatives=tuple(_explanation(situation, one) for one in others[:_ALTERNATIVES_MAX]),
        operation=first.operation,
        stack=first.stack,
        stack_is_now=bool(first.stack)
        and any(situation.traces[i].stack == first.stack for i in first.nodes if i < seen),
        last_agreed=_last_agreed(situation, first),
        waits=arrows,
        waits_left_out=left_out,
        missing=missing,
        silent=situation.silent,
        rank_count=len(situation.traces) + len(situation.silent),
    )


def _stands_beside(first: Finding, other: Finding) -> bool:
    if not first.ranks:
        return first.trouble is other.trouble and not other.ranks
    if not other.ranks or first.sure != other.sure:
        return False
    same = first.trouble is other.trouble
    return same or (first.trouble in _TOGETHER and other.trouble in _TOGETHER)


def _host(situation: Situation, rank: Rank) -> HostId | None:
    place = situation.index.get(rank)
    return situation.traces[place].host or None if place is not None else None


def _reason(
    situation: Situation, joined: Sequence[Finding], *, victims: int, unsure: bool, missing: tuple[str, ...]
) -> str:
    alike: dict[str, Finding] = {}
    for one in joined:
        like = alike.setdefault(one.what if one.ranks else _sentence(situation, one), one)
        if like is not one:
            like = replace(like, ranks=tuple(sorted({*like.ranks, *one.ranks})))
            alike[one.what] = like
    sentences = [_sentence(situation, one) for one in alike.values()]
    clauses = sentences[:_SENTENCES_MAX]
    if len(sentences) > _SENTENCES_MAX:
        rest = sorted({rank for one in list(alike.values())[_SENTENCES_MAX:] for rank in one.ranks or one.suspects})
        clauses.append(f"The same holds for {name_ranks(rest)}.")
    if unsure:
        because = f", because of {missing[0]}" if missing and missing[0].startswith("no dump") else ""
        clauses.insert(0, f"The culprit is unknown{because}.")
    if victims:
        clauses.append(
            f"{victims} other {'rank waits' if victims == 1 else 'ranks wait'} for that, directly or through others."
        )
    return " ".join(clauses)


def _sentence(situation: Situation, finding: Finding) -> str:
    if not finding.ranks:
        return f"{finding.what[:1].upper()}{finding.what[1:]}."
    hosts = sorted({str(h) for rank in finding.ranks if (h := _host(situation, rank))})
    place = f" on {', '.join(hosts[:4])}" if hosts else ""
    name = name_ranks(finding.ranks)
    return f"{name[:1].upper()}{name[1:]}{place} {_for_many(finding.what) if len(finding.ranks) > 1 else finding.what}."


def _for_many(what: str) -> str:
    """Sentences are written for one rank."""
    for one, many in (("has ", "have "), ("is ", "are "), ("was ", "were "), ("does ", "do ")):
        if what.startswith(one):
            return f"{many}{what.removeprefix(one)}"
    return what


def _explanation(situation: Situation, finding: Finding) -> Explanation:
    return Explanation(
        trouble=finding.trouble,
        ranks=finding.ranks,
        suspects=finding.suspects,
        reason=_sentence(situation, finding),
        evidence=finding.evidence,
        blocked=finding.blocked,
    )


def _last_agreed(situation: Situation, finding: Finding) -> str:
    group = finding.group
    if group is None:
        return ""
    completed = [part.completed for _, part in group.seen if part.counted or not group.messages]
    newest = min(completed, default=0)
    return operation_text(situation, group, newest) if newest > 0 else ""
