"""What a sink of the graph of waits amounts to: which class, which ranks, and what speaks for it (4.4).

A rank that waits for something that is shown is no sink alone, and so never named alone.
"""

import re
from collections.abc import Iterator, Sequence

from everstep.domain.recorder import HostState
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis.circles import findings_of_circle
from everstep.policy.diagnosis.components import components
from everstep.policy.diagnosis.disagreements import silent_shift
from everstep.policy.diagnosis.finding import Finding, last_line, operation_text, waiting_text
from everstep.policy.diagnosis.situation import Situation, operation_at, unstarted_members
from everstep.policy.diagnosis.waits import Stuck, Waits
from everstep.policy.wording import name_ranks, name_signal

_OCCUPATIONS = (
    (re.compile(r"dataloader|data_loader|/data/|dataset|next_batch|loader", re.IGNORECASE), "its data loader"),
    (re.compile(r"torch/serialization|distributed/checkpoint|checkpoint|ckpt|save", re.IGNORECASE), "a checkpoint"),
    (re.compile(r"torch/_dynamo|torch/_inductor|/triton/|compile", re.IGNORECASE), "compilation"),
    (re.compile(r"(?:^|[_ ])(?:eval|validat)", re.IGNORECASE), "an evaluation"),
)
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python|<frozen ")
_INNERMOST = 8
_FACTS_MAX = 6
_CHANCE_MAX = 0.001


def findings_of_sinks(waits: Waits) -> Iterator[Finding]:
    """One finding for each sink; those without a dump that may wait for each other out of sight are one."""
    unseen = [component[0] for component in waits.sinks if component[0] in waits.unseen]
    if len(unseen) > 1 and not _lost_together(waits, len(unseen)):
        yield _silent(waits, unseen)
    else:
        unseen = []
    for component in waits.sinks:
        node = component[0]
        if node in unseen:
            continue
        if len(component) > 1:
            yield from _of_circle(waits, component)
        elif node >= waits.first_stuck:
            yield _inside(waits, waits.stuck[node - waits.first_stuck], node)
        elif waits.is_silent(node):
            yield _silent(waits, [node])
        elif node in waits.differing:
            continue  # said already
        elif node in waits.blind:
            yield _blind(waits, node)
        else:
            yield _of_rank(waits, node)


def findings_of_lagging(waits: Waits) -> Iterator[Finding]:
    """Ranks whose GPU's work is never seen to end, whether or not anybody waits for them."""
    situation = waits.situation
    for place, fact in situation.lagging.items():
        if waits.waited_for[place]:
            continue  # it is a sink already
        yield _lagging(situation, place, fact)


def findings_of_idle(waits: Waits) -> Iterator[Finding]:
    """Ranks with nothing unfinished that have not entered what a peer has enqueued behind its own wait.

    Nobody waits for them yet; they would be next. With two faults at once the second one often shows only so.
    """
    situation = waits.situation
    for place, trace in enumerate(situation.traces):
        if trace.blocked_order >= 0 or waits.waited_for[place] or place in situation.stopped:
            continue
        if trace.host_state is HostState.IN_OPERATION:
            continue
        for part in trace.groups:
            group = situation.groups[(part.name, part.members)]
            if group.frontier < 0 or (not part.counted and group.messages):
                continue
            newest = max(other.enqueued for _, other in group.seen if other.counted)
            if newest > part.enqueued:
                yield Finding(
                    trouble=Trouble.NEVER_ENTERED,
                    nodes=[place],
                    ranks=(trace.rank,),
                    what=f"waits for nobody and has not entered number {part.enqueued + 1} of {group}, "
                    f"which is queued at its peers{_occupation(trace.stack)}",
                    evidence=(f"its peers have enqueued up to number {newest} of {group}",),
                    operation=operation_text(situation, group, part.enqueued + 1),
                    group=group,
                    stack=last_line(situation, place),
                )
                break


def _lagging(situation: Situation, place: int, fact: str) -> Finding:
    return Finding(
        trouble=Trouble.GPU_SIDE,
        nodes=[place],
        ranks=(situation.traces[place].rank,),
        what="has stopped seeing GPU work finish: a GPU error, or a watchdog thread that hangs",
        evidence=(f"rank {situation.traces[place].rank} {fact}",),
        stack=last_line(situation, place),
    )


def _of_rank(waits: Waits, place: int) -> Finding:
    situation = waits.situation
    trace = situation.traces[place]
    waited = _waited_in(waits, place)
    operation = operation_text(situation, waited.group, waited.seq, waited.waiting) if waited else ""
    group = waited.group if waited else None
    stack = last_line(situation, place)
    evidence = _counts(situation, waited, place) if waited else _pair_facts(waits, place)
    where = operation or "the point-to-point operation that its peer waits in"
    if trace.host_state is HostState.ENDED:
        normal = trace.exit_code == 0
        how = _ending(trace.exit_code)
        trouble = Trouble.LOOP_BOUND if normal else Trouble.DEAD
        what = f"{how}, and others still wait for it in {where}"
    elif trace.host_state is HostState.FROZEN:
        trouble, what = Trouble.FROZEN, f"is frozen: stopped, in D state, or its GIL is held; others wait in {where}"
    elif place in situation.lagging:
        finding = _lagging(situation, place, situation.lagging[place])
        finding.operation, finding.group = operation, group
        finding.evidence += evidence
        return finding
    else:
        if group is not None and (shift := silent_shift(situation, place, group)):
            shift.evidence += evidence
            return shift
        trouble, what = Trouble.NEVER_ENTERED, f"never entered {where}{_occupation(trace.stack)}"
        if not trace.stack and not any(one.tail for one in trace.groups):
            evidence += (f"rank {trace.rank} has finished all it was given, and entered nothing new",)
    return Finding(
        trouble=trouble,
        nodes=[place],
        ranks=(trace.rank,),
        what=what,
        evidence=evidence,
        operation=operation,
        group=group,
        stack=stack,
    )


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "has ended"
    if exit_code < 0:
        return f"was killed by {name_signal(-exit_code)}"
    return "has left the loop and ended normally" if exit_code == 0 else f"has ended with exit code {exit_code}"


def _waited_in(waits: Waits, place: int) -> Stuck | None:
    """The collective that it should have entered first: of those where all others wait, the earliest in the program."""
    missed = waits.kept_by.get(place, ())
    united = [stuck for stuck in missed if len(stuck.waiting) + 1 >= len(stuck.group.ranks) > 1]
    return min(united or missed, key=lambda stuck: (_order(stuck), -len(stuck.waiting), stuck.group.name), default=None)


def _order(stuck: Stuck) -> int:
    """Its place in the program of a rank that waits in it."""
    first = stuck.waiting[0] if stuck.waiting else -1
    op = next((operation_at(part, stuck.seq) for place, part in stuck.group.seen if place == first), None)
    return op.order if op is not None else 0


def _counts(situation: Situation, stuck: Stuck, place: int) -> tuple[str, ...]:
    wait = f"{waiting_text(situation.ranks_of(stuck.waiting))} in number {stuck.seq} of {stuck.group}"
    if place < 0:
        return (wait,)
    rank = situation.traces[place].rank
    part = next((part for one, part in stuck.group.seen if one == place), None)
    if part is None or not part.counted:
        return (f"{wait}; rank {rank} shows nothing unfinished there",)
    return (f"{wait}; the newest that rank {rank} entered is number {part.enqueued}",)


def _pair_facts(waits: Waits, place: int) -> tuple[str, ...]:
    facts: list[str] = []
    for pair in waits.pairs:
        if pair.keeping == place and len(facts) < 4:
            does = "sends to" if pair.channel.sends else "waits for a message of"
            facts.append(f"rank {waits.rank_of(pair.waiting)} {does} rank {waits.rank_of(place)} and is not answered")
    return tuple(facts)


def _occupation(stack: Sequence[str]) -> str:
    if not stack:
        return ""
    own = next((line for line in stack if not _LIBRARY.search(line)), stack[0])
    for line in stack[:_INNERMOST]:
        for pattern, name in _OCCUPATIONS:
            if pattern.search(line):
                return f"; its Python is in {name}, at {own}"
    return f"; its Python stands at {own}"


def _of_circle(waits: Waits, component: Sequence[int]) -> Iterator[Finding]:
    """Of ranks that wait for each other; when one without a dump closes the circle, it is that one that is at fault.

    What a rank without a dump waits for is only what may hold it. In a circle that such guesses alone close, its
    neighbours do wait for it, so if it waited for them, they would have to disagree about the order as well.
    """
    silent = [node for node in component if waits.is_silent(node)]
    if not silent or _closes_without(waits, component, set(silent)):
        found = list(findings_of_circle(waits, component))
        yield from found
        if found:
            return
    if silent:
        yield _silent(waits, silent)


def _lost_together(waits: Waits, count: int) -> bool:
    """Whether that many dumps of ranks that belong together are hardly missing by chance, as those of a dead host.

    The chance that a group as large as that is without any, by the share of the other ranks that left none.
    """
    ranks = waits.first_stuck
    share = max(1, len(waits.situation.silent) - count) / ranks
    return ranks / count * share ** (count - 1) < _CHANCE_MAX


def _closes_without(waits: Waits, component: Sequence[int], left_out: set[int]) -> bool:
    number = {node: place for place, node in enumerate(component)}
    edges = [
        [] if node in left_out else [number[head] for head in waits.edges[node] if head in number] for node in component
    ]
    return any(len(one) > 1 for one in components(edges))


def _silent(waits: Waits, nodes: Sequence[int]) -> Finding:
    """Without a dump: one that nothing can hold is named; of several that can hold each other nothing tells which."""
    ranks = tuple(sorted(map(waits.rank_of, nodes)))
    named = len(ranks) == 1
    missed = [stuck for node in nodes for stuck in waits.kept_by.get(node, ())]
    stuck = max(missed, key=lambda one: (-len(one.keeping), len(one.waiting), one.group.name), default=None)
    if stuck is not None and named and len(stuck.keeping) > 1 and any(pair.keeping == nodes[0] for pair in waits.pairs):
        stuck = None  # they may wait there for another one; its neighbours wait for this one
    operation = operation_text(waits.situation, stuck.group, stuck.seq, stuck.waiting) if stuck else ""
    others = "one of them has not entered what its peers wait in, and their records do not tell which"
    return Finding(
        trouble=Trouble.DEAD if named else Trouble.UNKNOWN,
        nodes=nodes,
        ranks=ranks if named else (),
        suspects=() if named else ranks,
        what=f"has left no dump and never entered {operation or 'what its neighbours wait for'}: it is dead or frozen"
        if named
        else f"{name_ranks(ranks)} have left no dump; {others}",
        evidence=tuple(fact for node in nodes for fact in _silent_facts(waits, node))[:_FACTS_MAX],
        operation=operation,
        group=stuck.group if stuck else None,
        sure=False,
    )


def _silent_facts(waits: Waits, node: int) -> tuple[str, ...]:
    missed = sorted(waits.kept_by.get(node, ()), key=lambda one: (len(one.keeping), -len(one.waiting)))
    waiting = [
        f"{waiting_text(waits.situation.ranks_of(stuck.waiting))} in number {stuck.seq} of {stuck.group} for "
        f"{name_ranks(sorted(map(waits.rank_of, stuck.keeping)))}"
        for stuck in missed[:2]
    ]
    return (*waiting, *_pair_facts(waits, node))


def _blind(waits: Waits, place: int) -> Finding:
    rank = waits.situation.traces[place].rank
    return Finding(
        trouble=Trouble.UNKNOWN,
        nodes=[place],
        suspects=(rank,),
        what=f"others wait for rank {rank}, which waits for something that its recorder does not show",
        stack=last_line(waits.situation, place),
        sure=False,
    )


def _inside(waits: Waits, stuck: Stuck, node: int) -> Finding:
    """All have entered. Who is left inside when others are through, or never started, or stopped early, is named."""
    situation, group, seq = waits.situation, stuck.group, stuck.seq
    left = [place for place, part in group.seen if part.completed < seq]
    through = [place for place, part in group.seen if part.completed >= seq]
    operation = operation_text(situation, group, seq, stuck.waiting)
    finding = Finding(trouble=Trouble.INSIDE_OP, nodes=[node], operation=operation, group=group)
    unstarted = unstarted_members(group, seq, stuck.waiting)
    newest = max(part.enqueued for _, part in group.seen)
    early = [place for place, part in group.seen if part.counted and part.enqueued < newest]
    if through and len(left) <= len(through):
        finding.ranks = situation.ranks_of(left)
        finding.what = f"did not come out of {operation}, which {len(through)} members have finished"
        finding.evidence = (f"finished by {name_ranks(situation.ranks_of(through))}",)
    elif unstarted:
        finding.trouble = Trouble.GPU_SIDE
        finding.ranks = situation.ranks_of(unstarted)
        finding.what = f"has enqueued {operation} and its GPU never started it, with nothing ahead of it"
        finding.evidence = (f"{len(left) - len(unstarted)} members have started it",)
    elif early and 2 * len(early) < len(group.seen) and newest > seq:
        finding.trouble = Trouble.GPU_SIDE
        finding.ranks = situation.ranks_of(early)
        finding.what = (
            f"stopped issuing work behind {operation}, which holds no host, and its peers went on to {newest}"
        )
        finding.evidence = (f"its newest of {group} is older than its peers' {newest}, and all are in number {seq}",)
    else:
        members = situation.ranks_of(place for place, _ in group.seen)
        finding.suspects = members
        finding.what = (
            f"{name_ranks(members)} are all inside {operation} and none comes out: a link or device between them"
        )
        finding.evidence = ("every member has entered it with the same signature",)
    return finding
