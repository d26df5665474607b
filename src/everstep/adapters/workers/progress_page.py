"""A rank's progress page: fixed layout in shared memory, written by the worker, read by the agent without asking it.

A frozen or dead rank can still be read. The page knows numbers only; what they mean for a job is policy's affair.
One writer and one reader need no lock: the writer makes the sequence number odd, writes, and makes it even again.

Layout (little endian): header 0-127, order of the agent 128-159, marks from 4096.
"""

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.checkpoints.shared_pages import make_page, open_page
from everstep.domain.causes import FaultKind
from everstep.domain.errors import EvidenceError
from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.domain.progress import Mark, PageView

_MAGIC = b"EVSTEP01"
_IDENTITY = struct.Struct("<8sIIII")  # magic, rank, world size, attempt, pid
_SEQUENCE = struct.Struct("<Q")
_STATE = struct.Struct("<QIIQQdQ")  # step, phase, flags, changed_ns, beats, loss, marks written
_ORDER = struct.Struct("<QII")  # order number, fault kind, reserved
_MARK = struct.Struct("<QQII")  # time_ns, step, phase, is step
_SEQUENCE_AT, _STATE_AT, _ORDER_AT, _MARKS_AT = 24, 32, 128, 4096
MARK_COUNT = 4096
PAGE_BYTES = _MARKS_AT + MARK_COUNT * _MARK.size
_FAULTS = tuple(FaultKind)
_READ_ATTEMPTS = 64
_NO_LOSS = float("nan")


def create_page(path: Path, *, rank: int, world_size: int, attempt: int) -> None:
    """Make an empty page, mode 0600.

    Raises:
        WorldError: shared memory is full or not writable.
    """
    identity = _IDENTITY.pack(_MAGIC, rank, world_size, attempt, 0)
    state = _STATE.pack(0, Phase.UNOBSERVED, 0, time.monotonic_ns(), 0, _NO_LOSS, 0)
    make_page(path, PAGE_BYTES, identity.ljust(_STATE_AT, b"\0") + state, what="progress page")


class PageWriter:
    """The worker's side. Every call costs about a microsecond and never raises after the constructor."""

    def __init__(self, path: Path) -> None:
        self._memory = open_page(path, PAGE_BYTES)
        self._sequence = 0
        self._step = 0
        self._phase = Phase.STARTING
        self._beats = 0
        self._loss = _NO_LOSS
        self._mark_count = 0
        magic, rank, world_size, attempt, _ = _IDENTITY.unpack_from(self._memory, 0)
        _IDENTITY.pack_into(self._memory, 0, magic, rank, world_size, attempt, os.getpid())
        self._order_seen = self._order()[0]
        self._write(is_step=False, marked=True)

    @property
    def step(self) -> int:
        return self._step

    @property
    def phase(self) -> Phase:
        return self._phase

    def finish_step(self, step: int) -> None:
        """Step number `step` (counted from 1) has ended."""
        self._step = step
        if self._phase is Phase.STARTING or self._phase is Phase.WARMING_UP:
            self._phase = Phase.TRAINING
        self._write(is_step=True, marked=True)

    def start_at(self, step: int) -> None:
        """The script resumes after `step` steps, so the next one is `step + 1`."""
        self._step = step
        self._write(is_step=False, marked=False)

    def enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._write(is_step=False, marked=True)

    def beat(self) -> None:
        """Progress inside a phase: a piece of a checkpoint written, a batch evaluated."""
        self._write(is_step=False, marked=False)

    def log_loss(self, loss: float) -> None:
        self._loss = loss

    def new_order(self) -> FaultKind | None:
        """A fault that the injector wants caused, once; None nearly always."""
        number, kind = self._order()
        if number == self._order_seen:
            return None
        self._order_seen = number
        return _FAULTS[kind]

    def _order(self) -> tuple[int, int]:
        number, kind, _ = _ORDER.unpack_from(self._memory, _ORDER_AT)
        return number, kind

    def _write(self, *, is_step: bool, marked: bool) -> None:
        now_ns = time.monotonic_ns()
        self._beats += 1
        self._sequence += 1
        _SEQUENCE.pack_into(self._memory, _SEQUENCE_AT, self._sequence)
        if marked:
            slot = _MARKS_AT + (self._mark_count % MARK_COUNT) * _MARK.size
            _MARK.pack_into(self._memory, slot, now_ns, self._step, self._phase, is_step)
            self._mark_count += 1
        _STATE.pack_into(
            self._memory, _STATE_AT, self._step, self._phase, 1, now_ns, self._beats, self._loss, self._mark_count
        )
        self._sequence += 1
        _SEQUENCE.pack_into(self._memory, _SEQUENCE_AT, self._sequence)


@dataclass(frozen=True, slots=True)
class _State:
    step: int
    phase: int
    observed: bool
    changed_ns: int
    loss: float
    mark_count: int

    def completed(self, step: int, phase: int, changed_ns: int, mark_count: int) -> "_State":
        """This state, as far as a torn later one tells of more. All torn numbers are too small, none is too large."""
        return _State(
            max(self.step, step),
            phase or self.phase,
            self.observed,
            max(self.changed_ns, changed_ns),
            self.loss,
            max(self.mark_count, mark_count),
        )


class PageReader:
    """The agent's side of one page.

    Args:
        path: the page.
        to_run_s: turns a reading of CLOCK_MONOTONIC in nanoseconds into seconds of the run's clock.

    Raises:
        EvidenceError: not a page.
    """

    def __init__(self, path: Path, *, to_run_s: Callable[[int], float]) -> None:
        try:
            self._memory = open_page(path, PAGE_BYTES)
        except (OSError, ValueError) as error:
            raise EvidenceError(f"{path} is no progress page: {error}") from error
        magic, rank, _, _, _ = _IDENTITY.unpack_from(self._memory, 0)
        if magic != _MAGIC:
            raise EvidenceError(f"{path} is no progress page of this version of everstep")
        self.rank = Rank(rank)
        self._to_run_s = to_run_s
        self._marks_read = 0
        self._orders = 0
        self._last = _State(0, Phase.UNOBSERVED, False, 0, _NO_LOSS, 0)
        self._last = self._state()

    def observed(self) -> bool:
        """Whether the worker's observer has opened the page."""
        return self._state().observed

    def view(self) -> PageView:
        """The page as it is now, with the marks that are new since the last view."""
        state = self._state()
        return self._view(state, self._new_marks(state.mark_count))

    def view_without_marks(self) -> PageView:
        """The page as it is now, leaving its marks for the next `view`."""
        return self._view(self._state(), ())

    def raw(self) -> bytes:
        """The page's header, for the evidence folder."""
        return bytes(self._memory[:_ORDER_AT])

    def order(self, kind: FaultKind) -> None:
        """Ask the worker to cause a fault in itself at its next step."""
        self._orders += 1
        _ORDER.pack_into(self._memory, _ORDER_AT, self._orders, _FAULTS.index(kind), 0)

    def close(self) -> None:
        self._memory.close()

    def _view(self, state: _State, marks: Sequence[Mark]) -> PageView:
        return PageView(
            rank=self.rank,
            phase=Phase(state.phase),
            step=state.step,
            changed_at_s=self._to_run_s(state.changed_ns),
            loss=None if state.loss != state.loss else state.loss,  # NaN is the only number unequal to itself
            marks=tuple(marks),
        )

    def _state(self) -> _State:
        # A writer that died or froze between the two sequence numbers leaves a page odd for ever, and one that lost its
        # CPU there for a while: struct zeroes the state before it fills it, so what was known before still counts.
        attempts_left = _READ_ATTEMPTS
        while True:
            attempts_left -= 1
            before = _SEQUENCE.unpack_from(self._memory, _SEQUENCE_AT)[0]
            step, phase, flags, changed_ns, _, loss, marks = _STATE.unpack_from(self._memory, _STATE_AT)
            whole = before % 2 == 0 and before == _SEQUENCE.unpack_from(self._memory, _SEQUENCE_AT)[0]
            if whole:
                self._last = _State(step, phase, bool(flags & 1), changed_ns, loss, marks)
                return self._last
            if not attempts_left:
                return self._last.completed(step, phase, changed_ns, marks)

    def _new_marks(self, mark_count: int) -> Sequence[Mark]:
        first = max(self._marks_read, mark_count - MARK_COUNT + 1)
        marks = []
        for number in range(first, mark_count):
            at_ns, step, phase, is_step = _MARK.unpack_from(
                self._memory, _MARKS_AT + (number % MARK_COUNT) * _MARK.size
            )
            marks.append(
                Mark(at_s=self._to_run_s(at_ns), rank=self.rank, step=step, phase=Phase(phase), is_step=bool(is_step))
            )
        self._marks_read = mark_count
        # A reader that lost its CPU here may have been lapped: such slots hold newer marks, and come next time.
        lapped = max(0, self._state().mark_count - MARK_COUNT + 1 - first) if marks else 0
        return marks[lapped:]
