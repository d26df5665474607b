"""A hang verdict as text and as a JSON document: pure pictures, for a person on call and for a script."""

import textwrap
from collections.abc import Iterator

import msgspec

from everstep.domain.diagnosis import HangVerdict, Waiting
from everstep.domain.ids import Rank
from everstep.domain.verdicts import Trouble
from everstep.policy.wording import fold_ranks

_WIDTH = 118
_ARROWS_MAX = 8
_STACK_MAX = 6
_RANGES_MAX = 6


def diagnosis_lines(verdict: HangVerdict) -> Iterator[str]:
    """The verdict, then the culprit's stack, who waits for whom, the last agreed collective, what was missing."""
    head = verdict.trouble.value.upper()
    yield from textwrap.wrap(f"{head}: {verdict.reason}", _WIDTH, subsequent_indent="  ")
    for fact in verdict.evidence:
        yield from _item("because", fact)
    if verdict.stack:
        yield ""
        whose = f"rank {verdict.ranks[0]}" if verdict.ranks else "the rank in question"
        yield f"{whose} stands at:" if verdict.stack_is_now else f"{whose} was last recorded at:"
        yield from (f"    {line}" for line in verdict.stack[:_STACK_MAX])
    if verdict.waits and verdict.trouble not in (Trouble.HEALTHY, Trouble.SLOW):
        yield ""
        yield f"who waits for whom ({verdict.rank_count} ranks, the cause first):"
        for arrow in verdict.waits[:_ARROWS_MAX]:
            yield from textwrap.wrap(_arrow(arrow), _WIDTH, initial_indent="    ", subsequent_indent="      ")
        if len(verdict.waits) > _ARROWS_MAX:
            yield f"    and {len(verdict.waits) - _ARROWS_MAX} more kinds of waits (--json has them)"
    if verdict.last_agreed:
        yield ""
        yield from _item("last agreed", verdict.last_agreed)
    if verdict.alternatives:
        yield ""
        yield "other explanations, likeliest first:"
        for other in verdict.alternatives[:3]:
            line = f"{other.trouble.value.upper()}: {other.reason}"
            yield from textwrap.wrap(line, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    for text in verdict.missing:
        yield from _item("missing", text)


def _item(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _arrow(arrow: Waiting) -> str:
    if not arrow.missing:
        return f"{short_ranks(arrow.waiting)}  in {arrow.operation}: {arrow.why}"
    return f"{short_ranks(arrow.waiting)}  in {arrow.operation}  -> {short_ranks(arrow.missing)} ({arrow.why})"


def short_ranks(ranks: tuple[Rank, ...]) -> str:
    """`0-511, 513-1023`, and no more than six ranges."""
    ranges = fold_ranks(ranks).split(", ")
    if len(ranges) <= _RANGES_MAX:
        return ", ".join(ranges)
    return f"{', '.join(ranges[:_RANGES_MAX])} and others ({len(ranks)} ranks)"


def diagnosis_json(verdict: HangVerdict) -> str:
    """One JSON document with all fields of `HangVerdict`."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode()
