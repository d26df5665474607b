"""Storage that does not answer: people are told, and no rank is blamed for it. It knows nothing of checkpoints.

A call to a hung disk returns when it likes and cannot be ended from inside, so another thread looks at the clock.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from everstep.domain.events import CheckpointDelayed
from everstep.domain.ids import Attempt
from everstep.worker.observer import Observer

_log = logging.getLogger(__name__)
TELL_AFTER_S = 10.0
"""Storage that has not answered for as long is told of, and again each time it has lasted six times longer."""
_AGAIN_FACTOR = 6.0
_LEARNED_FACTOR = 3.0
"""Slow storage is no news: a silence is not told of before this multiple of the usual one, nor of `after_s`."""
_BEAT_AFTER_S = 5.0
BEATS_FOR_S = 1800.0
"""For as long a rank that waits for storage is not taken for a hung one; afterwards it is judged like any other."""
_POLL_S = 0.5
_T = TypeVar("_T")


class Patience:
    """When a silence is worth a word: for the first time after `after_s`, and when it lasts."""

    def __init__(self, after_s: float = TELL_AFTER_S) -> None:
        self._after_s = after_s
        self._told_at_s = 0.0

    def is_over(self, silent_s: float, *, usual_s: float = 0.0) -> bool:
        """Whether to tell now. Ask again and again; a silence of 0 begins anew."""
        if silent_s < self._told_at_s:
            self._told_at_s = 0.0
        first_s = max(self._after_s, min(usual_s, self._after_s) * _LEARNED_FACTOR)
        next_s = self._told_at_s * _AGAIN_FACTOR if self._told_at_s else first_s
        if silent_s < next_s:
            return False
        self._told_at_s = silent_s
        return True


def tell_delay(observer: Observer, attempt: int, *, step: int, waited_s: float, reason: str) -> None:
    """Into the ledger and the log; the reason says what is known and where the state is meanwhile."""
    notes = observer.notes
    event = CheckpointDelayed(
        at_s=notes.now_s(), attempt=Attempt(attempt), step=step, waited_s=round(waited_s, 1), reason=reason
    )
    notes.write(event)
    _log.warning("everstep: step %d is not durable yet: %s", step, reason)


class StorageWatch:
    """Looks at the clock while this rank itself writes: tells a hang, and shows the agent that the rank only waits."""

    def __init__(self, observer: Observer, *, rank: int) -> None:
        self._observer = observer
        self._rank = rank
        self._longest_s = 0.0
        self._moved_s = 0.0
        self._lock = threading.Lock()  # a progress page has one writer at a time

    @contextlib.contextmanager
    def asking(self, step: int, attempt: int) -> Iterator[None]:
        """For the length of a `with` block this rank does nothing but ask storage."""
        over = threading.Event()
        self._moved_s = time.monotonic()
        arguments = (over, step, attempt)
        thread = threading.Thread(target=self._look, args=arguments, name="everstep-storage-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._longest_s = max(self._longest_s, time.monotonic() - self._moved_s)
            with self._lock:
                over.set()
            thread.join()

    def moved(self) -> None:
        """Storage has answered, and more is asked of it."""
        with self._lock:
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s = now_s
            self._observer.beat()

    def _look(self, over: threading.Event, step: int, attempt: int) -> None:
        patience = Patience(TELL_AFTER_S)
        while not over.wait(_POLL_S):
            silent_s = time.monotonic() - self._moved_s
            with self._lock:
                if _BEAT_AFTER_S < silent_s < BEATS_FOR_S and not over.is_set():
                    self._observer.beat()
            if patience.is_over(silent_s, usual_s=self._longest_s):
                reason = f"storage has not answered rank {self._rank} for {silent_s:.0f} s; the ranks wait for it"
                tell_delay(self._observer, attempt, step=step, waited_s=silent_s, reason=reason)


class Answer(Generic[_T]):
    """A question to storage, asked in a thread of its own, so that whoever asked need not wait for ever."""

    def __init__(self, question: Callable[[], _T], *, name: str) -> None:
        self._question = question
        self._found: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, name=f"everstep-{name}", daemon=True)
        self.asked_s = time.monotonic()
        self._thread.start()

    def is_there(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def get(self) -> _T:
        """The answer, or the error that the question ended with. Only once it is there."""
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _ask(self) -> None:
        try:
            self._found.append(self._question())
        except Exception as error:  # outermost frame
            self._error = error
