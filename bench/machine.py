"""The machine that is measured on: how busy it is, and which processes belong to a job of the benchmark."""

import contextlib
import os
import signal
import time
from pathlib import Path

QUIET_SHARE = 0.5
_WINDOW_S = 1.5
_WAIT_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def load1() -> float:
    return round(os.getloadavg()[0], 2)


def _ticks() -> tuple[int, int]:
    """Idle and all clock ticks of all CPUs since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def wait_until_quiet() -> float:
    """Wait, at most 10 s, until less than half of the CPU time of 1.5 s is used. Returns the busy share seen last."""
    ends_s = time.monotonic() + _WAIT_S
    while True:
        idle, everything = _ticks()
        time.sleep(_WINDOW_S)
        idle_later, everything_later = _ticks()
        busy = 1 - (idle_later - idle) / max(1, everything_later - everything)
        if busy < QUIET_SHARE or time.monotonic() >= ends_s:
            return round(busy, 2)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its reaped children; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S


def marked_pids(variable: str) -> list[int]:
    """Living processes that were started with this `NAME=VALUE` in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                environment = Path(f"/proc/{entry}/environ").read_bytes()
                if variable.encode() in environment.split(b"\0") and not is_gone(int(entry)):
                    found.append(int(entry))
    return found


def kill_marked(variable: str) -> int:
    """SIGKILL every process with this mark until none is left. Returns how many there were at first."""
    first = left = marked_pids(variable)
    rounds_left = 100
    while left and rounds_left:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = marked_pids(variable)
        rounds_left -= 1
    return len(first)
