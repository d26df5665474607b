"""The board of a job within one process: for a job of one host, and what the coordinator's host serves to the others.

Knows nothing of what the values mean.
"""

import threading
import time
from collections.abc import Callable

from everstep.domain.errors import WorldError
from everstep.ports import Board

KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 64 << 10
KEYS_MAX = 1024
"""Beyond it the oldest value goes."""
_SLICE_S = 0.5


class LocalBoard:
    """The `Board` port over a dictionary; for any number of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()
        self._tellers: dict[object, Callable[[str, bytes], None]] = {}

    def post(self, key: str, value: bytes) -> None:
        """See `ports.Board`."""
        assert len(key.encode()) <= KEY_BYTES_MAX
        assert len(value) <= VALUE_BYTES_MAX
        with self._news:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > KEYS_MAX:
                del self._values[next(iter(self._values))]
            for tell in self._tellers.values():
                tell(key, value)
            self._news.notify_all()

    def follow(self, who: object, tell: Callable[[str, bytes], None]) -> None:
        """Have `tell` called with every value there is and will be, in order; it must not wait for anything."""
        with self._news:
            for key, value in self._values.items():
                tell(key, value)
            self._tellers[who] = tell

    def unfollow(self, who: object) -> None:
        with self._news:
            self._tellers.pop(who, None)

    def read(self, key: str, *, within_s: float) -> bytes:
        """See `ports.Board`."""
        ends_s = time.monotonic() + within_s
        with self._news:
            while key not in self._values:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    raise WorldError(f"no host has posted {key!r} within {within_s:g} s", retryable=True)
                self._news.wait(left_s)
            return self._values[key]


def read_unless(board: Board, key: str, *, within_s: float, is_called_off: Callable[[], bool]) -> bytes:
    """A value that another host is to post before this one can start.

    Raises:
        WorldError: nobody has within `within_s`, the board cannot be reached, or the start was called off meanwhile.
    """
    ends_s = time.monotonic() + within_s
    while True:
        check_wanted(is_called_off)
        asked_s = time.monotonic()
        try:
            return board.read(key, within_s=_SLICE_S)
        except WorldError:
            if time.monotonic() < asked_s + _SLICE_S / 2:
                raise  # the board itself is away
            if time.monotonic() > ends_s:
                raise WorldError(f"no host has posted {key!r} within {within_s:.0f} s", retryable=True) from None


def check_wanted(is_called_off: Callable[[], bool]) -> None:
    """Raises WorldError when a start that waits for other hosts is called off."""
    if is_called_off():
        raise WorldError("the start was called off while it waited for other hosts", retryable=True)
