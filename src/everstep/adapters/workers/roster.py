"""Who the workers of this host's attempt are and where each leaves its traces: what the adapters share about them."""

from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.evidence.operation_ring import RingReader
from everstep.adapters.workers.progress_page import PageReader
from everstep.domain.ids import Rank


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker. Mutable in one thing only: `exit_code`, once.

    Attributes:
        page: its progress page, readable whatever becomes of the process.
        ring: its operation ring, likewise; None where there is none.
        server, stacks, error, notes: paths of `WorkerPaths`.
    """

    rank: Rank
    pid: int
    page: PageReader
    server: Path
    stacks: Path
    error: Path
    notes: Path
    ring: RingReader | None = None
    exit_code: int | None = None


class Roster:
    """The workers of one attempt; replaced whole at the next."""

    def __init__(self) -> None:
        self.workers: dict[Rank, Worker] = {}

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.exit_code is None]

    def by_pid(self, pid: int) -> Worker | None:
        return next((worker for worker in self.workers.values() if worker.pid == pid), None)
