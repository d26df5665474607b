"""Who waits for whom, in a handful of arrows for any number of ranks: like waits are put together."""

from collections.abc import Collection, Mapping

from everstep.domain.diagnosis import Waiting
from everstep.domain.ids import Rank
from everstep.policy.diagnosis.situation import operation_at
from everstep.policy.diagnosis.waits import Pair, Stuck, Waits, Why

ARROWS_MAX = 24
_WORDS = {
    Why.STOPPED: "stopped",
    Why.ABSENT: "not entered",
    Why.DIFFERS: "called another operation",
    Why.SILENT: "no dump",
    Why.BEHIND: "queued behind another operation",
    Why.INSIDE: "all have entered it",
}


def waiting_arrows(
    waits: Waits, distance: Mapping[int, int], culprits: Collection[int]
) -> tuple[tuple[Waiting, ...], int]:
    """The arrows nearest to the cause, and how many were left out.

    Args:
        distance: of nodes from the cause; those that are not in it come last.
        culprits: nodes of the ranks at fault; in a circle of waits theirs come first.
    """
    far = len(waits.edges)
    guilty = {waits.rank_of(node) for node in culprits if node < waits.first_stuck}
    gathered: dict[tuple[int, str, str], tuple[set[Rank], set[Rank]]] = {}
    for number, stuck in enumerate(waits.stuck):
        at = distance.get(waits.first_stuck + number, far)
        _gather(gathered, waits, (at, _of_stuck(waits, stuck), _WORDS[stuck.why]), stuck.waiting, stuck.keeping)
    for pair in waits.pairs:
        at = distance.get(pair.waiting, far)
        _gather(gathered, waits, (at, _of_pair(waits, pair), _WORDS[pair.why]), [pair.waiting], [pair.keeping])
    ordered = sorted(
        gathered.items(),
        key=lambda item: (item[0][0], not item[1][1] <= guilty, -len(item[1][0]), item[0][1:]),
    )
    arrows = tuple(
        Waiting(waiting=tuple(sorted(waiting)), operation=operation, missing=tuple(sorted(missing)), why=why)
        for (_, operation, why), (waiting, missing) in ordered[:ARROWS_MAX]
    )
    return arrows, max(0, len(ordered) - ARROWS_MAX)


def _gather(
    gathered: dict[tuple[int, str, str], tuple[set[Rank], set[Rank]]],
    waits: Waits,
    key: tuple[int, str, str],
    waiting: list[int],
    keeping: list[int],
) -> None:
    entry = gathered.get(key)
    if entry is None:
        entry = gathered[key] = (set(), set())
    entry[0].update(map(waits.rank_of, waiting))
    entry[1].update(map(waits.rank_of, keeping))


def _of_stuck(waits: Waits, stuck: Stuck) -> str:
    name = stuck.group.description or f"group {stuck.group.name}"
    wanted = stuck.waiting[0] if stuck.waiting else -1
    for place, part in stuck.group.seen:
        if place == wanted or wanted < 0:
            op = operation_at(part, stuck.seq)
            return f"{op.kind if op else 'an operation'} of {name}"
    return f"an operation of {name}"


def _of_pair(waits: Waits, pair: Pair) -> str:
    name = pair.channel.group
    parts = waits.situation.traces[pair.waiting].groups
    description = next((part.description for part in parts if part.name == name and part.description), f"group {name}")
    return f"{'send' if pair.channel.sends else 'recv'} of {description}"
