"""Puts the verdict together from frontiers, waits and suspects; knows no files."""

from collections.abc import Collection, Sequence

from everstep.domain.diagnosis import HangVerdict
from everstep.domain.ids import Rank
from everstep.domain.recorder import Membership, RankTrace


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
    raise NotImplementedError
