"""The report of one run or many as data: what every form of it (text, colours, JSON, CSV) is made from.

A fold over ledger entries; it reads no files and knows no terminal.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.domain.codec import Entry
from everstep.domain.commands import FinishJob
from everstep.domain.errors import EvidenceError
from everstep.domain.events import RunResumed, RunStarted
from everstep.policy.accounting import Account, Accountant, Part, effective_share, total_parts
from everstep.policy.incidents import Incident, IncidentLog, InterruptionRow, VerdictAccuracy, interruption_table
from everstep.views.storage_troubles import StorageLog, StorageTrouble


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run.

    Attributes:
        name: what the reader gave: the run directory.
        started: the ledger's first entry.
        started_wall, last_wall: UTC wall time of the first and last entries.
        end: the ledger's last word; None while the run is going, or when it was cut off.
        entry_count: lines of the ledger.
        storage: when checkpoints did not become durable.
    """

    name: str
    started: RunStarted
    started_wall: str
    last_wall: str
    end: FinishJob | None
    entry_count: int
    account: Account
    incidents: tuple[Incident, ...]
    accuracy: VerdictAccuracy | None
    storage: tuple[StorageTrouble, ...] = ()

    @property
    def interruptions(self) -> tuple[InterruptionRow, ...]:
        return interruption_table(self.incidents)

    @property
    def lost_s(self) -> float:
        """What all incidents cost together."""
        return sum(incident.lost_s for incident in self.incidents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run or many. Totals are derived from the runs; shares are weighted by elapsed time."""

    runs: tuple[RunReport, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return total_parts(run.account for run in self.runs)

    @property
    def elapsed_s(self) -> float:
        return sum(part.duration_ns for part in self.parts) / 1e9

    @property
    def effective_share(self) -> float:
        return effective_share(self.parts)

    @property
    def interruptions(self) -> tuple[InterruptionRow, ...]:
        return interruption_table(incident for run in self.runs for incident in run.incidents)

    @property
    def accuracy(self) -> VerdictAccuracy | None:
        """All runs' together; None when nothing was injected in any."""
        known = [run.accuracy for run in self.runs if run.accuracy is not None]
        if not known:
            return None
        return VerdictAccuracy(
            injected_count=sum(accuracy.injected_count for accuracy in known),
            found_count=sum(accuracy.found_count for accuracy in known),
            named_count=sum(accuracy.named_count for accuracy in known),
        )


class RunFold:
    """Takes the entries of one ledger, in order, and makes its report; `report` may be called at any time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: RunStarted | None = None
        self._started_wall = ""
        self._last: Entry | None = None
        self._end: FinishJob | None = None
        self._accountant = Accountant()
        self._log = IncidentLog()
        self._storage = StorageLog()

    def take_all(self, entries: Iterable[Entry]) -> int:
        """Take entries until they end, and return how many there were.

        Raises:
            EvidenceError: the first entry is not that of a run's start.
        """
        account, note, store = self._accountant.handle, self._log.handle, self._storage.handle
        count = 0
        for entry in entries:
            body = entry.body
            if self._started is None:
                if not isinstance(body, RunStarted):
                    raise EvidenceError(f"{self._name}: the ledger begins with {type(body).__name__}, not RunStarted")
                self._started, self._started_wall = body, entry.wall
            if isinstance(body, FinishJob | RunResumed):
                self._end = body if isinstance(body, FinishJob) else None
            account(body)
            note(body)
            store(body)
            self._last = entry
            count += 1
        return count

    def report(self) -> RunReport:
        """The report up to the last entry.

        Raises:
            EvidenceError: there was no entry.
        """
        if self._started is None or self._last is None:
            raise EvidenceError(f"{self._name}: the ledger is empty: the run has not started, or was never begun here")
        account = self._accountant.account()
        return RunReport(
            name=self._name,
            started=self._started,
            started_wall=self._started_wall,
            last_wall=self._last.wall,
            end=self._end,
            entry_count=self._last.number,
            account=account,
            incidents=self._log.incidents(account),
            accuracy=self._log.accuracy(),
            storage=self._storage.troubles(),
        )
