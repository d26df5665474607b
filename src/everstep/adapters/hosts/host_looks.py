"""Has every host of a job look at its ranks when a person asks for evidence, through the board.

Nothing is stopped or judged for it. A host that does not answer leaves no evidence, which is then missing.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence

from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.snapshot_request import Collect
from everstep.adapters.hosts.host_joining import HostBoard
from everstep.domain.errors import EvidenceError, WorldError
from everstep.domain.ids import Attempt, HostId, IncidentId
from everstep.ports import Board

_log = logging.getLogger(__name__)
_PREFIX = "look"
_KEY = re.compile(r"look/(asked-[\w-]+)/(\d)")
_ALL_WITHIN_S = 4.0
_FRESH_S = 3.0
"""A host that joins is told old values, too, and obeys none of them."""


def ask_all(
    board: Board,
    clock: MonotonicClock,
    hosts: Callable[[], Sequence[HostId]],
    collect: Collect,
    *,
    within_s: float = _ALL_WITHIN_S,
) -> Collect:
    """`collect`, and the same on all other hosts at once.

    Args:
        hosts: the others.
    """

    def collect_all(*, attempt: Attempt, incident: IncidentId, snapshot: int) -> object:
        key = f"{_PREFIX}/{incident}/{snapshot}"
        others = hosts()
        board.post(key, f"{clock.now_s()}".encode())
        ends_s = time.monotonic() + within_s
        own = collect(attempt=attempt, incident=incident, snapshot=snapshot)
        for host in others:
            try:
                board.read(f"{key}/{host}", within_s=max(0.0, ends_s - time.monotonic()))
            except WorldError:
                _log.warning("host %s has not looked at its ranks within %g s", host, within_s)
        return own

    return collect_all


def obey_looks(board: HostBoard, clock: MonotonicClock, host: HostId, collect: Collect) -> None:
    """Look whenever the coordinator's host asks, in a thread for each look."""

    def look(key: str, incident: IncidentId, snapshot: int) -> None:
        try:
            collect(attempt=Attempt(0), incident=incident, snapshot=snapshot)
        except (OSError, ValueError, EvidenceError) as error:  # workers that ended meanwhile take their pages with them
            _log.warning("the workers could not be looked at: %s", error)
        with contextlib.suppress(WorldError):  # the coordinator has gone meanwhile
            board.post(f"{key}/{host}", b"")

    def watch(key: str, value: bytes) -> None:
        asked = _KEY.fullmatch(key)
        if asked is not None and _is_fresh(value, clock.now_s()):
            arguments = (key, IncidentId(asked[1]), int(asked[2]))
            threading.Thread(target=look, args=arguments, name="everstep-look", daemon=True).start()

    board.watch = watch


def _is_fresh(value: bytes, now_s: float) -> bool:
    try:
        return abs(now_s - float(value)) < _FRESH_S
    except ValueError:
        return False
