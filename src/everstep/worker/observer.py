"""The observer beside the user's script: counts steps, marks phases and writes notes on the progress page.

What it does never raises into the user's loop, except for the faults that the injector asks for. Outside of
`everstep run` the current observer is a silent one, so that scripts need no `if`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from everstep.adapters.progress_page import PageWriter
from everstep.adapters.worker_environment import WorkerPaths, worker_paths
from everstep.domain.causes import FaultKind
from everstep.domain.codec import to_json
from everstep.domain.events import Event, WorkerReady
from everstep.domain.ids import Attempt, Rank
from everstep.domain.phases import Phase
from everstep.worker import faults

_log = logging.getLogger(__name__)


class Observer:
    """One per process; `current()` gives it.

    Args:
        paths: where the agent wants what; None outside of `everstep run`.
    """

    def __init__(self, paths: WorkerPaths | None) -> None:
        self.paths = paths
        self._page = PageWriter(Path(paths.page)) if paths and paths.page else None
        self._counts_optimizer_steps = True
        self._loader_fault = False
        self._first_step_seen = False
        self._notes_fd = -1

    def now_s(self) -> float:
        """Seconds on the run's clock; since boot outside of `everstep run`."""
        zero_ns = self.paths.clock_zero_ns if self.paths else 0
        return (time.monotonic_ns() - zero_ns) / 1e9

    def enter(self, phase: Phase) -> None:
        if self._page:
            self._page.enter(phase)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Mark a phase for the length of a `with` block, then go back to the one before."""
        before = self._page.phase if self._page else phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self) -> None:
        """Progress inside a phase, so that a long save or evaluation is not taken for a hang."""
        if self._page:
            self._page.beat()

    def log_loss(self, loss: float) -> None:
        if self._page:
            self._page.log_loss(loss)

    def finish_step(self, step: int | None = None) -> None:
        """A step has ended; without a number it is the one after the last. May cause a fault that was ordered."""
        if self._page is None:
            return
        self._page.finish_step(self._page.step + 1 if step is None else step)
        if not self._first_step_seen:
            self._first_step_seen = True
            self.part("first_step")
        self.obey_orders()

    def obey_orders(self) -> None:
        if self._page is not None and (kind := self._page.new_order()) is not None:
            if kind is FaultKind.LOADER and not self._counts_optimizer_steps:
                self._loader_fault = True  # `attach` owns the loader and gets stuck in it
            else:
                faults.cause(kind)

    def optimizer_stepped(self) -> None:
        """Called by torch's global hook after every optimizer step."""
        if self._counts_optimizer_steps:
            self.finish_step()
        else:
            self.beat()

    def leave_counting_to_attach(self) -> None:
        self._counts_optimizer_steps = False

    def fetch_batch(self) -> None:
        """Called by `attach` before it asks the loader for a batch."""
        if self._loader_fault:
            self._loader_fault = False
            faults.cause(FaultKind.LOADER)

    def part(self, name: str) -> None:
        """A part of the start is done: `imported`, `group_ready`, `attached`, `restored`, `first_step`."""
        if self.paths:
            now_s = self.now_s()
            started_s = (self.paths.started_ns - self.paths.clock_zero_ns) / 1e9
            self.note(
                WorkerReady(
                    at_s=now_s,
                    attempt=Attempt(self.paths.attempt),
                    rank=Rank(self.paths.rank),
                    part=name,
                    after_s=now_s - started_s,
                )
            )

    def note(self, event: Event) -> None:
        """Hand an event to the agent, by way of a file that outlives this process."""
        if not self.paths or not self.paths.notes:
            return
        line = type(event).__name__.encode() + b" " + to_json(event) + b"\n"
        try:
            if self._notes_fd < 0:
                self._notes_fd = os.open(self.paths.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._notes_fd, line)
        except OSError as error:
            _log.warning("everstep cannot write its notes (%s); the ledger will lack them", error.strerror)
            self.paths = None


_current: Observer | None = None


def current() -> Observer:
    """This process's observer. Made at the first call, from the environment."""
    global _current  # noqa: PLW0603 - one observer per process is the point
    if _current is None:
        _current = Observer(worker_paths())
    return _current
