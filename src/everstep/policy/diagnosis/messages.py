"""Whose count of point-to-point messages is odd: one rank among many that all count the same.

Where every rank runs the same exchange, the counts of all channels agree; one that sent once more, or received once
less, stands out. Where counts differ anyway, as along a pipeline, this says nothing.
"""

from collections.abc import Iterator, Sequence

from everstep.domain.recorder import ChannelTrace, RankTrace
from everstep.policy.diagnosis.waits import Pair, Waits, Why

_OTHERS_MIN = 2


def odd_one(waits: Waits, pairs: Sequence[Pair]) -> tuple[list[int], str] | None:
    """The rank at fault for a message that has no counterpart, with words; None when the counts do not tell."""
    traces = waits.situation.traces
    for pair in pairs:
        if pair.why is not Why.ABSENT:
            continue
        channel = pair.channel
        mine, theirs = channel.posted, _counterpart(traces, pair)
        same = list(_counts(traces, channel, sends=channel.sends, besides=pair.waiting))
        opposite = list(_counts(traces, channel, sends=not channel.sends, besides=pair.keeping))
        usual = {*same, *opposite}
        if len(usual) != 1 or min(len(same), len(opposite)) < _OTHERS_MIN:
            continue
        count = usual.pop()
        verbs = ("sent", "received") if channel.sends else ("received", "sent")
        keeping, waiting = waits.rank_of(pair.keeping), waits.rank_of(pair.waiting)
        if theirs == count != mine:
            preposition = "to" if channel.sends else "from"
            return [
                pair.waiting
            ], f"{verbs[0]} {mine} messages {preposition} rank {keeping} where all others count {count}"
        if mine == count != theirs:
            preposition = "from" if channel.sends else "to"
            return [
                pair.keeping
            ], f"{verbs[1]} {theirs} messages {preposition} rank {waiting} where all others count {count}"
    return None


def _counterpart(traces: Sequence[RankTrace], pair: Pair) -> int:
    own, rank = pair.channel, traces[pair.waiting].rank
    return next(
        (
            one.posted
            for one in traces[pair.keeping].channels
            if (one.group, one.peer, one.sends) == (own.group, rank, not own.sends)
        ),
        0,
    )


def _counts(traces: Sequence[RankTrace], like: ChannelTrace, *, sends: bool, besides: int) -> Iterator[int]:
    for place, trace in enumerate(traces):
        if place != besides:
            yield from (one.posted for one in trace.channels if one.group == like.group and one.sends == sends)
