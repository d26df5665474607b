"""Reduces one rank's flight recorder dump to a trace of a few kilobytes; knows no files and no other ranks."""

from collections.abc import Sequence

from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import HostState, Membership, RankTrace
from everstep.domain.recorder_dump import Dump


class MemberLists:
    """The member lists met so far, each once."""

    def __init__(self) -> None:
        self._by_text: dict[str, Membership] = {}

    def memberships(self) -> tuple[Membership, ...]:
        """All of them, sorted by identity."""
        return tuple(sorted(self._by_text.values(), key=lambda one: one.identity))


def reduce_dump(
    dump: Dump,
    members: MemberLists,
    *,
    rank: Rank,
    host: HostId,
    host_state: HostState = HostState.UNKNOWN,
    stack: Sequence[str] = (),
    exit_code: int | None = None,
) -> RankTrace:
    """Reduce a dump.

    Args:
        members: collects the member lists, so that each travels once.
        rank, host: whose dump it is; an empty host when unknown.
        host_state, stack, exit_code: what other sources say of the process.
    """
    raise NotImplementedError
