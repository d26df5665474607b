"""The board of a job within one process: for a job of one host, and what the coordinator's host serves to the others.

Knows nothing of what the values mean.
"""

import threading
import time

from everstep.domain.errors import WorldError

KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 64 << 10
KEYS_MAX = 4096
"""Beyond it the oldest value goes."""


class LocalBoard:
    """The `Board` port over a dictionary; for any number of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()

    def post(self, key: str, value: bytes) -> None:
        """See `ports.Board`."""
        assert len(key.encode()) <= KEY_BYTES_MAX
        assert len(value) <= VALUE_BYTES_MAX
        with self._news:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > KEYS_MAX:
                del self._values[next(iter(self._values))]
            self._news.notify_all()

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
