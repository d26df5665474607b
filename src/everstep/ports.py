"""The small Protocols through which `runtime` meets the world; real in `adapters/`, simulated in `sim/`.

They know nothing of how: no path, process or socket type crosses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.domain.causes import FaultKind
from everstep.domain.codec import Entry
from everstep.domain.commands import Command, HostCommand, StartWorkers
from everstep.domain.events import Event
from everstep.domain.evidence import EvidenceFile, RankSummary
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.progress import PageView


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on this run's clock; never goes back. All agents of one host share it."""
        ...

    def wall(self) -> str:
        """UTC wall time in ISO 8601 with milliseconds, for people."""
        ...


class Ledger(Protocol):
    """Append-only; the only truth."""

    def read(self) -> Sequence[Entry]:
        """All whole entries that were there when it was opened."""
        ...

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        """Add entries in order. With `durable` they are on disk before this returns.

        Raises:
            WorldError: they can't be written; the entries before them are whole.
        """
        ...


class AgentChannel(Protocol):
    """An agent's end of the line to the coordinator."""

    def send(self, event: Event) -> None: ...

    def receive(self) -> Sequence[HostCommand]:
        """The commands that have come since the last call, in order; does not wait."""
        ...


class CoordinatorChannel(Protocol):
    """The coordinator's end of the lines to all agents."""

    def receive(self, timeout_s: float) -> Sequence[Event]:
        """The events that have come, in order; waits up to `timeout_s` for the first."""
        ...

    def send(self, command: HostCommand, *, host: HostId) -> None: ...


class Board(Protocol):
    """Where the hosts of a job leave each other short messages: addresses, mostly. Not in the ledger; newest wins."""

    def post(self, key: str, value: bytes) -> None:
        """Put a value there, in the place of an older one; it may be seen a moment later.

        Raises:
            WorldError: the board cannot be reached.
        """
        ...

    def read(self, key: str, *, within_s: float) -> bytes:
        """The value; waits until some host has posted one.

        Raises:
            WorldError: nobody has within `within_s`, or the board cannot be reached.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a worker ended, with what it left behind (see `domain.events.WorkerExited`)."""

    rank: Rank
    pid: int
    exit_code: int
    at_s: float
    error_type: str = ""
    error_message: str = ""
    error_where: str = ""
    error_at_s: float | None = None
    traceback: str = ""
    last_lines: str = ""
    oom_killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    pids: tuple[int, ...]
    warm: bool


class Workers(Protocol):
    """The worker processes of one host. One attempt at a time."""

    def start(self, command: StartWorkers) -> Started:
        """Start this host's share.

        Raises:
            ConfigError: trying again is useless.
            WorldError: it may work later.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a worker ends, a command comes or the time is over."""
        ...

    def exits(self) -> Sequence[Exit]:
        """Workers that have ended since the last call."""
        ...

    def store_loss(self) -> str:
        """Why the attempt's rendezvous store is gone; empty while it is there."""
        ...

    def signal(self, rank: Rank, kind: FaultKind) -> None:
        """Cause a fault in the rank, for the injector."""
        ...

    def stop(self, kill_ranks: Sequence[Rank], grace_s: float) -> tuple[Rank, ...]:
        """End all workers and whatever they started: `kill_ranks` at once, the rest after SIGTERM and the grace.

        Returns the ranks that had to be killed after the grace. No process of the attempt lives when it returns.
        """
        ...


class Pages(Protocol):
    """What the workers of one host write down themselves, read without asking them."""

    def views(self) -> Sequence[PageView]:
        """The progress pages of all ranks, dead ones too, with the marks that are new."""
        ...

    def notes(self) -> Sequence[Event]:
        """Events that the workers wrote down since the last call."""
        ...


class Evidence(Protocol):
    """Looks at the workers of one host from outside, without their help, each source under its own deadline."""

    def collect(
        self, *, attempt: Attempt, incident: IncidentId, snapshot: int
    ) -> tuple[Sequence[RankSummary], Sequence[EvidenceFile]]:
        """One summary per rank; all files are on disk when this returns."""
        ...
