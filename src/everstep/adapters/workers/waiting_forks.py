"""The next attempt's workers, forked while the present one trains: they have mapped the slots that a restore reads.

It knows processes and their lines, not what they map; when one fails, all go, and workers are forked as usual.
"""

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.memory_slots import JOB_NAME
from everstep.adapters.workers.processes import reap, send_signal
from everstep.adapters.workers.standby import ProcessOrder, Program, Standby, Successor, order_text
from everstep.domain.errors import WorldError

_log = logging.getLogger(__name__)
_ACCEPTED, _GO = b"accepted", b"go"  # of worker/waiting.py
_ANSWERS_WITHIN_S = 2.0
_MESSAGE_BYTES = 1 << 16
_SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fork:
    pid: int
    rank: int
    line: socket.socket


class _Job(msgspec.Struct):
    """What of the saver's order tells that an attempt has its slots."""

    attempt: int = 0


class WaitingForks:
    """Owns them until they become workers. `close` ends them.

    Args:
        standby: which forks them.
        folder: the run's memory folder.
    """

    def __init__(self, standby: Standby, folder: Path) -> None:
        self._standby = standby
        self._folder = folder
        self._forks: list[_Fork] = []
        self._asked_for = 0  # the attempt that has, or could not have, its successors
        self._order_seen: tuple[int, int] = (0, 0)

    @property
    def pids(self) -> set[int]:
        return {fork.pid for fork in self._forks}

    def ensure(self, *, attempt: int, workers: Mapping[int, int]) -> None:
        """Fork them once the present attempt has laid out its slots; once for each attempt, also when they die.

        Args:
            workers: the pid of each rank's present worker.
        """
        if self._asked_for == attempt or not self._has_slots(attempt):
            return
        ours: dict[int, socket.socket] = {}
        successors: list[Successor] = []
        try:
            if not self._standby.ready():
                return
            self._asked_for = attempt
            self.close()
            for rank, pid in sorted(workers.items()):
                ours[rank], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                successors.append(Successor(rank=rank, beside=pid, line=theirs))
            pids = self._standby.fork_waiting(self._folder, successors)
        except (OSError, WorldError) as problem:
            self._asked_for = attempt
            _log.info("the next attempt's workers are not forked ahead: %s", problem)
            for line in ours.values():
                line.close()
        else:
            self._forks = [_Fork(pid=pid, rank=rank, line=ours[rank]) for pid, rank in zip(pids, ours, strict=True)]
        finally:
            for one in successors:
                one.line.close()

    def become(self, program: Program, orders: Sequence[ProcessOrder], ranks: Sequence[int]) -> list[int]:
        """Make them the workers of these ranks, and no more this object's; their pids.

        Raises:
            WorldError: there are none, or others, or one does not answer; none of them lives then.
        """
        forks, self._forks = self._forks, []
        try:
            if not forks or [fork.rank for fork in forks] != list(ranks):
                raise WorldError("no workers were forked ahead for these ranks")
            for fork, order in zip(forks, orders, strict=True):
                socket.send_fds(
                    fork.line, [msgspec.json.encode(order_text(program, order))], [order.stdout, order.stderr]
                )
            for fork in forks:
                fork.line.settimeout(_ANSWERS_WITHIN_S)
                if fork.line.recv(_MESSAGE_BYTES) != _ACCEPTED:
                    raise WorldError(f"process {fork.pid}, forked ahead, has died")
            for fork in forks:
                fork.line.send(_GO)
        except (OSError, WorldError) as problem:
            _end(forks)
            raise WorldError(str(problem)) from problem
        for fork in forks:
            fork.line.close()
        return [fork.pid for fork in forks]

    def close(self) -> None:
        forks, self._forks = self._forks, []
        _end(forks)

    def _has_slots(self, attempt: int) -> bool:
        """Whether rank 0 has written the saver's order in this attempt, which comes after the slots of all ranks."""
        path = self._folder / JOB_NAME
        try:
            status = path.stat()
            seen = status.st_ino, status.st_mtime_ns
            if seen == self._order_seen:
                return False
            job = msgspec.json.decode(path.read_bytes(), type=_Job)
        except (OSError, msgspec.MsgspecError):
            return False
        if job.attempt != attempt:
            self._order_seen = seen
        return job.attempt == attempt


def _end(forks: Sequence[_Fork]) -> None:
    for fork in forks:
        fork.line.close()
        send_signal(fork.pid, _SIGKILL)
    for fork in forks:
        reap(fork.pid)
