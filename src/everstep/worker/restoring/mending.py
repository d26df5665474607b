"""A slot in this host's memory that turns out damaged is brought again from a copy, before it is given up."""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from everstep.adapters.checkpoints.memory_slots import SlotHeader
from everstep.adapters.checkpoints.peer_files import ROSTER_NAME
from everstep.adapters.checkpoints.peer_repairs import Repair, Repaired, answer_of, ask_repair, is_open, withdraw_repair
from everstep.policy.replication import Version

_log = logging.getLogger(__name__)
_ANSWERED_WITHIN_S = 120.0
_TAKEN_WITHIN_S = 5.0
"""Once the files are there, all that is left is to rename them."""
_LOOK_S = 0.02


class Mending:
    """One restore's requests to the replicator of this host. Each slot is asked for once.

    Args:
        memory: the run's folder in shared memory; None where there is none.
        beat: called while the answer is awaited.
    """

    def __init__(self, memory: Path | None, beat: Callable[[], None]) -> None:
        self._memory = memory if memory is not None and (memory / ROSTER_NAME).exists() else None
        self._beat = beat
        self._asked: set[tuple[int, int]] = set()

    def mend(self, shard: int, slot: int, header: SlotHeader, reason: str) -> bool:
        """Whether the slot's files are new, with the checksums that the header says."""
        if self._memory is None or (shard, header.step) in self._asked:
            return False
        self._asked.add((shard, header.step))
        version = Version(attempt=header.attempt, step=header.step, layout=header.layout)
        repair = Repair(serial=secrets.randbits(63), shard=shard, slot=slot, version=version)
        began_s = time.monotonic()
        try:
            ask_repair(self._memory, repair)
        except OSError:
            return False
        try:
            answer = self._await_answer(self._memory, repair.serial)
        finally:
            withdraw_repair(self._memory, repair.serial)  # also where something ends this rank meanwhile
        if answer is None:
            return False
        if answer.problem:
            _log.warning("everstep: %s, and there is no copy to be had: %s", reason, answer.problem)
            return False
        took_s = time.monotonic() - began_s
        _log.warning("everstep: %s; brought again from host %s in %.2f s", reason, answer.source, took_s)
        return True

    def _await_answer(self, memory: Path, serial: int) -> Repaired | None:
        """None when there is none in time; the request is withdrawn then, since this rank goes on and maps the slot."""
        ends_s = time.monotonic() + _ANSWERED_WITHIN_S
        while is_open(memory, serial):
            late_s = time.monotonic() - ends_s
            if late_s > 0 and (withdraw_repair(memory, serial) or late_s > _TAKEN_WITHIN_S):
                return None
            self._beat()
            time.sleep(_LOOK_S)
        return answer_of(memory, serial)
