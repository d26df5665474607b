"""Python stacks by signal: faulthandler writes them from C, also while other C code holds the GIL."""

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from everstep.adapters.workers.processes import send_signal
from everstep.domain.evidence import Frame

STACK_SIGNAL = signal.SIGRTMAX - 3
"""Real-time, so that no script or library is likely to use it."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
_PAUSE_S = 0.002


def dump_stacks(pids: Mapping[int, Path], *, timeout_s: float) -> dict[int, str]:
    """Signal every process and read what each wrote at the end of its stack file: pid → text, empty without an answer.

    Args:
        pids: each process with the file that its observer opened for this. One without a file has not registered for
            the signal, which would kill it, and is not asked.
        timeout_s: one deadline for all together.
    """
    sizes = {pid: _size(path) for pid, path in pids.items() if path.exists()}
    for pid in sizes:
        send_signal(pid, STACK_SIGNAL)
    texts = dict.fromkeys(pids, "")
    waiting = set(sizes)
    deadline_s = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S)
        for pid in sorted(waiting):
            size = _size(pids[pid])
            text = _read(pids[pid], sizes[pid])
            # the main thread comes last, and its last frame is the script's: a dump that stopped growing is whole
            if text and len(text) == len(texts[pid]) and size == _size(pids[pid]):
                waiting.discard(pid)
            texts[pid] = text
    return texts


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def main_thread(text: str) -> tuple[Frame, ...]:
    """Frames of the main thread, innermost first, from faulthandler's text; it writes the main thread last."""
    block = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)[-1]
    matches = (_FRAME.match(line) for line in block.splitlines())
    return tuple(
        Frame(file=match["file"], line=int(match["line"]), function=match["function"]) for match in matches if match
    )
