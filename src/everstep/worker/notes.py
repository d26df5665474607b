"""Notes to the agent: events that only the worker knows, in a file that outlives the process."""

import logging
import os
import time

from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.codec import to_json
from everstep.domain.events import Event, WorkerReady
from everstep.domain.ids import Attempt, Rank

_log = logging.getLogger(__name__)


class Notes:
    """Appends events, whole lines at a time; never raises.

    Args:
        paths: where the agent reads; None outside of `everstep run`, where notes go nowhere.
    """

    def __init__(self, paths: WorkerPaths | None) -> None:
        self._paths = paths
        self._fd = -1
        self.parts: set[str] = set()
        """The parts of the start that are done."""

    def now_s(self) -> float:
        """Seconds on the run's clock; since boot outside of `everstep run`."""
        zero_ns = self._paths.clock_zero_ns if self._paths else 0
        return (time.monotonic_ns() - zero_ns) / 1e9

    def part(self, name: str) -> None:
        """A part of the start is done: `imported`, `group_ready`, `attached`, `restored`, `rehearsed`, `first_step`."""
        self.parts.add(name)
        if self._paths is None:
            return
        now_s = self.now_s()
        started_s = (self._paths.started_ns - self._paths.clock_zero_ns) / 1e9
        self.write(
            WorkerReady(
                at_s=now_s,
                attempt=Attempt(self._paths.attempt),
                rank=Rank(self._paths.rank),
                part=name,
                after_s=now_s - started_s,
            )
        )

    def write(self, event: Event) -> None:
        if self._paths is None or not self._paths.notes:
            return
        line = type(event).__name__.encode() + b" " + to_json(event) + b"\n"
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._paths.notes, flags, 0o600)
            os.write(self._fd, line)
        except OSError as error:
            _log.warning("everstep cannot write its notes (%s); the ledger will lack them", error.strerror)
            self._paths = None
