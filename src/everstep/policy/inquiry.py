"""An inquiry into a silence: two snapshots of every host, then a verdict.

The part of the job's machine that waits for evidence.

Knows nothing of restarts; it answers with commands to collect and, once, a finding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.commands import CollectEvidence
from everstep.domain.events import EvidenceCollected
from everstep.domain.evidence import RankSummary
from everstep.domain.ids import Attempt, HostId, IncidentId
from everstep.policy.hang import HangFinding, locate_hang


@dataclass(frozen=True, slots=True, kw_only=True)
class InquiryConfig:
    """Attributes:
    apart_s: time between the two snapshots.
    answer_within_s: a host that has not sent its evidence by then is judged without it.
    snapshot_count: 2 for a silence; 1 for a death, where nothing needs to be compared.
    """

    apart_s: float = 0.2
    answer_within_s: float = 10.0


class Inquiry:
    """One inquiry. `collect` starts a snapshot, `answered` and `due` tell when to go on.

    Args:
        incident: names the folder of evidence.
        hosts: everyone who must answer.
        snapshot_count: 2 to compare, 1 to preserve.
    """

    def __init__(
        self,
        *,
        incident: IncidentId,
        attempt: Attempt,
        hosts: Sequence[HostId],
        snapshot_count: int,
        config: InquiryConfig,
    ) -> None:
        self.incident = incident
        self._attempt = attempt
        self._hosts = tuple(hosts)
        self._count = snapshot_count
        self._config = config
        self._answers: list[dict[HostId, tuple[RankSummary, ...]]] = []
        self._asked_at_s = 0.0
        self._times: list[float] = []

    def collect(self, at_s: float) -> tuple[CollectEvidence, ...]:
        """Ask every host for the next snapshot."""
        self._answers.append({})
        self._asked_at_s = at_s
        return tuple(
            CollectEvidence(
                at_s=at_s, attempt=self._attempt, host=host, incident=self.incident, snapshot=len(self._answers)
            )
            for host in self._hosts
        )

    def take(self, event: EvidenceCollected) -> None:
        if event.incident == self.incident and event.snapshot == len(self._answers):
            self._answers[-1][event.host] = event.summaries
            if len(self._answers[-1]) == len(self._hosts):
                self._times.append(event.at_s)

    def complete(self, at_s: float) -> bool:
        """Whether all snapshots are there, or have been waited for long enough."""
        return len(self._answers) == self._count and self._answered(at_s)

    def due(self, at_s: float) -> bool:
        """Whether it is time for the next snapshot."""
        return (
            0 < len(self._answers) < self._count
            and self._answered(at_s)
            and at_s >= self._asked_at_s + self._config.apart_s
        )

    def _answered(self, at_s: float) -> bool:
        return len(self._answers[-1]) == len(self._hosts) or at_s >= self._asked_at_s + self._config.answer_within_s

    def summaries(self, snapshot: int) -> tuple[RankSummary, ...]:
        """All ranks of a snapshot, by rank; `snapshot` counts from 1."""
        found = [summary for host in self._answers[snapshot - 1].values() for summary in host]
        return tuple(sorted(found, key=lambda summary: summary.rank))

    def finding(self) -> HangFinding:
        apart_s = self._times[-1] - self._times[0] if len(self._times) > 1 else self._config.apart_s
        return locate_hang(self.summaries(1), self.summaries(self._count), apart_s=apart_s)
