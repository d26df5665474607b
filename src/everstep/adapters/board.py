"""The board of a job within one process: for a job of one host, and what the coordinator's host serves to the others.

Knows nothing of what the values mean.
"""

import threading
import time
from collections.abc import Callable

from everstep.domain.errors import WorldError

KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 64 << 10
KEYS_MAX = 1024
"""Beyond it the oldest value goes."""


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
