"""Reduces what NCCL's own flight recorder answers in a live job to traces; where there is a ring, that knows more."""

from collections.abc import Mapping

from everstep.adapters.evidence.flight_dumps import UNUSABLE, decode_dump
from everstep.adapters.evidence.ring_trace import RankFacts
from everstep.domain.evidence import ProcessState
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import HostState, Membership, RankTrace
from everstep.domain.recorder_dump import Dump
from everstep.policy.trace_summary import MemberLists, reduce_dump

_GLOO = "gloo:"


def reduce_recorders(
    host: HostId, bodies: Mapping[Rank, bytes], facts: Mapping[Rank, RankFacts]
) -> tuple[dict[Rank, RankTrace], tuple[Membership, ...]]:
    """The traces of ranks whose recorder holds operations of NCCL, and the member lists that they name.

    Answers that are torn or of another shape are left out: they lie beside as files, and the counts stay.
    """
    members = MemberLists()
    traces = {}
    for rank, body in sorted(bodies.items()):
        try:
            dump = decode_dump(body)
            if _is_gloo(dump):
                continue
            traces[rank] = reduce_dump(
                dump,
                members,
                rank=rank,
                host=host,
                host_state=_state(facts[rank]),
                stack=tuple(map(str, facts[rank].stack)),
                exit_code=facts[rank].exit_code,
            )
        except UNUSABLE:
            continue
    named = {part.members for trace in traces.values() for part in trace.groups}
    return traces, tuple(one for one in members.memberships() if one.identity in named)


def _is_gloo(dump: Dump) -> bool:
    """By its entries; without any by its table of groups, which gloo leaves nameless (flight_recorder.md 1.3)."""
    if not dump.entries:
        return not any(dump.pg_config)
    return all(entry.profiling_name.startswith(_GLOO) for entry in dump.entries)


def _state(facts: RankFacts) -> HostState:
    """A host that waits for its GPU stands anywhere, so its stack tells nothing here."""
    if facts.exit_code is not None or facts.process is ProcessState.GONE:
        return HostState.ENDED
    return HostState.FROZEN if facts.process is ProcessState.STOPPED else HostState.UNKNOWN
