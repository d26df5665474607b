"""Fills in who belongs to a group where the recorder does not say, as on gloo, from the ranks that use it."""

from collections.abc import Sequence
from dataclasses import replace

from everstep.domain.ids import Rank
from everstep.domain.recorder import RankTrace
from everstep.policy.trace_summary import NO_MEMBERS, MemberLists

_DEFAULT_GROUP = "0"


def fill_members(traces: Sequence[RankTrace], members: MemberLists) -> tuple[RankTrace, ...]:
    """Give every nameless membership one: all ranks of the default group, else the ranks whose traces name it.

    A member that never used a group can't be seen this way; with NCCL, whose dumps list members, nothing changes.
    """
    users: dict[str, set[Rank]] = {}
    for trace in traces:
        for group in trace.groups:
            if group.members == NO_MEMBERS:
                users.setdefault(group.name, set()).add(trace.rank)
    if not users:
        return tuple(traces)
    if _DEFAULT_GROUP in users:
        users[_DEFAULT_GROUP] = {Rank(rank) for rank in range(max(trace.rank for trace in traces) + 1)}
    identities = {name: members.add(tuple(sorted(ranks))).identity for name, ranks in users.items()}
    return tuple(_filled(trace, identities, users) for trace in traces)


def _filled(trace: RankTrace, identities: dict[str, str], users: dict[str, set[Rank]]) -> RankTrace:
    nameless = {group.name for group in trace.groups if group.members == NO_MEMBERS}
    if not nameless:
        return trace
    groups = tuple(replace(g, members=identities[g.name]) if g.name in nameless else g for g in trace.groups)
    order = {name: sorted(users[name]) for name in nameless}
    channels = tuple(
        replace(c, peer=order[c.group][c.peer]) if c.group in nameless and 0 <= c.peer < len(order[c.group]) else c
        for c in trace.channels
    )
    return replace(trace, groups=groups, channels=channels)
