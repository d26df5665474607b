"""A hang verdict as text and as a JSON document: pure pictures, for a person on call and for a script."""

import textwrap
from collections.abc import Iterator

import msgspec

from everstep.domain.diagnosis import HangVerdict, Waiting
from everstep.domain.verdicts import Trouble
from everstep.policy.wording import few_ranks

_WIDTH = 118
_ARROWS_MAX = 5
_STACK_MAX = 4
_RANGES_MAX = 4
"""Together they keep a usual verdict, however many ranks there are, within twenty lines."""


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
        if (rest := len(verdict.waits) - _ARROWS_MAX + verdict.waits_left_out) > 0:
            kinds = "kind of wait, which follows" if rest == 1 else "kinds of waits, which follow"
            yield f"    and {rest} more {kinds} from these (--json and --html have more)"
    if verdict.last_agreed:
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
    waiting = few_ranks(arrow.waiting, _RANGES_MAX)
    if not arrow.missing:
        return f"{waiting}  in {arrow.operation}: {arrow.why}"
    return f"{waiting}  in {arrow.operation}  -> {few_ranks(arrow.missing, _RANGES_MAX)} ({arrow.why})"


def diagnosis_json(verdict: HangVerdict) -> str:
    """One JSON document with all fields of `HangVerdict`."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode()
