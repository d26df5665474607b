"""Waits for something that real processes do, with a deadline; no test of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def wait_for(question: Callable[[], _T], what: str, *, within_s: float = 20.0) -> _T:
    """Ask until the answer is true; fails with what was waited for."""
    deadline_s = time.monotonic() + within_s
    while not (answer := question()):
        assert time.monotonic() < deadline_s, f"waited {within_s} s in vain for {what}"
        time.sleep(0.005)
    return answer


@contextlib.contextmanager
def python(code: str, *arguments: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A child that runs `code`; killed and reaped at the end, whatever became of it."""
    child = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, **options
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
