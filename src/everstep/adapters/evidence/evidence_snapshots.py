"""Reads what everstep saw of the processes themselves, `snapshot-N.json`, beside the dumps of their recorders.

Where a job has several hosts, each wrote its own: `snapshot-N.HOST.json`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.domain.evidence import ProcessState, RankSummary
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import HostState, Membership, RankTrace

_NUMBER = re.compile(r"\d+")
_WAITING_FILES = ("torch/distributed/",)
_INNERMOST = 3
_DECODER = msgspec.json.Decoder(list[RankSummary])
_NOWHERE = HostId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What is known of a rank besides its recorder.

    Attributes:
        trace: its operations from everstep's own ring, which knows more than PyTorch's recorder; None without one.
        memberships: member lists that came with it.
    """

    host: HostId = _NOWHERE
    state: HostState = HostState.UNKNOWN
    stack: tuple[str, ...] = ()
    exit_code: int | None = None
    trace: RankTrace | None = None
    memberships: tuple[Membership, ...] = ()


def read_snapshots(paths: Sequence[Path]) -> dict[int, dict[Rank, HostFacts]]:
    """By number of the snapshot. One that is torn is left out: the dumps beside it speak for themselves."""
    snapshots: dict[int, dict[Rank, HostFacts]] = {}
    for path in paths:
        number = _NUMBER.search(path.name)
        try:
            summaries = _DECODER.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            continue
        of_all_hosts = snapshots.setdefault(int(number[0]) if number else 0, {})
        of_all_hosts |= {summary.rank: _facts(summary) for summary in summaries}
    return snapshots


def _facts(summary: RankSummary) -> HostFacts:
    return HostFacts(
        host=summary.host,
        state=_state(summary),
        stack=tuple(map(str, summary.stack)),
        exit_code=summary.exit_code,
        trace=summary.trace,
        memberships=summary.memberships,
    )


def _state(summary: RankSummary) -> HostState:
    if summary.process is ProcessState.GONE:
        return HostState.ENDED
    if summary.process in (ProcessState.STOPPED, ProcessState.BLOCKED) or summary.answers is False:
        return HostState.FROZEN
    waits = any(part in frame.file for frame in summary.stack[:_INNERMOST] for part in _WAITING_FILES)
    if waits:
        return HostState.IN_OPERATION
    if summary.gil_free is False and not any(group.enqueued > group.completed for group in summary.groups):
        return HostState.FROZEN
    return HostState.ELSEWHERE if summary.stack else HostState.UNKNOWN


def facts_of(rank: Rank, facts: HostFacts) -> RankTrace:
    """A trace of a rank that has no dump: its process is all that is known."""
    return RankTrace(
        rank=rank,
        host=facts.host,
        groups=(),
        host_state=facts.state,
        stack=facts.stack,
        exit_code=facts.exit_code,
    )
