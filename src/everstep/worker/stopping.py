"""A stop that is announced by SIGTERM: the step in flight ends, all ranks save the same one, and those asked leave.

It agrees on the step and ends the process; what is saved, and where to, is its caller's. A script that handles SIGTERM
itself is left alone. A training that ends no step any more dies at once, as without everstep.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from everstep.adapters.checkpoints.stop_page import StopPage, is_broken
from everstep.policy.checkpoints import step_to_stop_after

_STEPS_KEPT = 32
_LONGEST_FACTOR = 4.0
_FLOOR_S = 1.5
"""A step is awaited for this long, or for four times the longest of late: longer silences arouse suspicion, too."""
_LATEST = 4.0
"""After so many times that, it is over even if steps end: then rank 0 does not hear."""
_LOOK_AGAIN_S = 0.02


class Stopping:
    """One rank's side.

    Args:
        pages: the folder of this attempt's progress pages, where the agent marks it as broken.
    """

    def __init__(self, page: StopPage, rank: int, pages: Path) -> None:
        self._page = page
        self._rank = rank
        self._pages = pages
        self._ended_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._leaving = False

    def watch(self) -> bool:
        """Take SIGTERM, unless the script does; whether it was taken. Call it in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return False
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        if (before := signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)
            os.close(read_end)
            os.close(write_end)
            return False
        os.set_blocking(read_end, True)
        _asked_by_signal.append(self)
        signal.signal(signal.SIGTERM, _on_signal)
        os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget)
        threading.Thread(target=self._serve, args=(read_end,), name="everstep-stopping", daemon=True).start()
        return True

    def ask(self) -> None:
        """This rank is to stop."""
        self._page.ask(self._rank)

    def due(self, step: int) -> bool:
        """Whether this is the step, or one after it, that all ranks stop after. Called at the end of each step."""
        now_s = time.monotonic()
        if self._ended_s:
            self._steps_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        self._page.note_step(self._rank, step)
        announced = self._page.announced()
        if not announced and self._rank == 0 and self._page.anyone_asked():
            announced = step_to_stop_after(self._page.steps())
            self._page.announce(announced)
        return 0 < announced <= step

    def begin_save(self, step: int) -> bool:
        """Whether all ranks can save `step`: it is the one that was announced. Until `leave`, only the agent kills."""
        self._leaving = step == self._page.announced()
        return self._leaving

    def patience_s(self) -> float:
        """For how long it makes sense to wait for something that others do in a step."""
        return max(_FLOOR_S, _LONGEST_FACTOR * max(self._steps_s, default=0.0))

    def leave(self) -> None:
        """End this process as SIGTERM does (128 + 15 in a shell), if it was asked to; the others train on."""
        if self._page.is_asked(self._rank):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            _die()
        self._leaving = False

    def _serve(self, read_end: int) -> None:
        """Wait for SIGTERM, beside a training that may hang in a collective; end the process if no step ends."""
        while signal.SIGTERM not in os.read(read_end, 64):
            continue
        self.ask()
        asked_s = time.monotonic()
        while not self._leaving:
            now_s, patience_s = time.monotonic(), self.patience_s()
            if is_broken(self._pages) or now_s - self._ended_s > patience_s or now_s - asked_s > _LATEST * patience_s:
                _die()
            time.sleep(_LOOK_AGAIN_S)


_asked_by_signal: list[Stopping] = []


def _on_signal(*_: object) -> None:
    """In the main thread. The other one hears of the signal too, and first where this one hangs."""
    for stopping in _asked_by_signal:
        stopping.ask()


def _hold_back() -> None:
    """Before a fork: what is sent to the child must not reach the pipe that both have, until the child has let go."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _forget() -> None:
    """In a fork, a loader's worker: SIGTERM is its own, and ends it."""
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_through()


def _die() -> NoReturn:
    """By the signal itself, from any thread: Python's own `signal.signal` works in the main thread only."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(1.0)  # it comes at once
