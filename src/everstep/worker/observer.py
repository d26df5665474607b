"""The observer beside the user's script: counts steps, marks phases and writes notes on the progress page.

What it does never raises into the user's loop, except for the faults that the injector asks for. Outside of
`everstep run` the current observer is a silent one, so that scripts need no `if`.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from everstep.adapters.workers.progress_page import PageWriter
from everstep.adapters.workers.worker_environment import WorkerPaths, worker_paths
from everstep.domain.causes import FaultKind
from everstep.domain.phases import Phase
from everstep.worker import faults
from everstep.worker.notes import Notes


class Observer:
    """One per process; `current()` gives it.

    Args:
        paths: where the agent wants what; None outside of `everstep run`.
    """

    def __init__(self, paths: WorkerPaths | None) -> None:
        self.paths = paths
        self.notes = Notes(paths)
        self._page = PageWriter(Path(paths.page)) if paths and paths.page else None
        self.counted_by_attach = False
        """Set by `attach`, whose loop then says when a step has ended; else every optimizer step is one."""
        self.at_step_end: Callable[[], None] | None = None
        """What else wants to look around at the end of each step and phase: the recorder."""
        self._loader_fault = False
        self._first_step_seen = False

    def enter(self, phase: Phase) -> None:
        if self.at_step_end is not None:
            self.at_step_end()
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
        if self.at_step_end is not None:
            self.at_step_end()
        if not self._first_step_seen:
            self._first_step_seen = True
            self.notes.part("first_step")
        self._obey_orders()

    def _obey_orders(self) -> None:
        if self._page is not None and (kind := self._page.new_order()) is not None:
            if kind is FaultKind.LOADER and self.counted_by_attach:
                self._loader_fault = True  # `attach` owns the loader and gets stuck in it
            else:
                faults.cause(kind)

    def start_at(self, step: int) -> None:
        """The script resumes after `step` steps; counting goes on from there."""
        if self._page:
            self._page.start_at(step)

    def optimizer_stepped(self) -> None:
        """Called by torch's global hook after every optimizer step."""
        if self.counted_by_attach:
            self.beat()
        else:
            self.finish_step()

    def fetch_batch(self) -> None:
        """Called by `attach` before it asks the loader for a batch."""
        if self._loader_fault:
            self._loader_fault = False
            faults.cause(FaultKind.LOADER)


_current: Observer | None = None


def current() -> Observer:
    """This process's observer. Made at the first call, from the environment."""
    global _current  # noqa: PLW0603 - one observer per process is the point
    if _current is None:
        _current = Observer(worker_paths())
    return _current
