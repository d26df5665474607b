"""Ranks that wait for each other in a circle: whose order is wrong, as far as the others' programs tell.

In a circle somebody misses an operation A that others wait in, and waits in B itself. It is at fault when others run
A before B, or when B is an operation that nobody else has come to; else the circle is suspected as a whole.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from everstep.domain.ids import Rank
from everstep.domain.recorder import GroupTrace, Operation, RankTrace
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis.finding import Finding, last_line, operation_text, waiting_text
from everstep.policy.diagnosis.messages import odd_one
from everstep.policy.diagnosis.situation import Group, operation_at
from everstep.policy.diagnosis.waits import Pair, Stuck, Waits, Why
from everstep.policy.wording import name_ranks

_VOTES_MAX = 200
_CROSSINGS_MAX = 64
_BOTH = 2
"""Two that wait for each other are both named when nothing tells whose order is wrong; more are only suspected."""
_Key = tuple[str, str, int]  # description, signature, number


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Traces that miss one collective while they wait in another."""

    places: list[int]
    missed: Stuck
    waits_in: Stuck


def findings_of_circle(waits: Waits, component: Sequence[int]) -> Iterator[Finding]:
    """One finding, unless members without a dump leave it open: then one for each of those comes from the caller."""
    situation = waits.situation
    ranks = [node for node in component if node < waits.first_stuck and not waits.is_silent(node)]
    stucks = [waits.stuck[node - waits.first_stuck] for node in component if node >= waits.first_stuck]
    inner = set(ranks)
    pairs = [pair for pair in waits.pairs if pair.waiting in inner and pair.keeping in inner]
    has_silent = len(ranks) + len(stucks) < len(component)
    names = situation.ranks_of(ranks)
    crossed = [one for one in stucks if one.why in (Why.ABSENT, Why.BEHIND)]
    crossed_pairs = [one for one in pairs if one.why is Why.ABSENT]
    if not crossed and not crossed_pairs:
        if not has_silent:
            yield _all_inside(waits, ranks, stucks, names)
        return
    decided = _decided(waits, inner, stucks)
    if decided is None and (odd := odd_one(waits, crossed_pairs)):
        decided = Trouble.MISMATCH, *odd
    if decided is None and has_silent:
        return
    circle = "wait for each other in a circle: they issued the same operations in different orders"
    trouble, culprits, what = decided or (Trouble.ORDER_DEADLOCK, ranks, circle)
    crowded = any(len(stuck.waiting) > 1 for stuck in stucks)  # then one of them waits where many do
    blamed = decided is not None or (len(ranks) <= _BOTH and not crowded)
    yield Finding(
        trouble=trouble,
        nodes=culprits if decided else ranks,
        ranks=situation.ranks_of(culprits) if blamed else (),
        suspects=() if blamed else names,
        what=what if blamed else f"{name_ranks(names)} {what}",
        evidence=_facts(waits, stucks, pairs),
        operation=_circle_operation(waits, stucks, names),
        group=stucks[0].group if stucks else None,
        stack=last_line(situation, culprits[0]),
        decided=decided is not None,
    )


def _all_inside(waits: Waits, ranks: Sequence[int], stucks: Sequence[Stuck], names: tuple[Rank, ...]) -> Finding:
    return Finding(
        trouble=Trouble.INSIDE_OP,
        nodes=ranks,
        suspects=names,
        what=f"{name_ranks(names)} are inside their operations with each other and none comes out: "
        "a link or device between them",
        operation=_circle_operation(waits, stucks, names),
        group=stucks[0].group if stucks else None,
    )


def _circle_operation(waits: Waits, stucks: Sequence[Stuck], names: tuple[Rank, ...]) -> str:
    if stucks:
        return operation_text(waits.situation, stucks[0].group, stucks[0].seq, stucks[0].waiting)
    return f"point-to-point operations of {name_ranks(names)}"


def _facts(waits: Waits, stucks: Sequence[Stuck], pairs: Sequence[Pair]) -> tuple[str, ...]:
    situation = waits.situation
    facts = [
        f"{waiting_text(situation.ranks_of(stuck.waiting))} in "
        f"{operation_text(situation, stuck.group, stuck.seq, stuck.waiting)}"
        for stuck in stucks[:4]
        if stuck.waiting
    ]
    for pair in pairs[:4]:
        does = "sends to" if pair.channel.sends else "waits for a message of"
        facts.append(f"rank {waits.rank_of(pair.waiting)} {does} rank {waits.rank_of(pair.keeping)}")
    return tuple(facts)


def _decided(waits: Waits, inner: set[int], stucks: Sequence[Stuck]) -> tuple[Trouble, list[int], str] | None:
    """Class, culprits and words; None when nothing tells one side from the other."""
    situation = waits.situation
    crossings = _fewest_first(_crossings(waits, inner, stucks))
    strangers = [one for one in crossings if _new_to_group(one.waits_in, one.places[0])]
    if strangers and len(_places(strangers)) < len(inner):
        first = strangers[0]
        mine = operation_text(situation, first.waits_in.group, first.waits_in.seq, first.places)
        what = f"left the loop before the others and waits in {mine}, which no other rank has come to"
        return Trouble.LOOP_BOUND, _places(strangers), what
    if shifted := _shifted(waits, inner, stucks):
        return shifted
    against = [one for one in crossings if _goes_against(waits, one)]
    if against and len(_places(against)) < len(inner):
        first = against[0]
        missed = operation_text(situation, first.missed.group, first.missed.seq, first.missed.waiting)
        what = f"went past {missed}, which all others run first: it left that out, or has another order"
        return Trouble.ORDER_DEADLOCK, _places(against), what
    crowd = max((len(stuck.waiting) for stuck in stucks), default=0)
    lone = [one for one in crossings if one.waits_in.waiting == one.places]
    if crowd > 1 and len(_places(lone)) == 1:
        first = lone[0]
        mine = operation_text(situation, first.waits_in.group, first.waits_in.seq, first.places)
        if _follows(situation.traces, first):
            what = f"went ahead to {mine} while the others wait for it elsewhere: it has another order"
            return Trouble.ORDER_DEADLOCK, first.places, what
        what = f"issued one collective too many, {mine}, and waits there alone"
        return Trouble.EXTRA_COLLECTIVE, first.places, what
    return None


def _shifted(waits: Waits, inner: set[int], stucks: Sequence[Stuck]) -> tuple[Trouble, list[int], str] | None:
    """By place in the program: past an operation that it never entered, or in one that its peers are past without.

    Members of a group that run one program number their operations alike, so this needs no history. It holds only
    where the numbers did agree at the newest operation that both have in their records.
    """
    for stuck in stucks:
        if stuck.why is not Why.ABSENT or not stuck.waiting:
            continue
        parts = dict(stuck.group.seen)
        text = operation_text(waits.situation, stuck.group, stuck.seq, stuck.waiting)
        peer = stuck.waiting[0]
        absent = [place for place in stuck.keeping if place in inner and _aligned(parts, peer, place)]
        op = operation_at(parts[peer], stuck.seq)
        if op is None or not absent:
            continue
        past = [place for place in absent if waits.situation.traces[place].blocked_order > op.order]
        if 0 < len(past) < len(stuck.waiting):
            return Trouble.MISMATCH, past, f"left out {text}: it went past the place where its peers call it"
        if len(past) > 1 and len(past) == len(stuck.keeping) and len(stuck.waiting) == 1:
            what = f"issued one collective too many, {text}, and waits there alone: its peers are past that place"
            return Trouble.EXTRA_COLLECTIVE, [peer], what
    return None


def _aligned(parts: dict[int, GroupTrace], one: int, other: int) -> bool:
    """Whether two members gave the same place to the newest operation of the group that both have finished."""
    if one not in parts or other not in parts:
        return False
    seq = min(parts[one].completed, parts[other].completed)
    first, second = operation_at(parts[one], seq), operation_at(parts[other], seq)
    return first is not None and second is not None and first.order == second.order


def _places(crossings: Sequence[_Crossing]) -> list[int]:
    return sorted({place for one in crossings for place in one.places})


def _crossings(waits: Waits, inner: set[int], stucks: Sequence[Stuck]) -> Iterator[_Crossing]:
    own = {place: stuck for stuck in stucks for place in stuck.waiting}
    for stuck in stucks:
        if stuck.why not in (Why.ABSENT, Why.BEHIND):
            continue
        found: dict[int, _Crossing] = {}
        for place in stuck.keeping:
            if place in inner and (mine := own.get(place)) is not None and mine is not stuck:
                found.setdefault(id(mine), _Crossing([], stuck, mine)).places.append(place)
        yield from found.values()


def _fewest_first(crossings: Iterator[_Crossing]) -> list[_Crossing]:
    return sorted(crossings, key=lambda one: (len(one.places), one.places))[:_CROSSINGS_MAX]


def _of_trace(stuck: Stuck, place: int) -> Operation | None:
    return next((operation_at(part, stuck.seq) for one, part in stuck.group.seen if one == place), None)


def _new_to_group(stuck: Stuck, place: int) -> bool:
    """Whether nobody has called this operation from this line in this group before."""
    own = _of_trace(stuck, place)
    if own is None or len(stuck.waiting) * 2 > max(len(stuck.group.seen), len(stuck.group.ranks)):
        return False
    return not any(
        (op.signature, op.stack) == (own.signature, own.stack)
        for _, part in stuck.group.seen
        for op in part.tail
        if op.seq < stuck.seq
    )


def _key(stuck: Stuck) -> _Key | None:
    for place in stuck.waiting:
        if (op := _of_trace(stuck, place)) is not None:
            return stuck.group.description or stuck.group.name, op.signature, stuck.seq
    return None


def _goes_against(waits: Waits, crossing: _Crossing) -> bool:
    """Whether other ranks with both operations in their record ran the missed one first."""
    missed, mine = _key(crossing.missed), _key(crossing.waits_in)
    if missed is None or mine is None:
        return False
    votes: Counter[bool] = Counter()
    unheard = {*crossing.places, *crossing.missed.waiting}
    traces = waits.situation.traces
    for place in _voters(crossing.waits_in.group, len(traces)):
        if place in unheard:
            continue
        first, second = _order_of(traces[place], missed), _order_of(traces[place], mine)
        if first >= 0 and second >= 0:
            votes[first < second] += 1
            if votes.total() >= _VOTES_MAX:
                break
    return votes[True] > votes[False]


def _voters(group: Group, count: int) -> Iterator[int]:
    """Those of the group first: they run the same program most surely."""
    near = [place for place, _ in group.seen]
    yield from near
    known = set(near)
    yield from (place for place in range(count) if place not in known)


def _order_of(trace: RankTrace, key: _Key) -> int:
    for part in trace.groups:
        if (part.description or part.name) == key[0]:
            op = operation_at(part, key[2])
            if op is not None and op.signature == key[1]:
                return op.order
    return -1


def _follows(traces: Sequence[RankTrace], crossing: _Crossing) -> bool:
    """Whether what it waits in comes right after what it misses in the program of those that wait there."""
    mine, missed = _key(crossing.waits_in), _key(crossing.missed)
    if mine is None or missed is None or not crossing.missed.waiting:
        return False
    trace = traces[crossing.missed.waiting[0]]
    history = sorted(
        (op.order, part.description or part.name, op.signature) for part in trace.groups for op in part.tail
    )
    return any(here[1:] == missed[:2] and after[1:] == mine[:2] for here, after in pairwise(history))
