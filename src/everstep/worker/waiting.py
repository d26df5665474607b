"""What a fork does that shall be the next attempt's worker: it maps the slots it would restore from, and waits.

It sleeps on its line to the agent and ends with it. It knows nothing of jobs: what it becomes stands in the order.
"""

import contextlib
import os
import select
import socket
import time
from pathlib import Path

from everstep.worker.restoring import slot_maps

ACCEPTED, GO = b"accepted", b"go"
_MESSAGE_BYTES = 1 << 20
_DESCRIPTOR_COUNT = 2
_LOOK_S = 2.0
"""How soon a slot that was removed is let go of, and a new one mapped."""
_WORK_SHARE = 0.25
"""Of a processor, so that training, which is what counts meanwhile, hardly notices."""
_OOM_SCORE = "-500"
"""Mapped slots count as this process's memory, and to kill it would free none of them."""
_NAME = "everstep-next"


def wait_for_order(line: socket.socket, folder: Path, rank: int) -> tuple[bytes, list[int]]:
    """The order to become a worker, with the descriptors that came along. Ends the process when nobody can order.

    Args:
        folder: of the slots.
        rank: whose worker this will be.
    """
    name, score = _swap("comm", _NAME), _swap("oom_score_adj", _OOM_SCORE)
    order = _sleep(line, folder, rank)
    try:
        line.send(ACCEPTED)
        word = line.recv(_MESSAGE_BYTES)  # the others may have died, and then this one is not wanted
    except OSError:
        word = b""
    if word != GO:
        os._exit(0)
    _swap("comm", name)
    _swap("oom_score_adj", score)
    return order


def _sleep(line: socket.socket, folder: Path, rank: int) -> tuple[bytes, list[int]]:
    has_work, looked_s = False, -_LOOK_S
    while True:
        began_s = time.monotonic()
        if began_s - looked_s >= _LOOK_S:
            looked_s = began_s
            slot_maps.map_slots(folder, rank)
            has_work = True
        has_work = has_work and slot_maps.populate_some()
        pause_s = (time.monotonic() - began_s) * (1 / _WORK_SHARE - 1) if has_work else _LOOK_S
        if not select.select([line], [], [], pause_s)[0]:
            continue
        message, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, _DESCRIPTOR_COUNT)
        if not message:
            os._exit(0)
        return message, list(descriptors)


def _swap(name: str, value: str) -> str:
    """Write a word of /proc/self; the old one. Where the kernel does not allow it, it stays."""
    path = Path("/proc/self", name)
    before = ""
    with contextlib.suppress(OSError):
        before = path.read_text().strip()
        path.write_text(value)
    return before
