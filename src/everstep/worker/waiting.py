"""What a fork does that shall be the next attempt's worker: it maps the slots it would restore from, and waits.

It sleeps on its line to the agent and ends with it. It knows nothing of jobs: what it becomes stands in the order.
"""

import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.worker.restoring import slot_maps

ACCEPTED, GO = b"accepted", b"go"
_MESSAGE_BYTES = 1 << 20
_DESCRIPTOR_COUNT = 2
_LOOK_S = 2.0
"""How soon a slot that was removed is let go of, and a new one mapped."""
_WORK_SHARE = 0.25
"""Of a processor, so that training, which is what counts meanwhile, hardly notices."""
_NAME = "everstep-next"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """For what to wait.

    Attributes:
        rank: whose worker this will be.
        slots: the folder with them.
        beside: pid of the rank's present worker.
    """

    rank: int
    slots: str
    beside: int


def wait_for_order(line: socket.socket, waiting: Waiting) -> tuple[bytes, list[int]]:
    """The order to become a worker, with the descriptors that came along. Ends the process when nobody can order."""
    name = _rename(_NAME)
    order = _sleep(line, waiting)
    try:
        line.send(ACCEPTED)
        word = line.recv(_MESSAGE_BYTES)  # the others may have died, and then this one is not wanted
    except OSError:
        word = b""
    if word != GO:
        os._exit(0)
    _rename(name)
    return order


def _sleep(line: socket.socket, waiting: Waiting) -> tuple[bytes, list[int]]:
    has_work, looked_s = False, -_LOOK_S
    while True:
        began_s = time.monotonic()
        if began_s - looked_s >= _LOOK_S:
            looked_s = began_s
            slot_maps.map_slots(Path(waiting.slots), waiting.rank)
            has_work = True
        has_work = has_work and _may_grow(waiting.beside) and slot_maps.populate_some()
        pause_s = (time.monotonic() - began_s) * (1 / _WORK_SHARE - 1) if has_work else _LOOK_S
        if not select.select([line], [], [], pause_s)[0]:
            continue
        message, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, _DESCRIPTOR_COUNT)
        if not message:
            os._exit(0)
        return message, list(descriptors)


def _may_grow(beside: int) -> bool:
    """Whether the kernel, short of memory, would still rather kill the worker than this process.

    Mapped slots count as its memory, and to kill it would free none of them.
    """
    return _badness("self") < _badness(str(beside))


def _badness(process: str) -> int:
    try:
        return int(Path("/proc", process, "oom_score").read_text())
    except (OSError, ValueError):
        return 0


def _rename(name: str) -> str:
    """Give this process another name for `ps`; the old one."""
    path = Path("/proc/self/comm")
    before = path.read_text().strip()
    path.write_text(name)
    return before
