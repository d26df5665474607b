"""Members that met in one collective with different operations, or do not agree about the group itself.

At a group's frontier all that have entered must have the same signature; the minority is at fault. Two members that
differ are a tie, which the same place in sister groups decides, or nobody (flight_recorder.md, 4.3 steps 1 and 3).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from everstep.domain.ids import Rank
from everstep.domain.recorder import GroupTrace, Operation
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis.finding import Finding, operation_text
from everstep.policy.diagnosis.situation import Group, Situation, operation_at
from everstep.policy.wording import name_ranks

_SHIFT_MIN = 2


def disagreements(situation: Situation) -> Iterator[Finding]:
    """One finding for each group whose members disagree at its frontier."""
    sisters: dict[str, list[Group]] = {}
    for group in situation.groups.values():
        sisters.setdefault(group.description, []).append(group)
    for group in situation.groups.values():
        if group.frontier >= 0 and len(group.seen) > 1 and (sides := _sides(group)):
            yield _judged(situation, group, sides, sisters[group.description])


def _sides(group: Group) -> dict[str, list[tuple[int, GroupTrace]]] | None:
    """Members by the signature of their operation at the frontier; None when all agree, as nearly always."""
    seq = group.frontier
    first = None
    differ = False
    for _, part in group.seen:
        op = operation_at(part, seq)
        if op is None or part.enqueued < seq:
            continue
        if first is None:
            first = op.signature
        elif op.signature != first:
            differ = True
            break
    if not differ:
        return None
    sides: dict[str, list[tuple[int, GroupTrace]]] = {}
    for place, part in group.seen:
        if (op := operation_at(part, seq)) is not None:
            sides.setdefault(op.signature, []).append((place, part))
    return sides


def _judged(
    situation: Situation, group: Group, sides: dict[str, list[tuple[int, GroupTrace]]], sisters: Sequence[Group]
) -> Finding:
    seq = group.frontier
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[0]))
    usual = ordered[0][0]
    decided = len(ordered[0][1]) > len(ordered[1][1])
    if not decided:
        votes = _votes(group, seq, sisters, sides)
        if votes:
            usual, decided = votes, True
    culprits = [one for signature, side in ordered if signature != usual for one in side]
    evidence = [
        f"{name_ranks(situation.ranks_of(place for place, _ in side))} called {signature}"
        + (f" from {stack}" if (stack := _stack_at(side[0][1], seq)) else "")
        for signature, side in ordered
    ]
    example = culprits[0][1]
    trouble, how = _kind(example, sides[usual][0][1], seq)
    operation = f"number {seq} of {group}"
    if not decided:
        both = situation.ranks_of(place for side in sides.values() for place, _ in side)
        return Finding(
            trouble=trouble,
            nodes=[place for side in sides.values() for place, _ in side],
            suspects=both,
            what=f"{name_ranks(both)} met in {operation} with different operations, "
            "and there is no third rank to say which one is right",
            evidence=tuple(evidence),
            operation=operation,
            group=group,
        )
    op = operation_at(example, seq)
    return Finding(
        trouble=trouble,
        nodes=[place for place, _ in culprits],
        ranks=situation.ranks_of(place for place, _ in culprits),
        what=f"{how}: it called {op.signature if op else 'another operation'} where the others called {usual}, "
        f"as {operation}",
        evidence=tuple(evidence),
        operation=operation,
        group=group,
        stack=tuple(op.stack.split(" < ")) if op and op.stack else (),
    )


def _stack_at(part: GroupTrace, seq: int) -> str:
    op = operation_at(part, seq)
    return op.stack if op else ""


def _votes(
    group: Group, seq: int, sisters: Sequence[Group], sides: dict[str, list[tuple[int, GroupTrace]]]
) -> str | None:
    """What the groups of the same description do at this number: they run the same program."""
    votes: Counter[str] = Counter()
    for sister in sisters:
        if sister is group:
            continue
        for _, part in sister.seen[:1]:
            if (op := operation_at(part, seq)) is not None and op.signature in sides:
                votes[op.signature] += 1
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]


def _kind(culprit: GroupTrace, usual: GroupTrace, seq: int) -> tuple[Trouble, str]:
    """An extra or a missing collective shows as a shift by one; else it is the operation itself that differs."""
    own, other = operation_at(culprit, seq), operation_at(usual, seq)
    if own is None or other is None:
        return Trouble.MISMATCH, "does not match"
    extra, left_out = _shifted(culprit, usual, seq, by=-1), _shifted(culprit, usual, seq, by=1)
    if extra and left_out:
        return Trouble.MISMATCH, "is one collective ahead of the others or behind them"
    if extra:
        return Trouble.EXTRA_COLLECTIVE, "issued one collective too many"
    if left_out:
        return Trouble.MISMATCH, "left out a collective"
    if own.kind == other.kind and own.stack != other.stack and own.stack and not _called_before(usual, own):
        return Trouble.EXTRA_COLLECTIVE, "issued a collective that no other rank has come to"
    if own.kind != other.kind:
        return Trouble.MISMATCH, "called another operation"
    if own.signature.partition(" of ")[0] != other.signature.partition(" of ")[0] and " of " in own.signature:
        return Trouble.MISMATCH, "reduced in another way"
    sizes = own.signature.rpartition(" ")[0] != other.signature.rpartition(" ")[0]
    return Trouble.MISMATCH, "gave another shape" if sizes else "gave another dtype"


def _called_before(part: GroupTrace, op: Operation) -> bool:
    return any(one.stack == op.stack for one in part.tail)


def _shifted(culprit: GroupTrace, usual: GroupTrace, seq: int, *, by: int) -> bool:
    """Whether from `seq` on the culprit does what the others do `by` places further on."""
    start = seq + 1 if by < 0 else seq
    matches = 0
    for place in range(start, culprit.enqueued + 1):
        own, other = operation_at(culprit, place), operation_at(usual, place + by)
        if own is None or other is None:
            break
        if (own.signature, own.stack) != (other.signature, other.stack):
            return False
        matches += 1
    return matches >= _SHIFT_MIN


def creation_conflicts(situation: Situation) -> Iterator[Finding]:
    """Groups of one name whose member lists overlap and differ: ranks created different groups under it.

    Groups that share a name and no member are the halves of one split, and fine.
    """
    by_name: dict[str, list[Group]] = {}
    for group in situation.groups.values():
        if group.ranks:
            by_name.setdefault(group.name, []).append(group)
    for groups in by_name.values():
        if len(groups) > 1 and (overlapping := _overlapping(groups)):
            yield _conflict(situation, overlapping)


def _overlapping(groups: Sequence[Group]) -> list[Group]:
    owner: dict[Rank, Group] = {}
    found: dict[int, Group] = {}
    for group in groups:
        for rank in group.ranks:
            other = owner.setdefault(rank, group)
            if other is not group:
                found[id(group)] = group
                found[id(other)] = other
    return list(found.values())


def _conflict(situation: Situation, groups: Sequence[Group]) -> Finding:
    ordered = sorted(groups, key=lambda group: (-len(group.seen), group.members))
    decided = len(ordered[0].seen) > len(ordered[1].seen)
    guilty = [place for group in ordered[1:] for place, _ in group.seen]
    evidence = tuple(
        f"{name_ranks(situation.ranks_of(place for place, _ in group.seen))} created it with {name_ranks(group.ranks)}"
        for group in ordered
    )
    ranks = situation.ranks_of(guilty)
    everyone = situation.ranks_of(place for group in ordered for place, _ in group.seen)
    return Finding(
        trouble=Trouble.GROUP_CREATION,
        nodes=guilty,
        ranks=ranks if decided else (),
        suspects=() if decided else everyone,
        what=f"created {ordered[0]} with other members than the rest, or created another number of groups before it"
        if decided
        else f"{name_ranks(everyone)} do not agree about the members of {ordered[0]}",
        evidence=evidence,
        operation=f"creation of {ordered[0]}",
        group=ordered[0],
    )


def silent_shift(situation: Situation, place: int, group: Group) -> Finding | None:
    """Signatures agree and lines do not: the rank left out one of several equal collectives, and sums were wrong.

    Looks at the history of one suspect against the next member of its group.
    """
    own = next((part for one, part in group.seen if one == place), None)
    other = next((part for one, part in group.seen if one != place), None)
    if own is None or other is None:
        return None
    for op in own.tail:
        theirs = operation_at(other, op.seq)
        if theirs is not None and theirs.stack and op.stack and theirs.stack != op.stack:
            rank = situation.traces[place].rank
            return Finding(
                trouble=Trouble.MISMATCH,
                nodes=[place],
                ranks=(rank,),
                what=f"left out or repeated a collective: its number {op.seq} of {group} came from {op.stack}, "
                f"the others' from {theirs.stack}; shapes agreed, so the sums were wrong since then",
                evidence=(f"{operation_text(situation, group, op.seq)} was called from two places",),
                operation=operation_text(situation, group, op.seq),
                group=group,
                stack=tuple(op.stack.split(" < ")),
            )
    return None
