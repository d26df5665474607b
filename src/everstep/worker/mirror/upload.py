"""The uploader: one process per run that brings each newest complete checkpoint of the disk to the mirror.

It asks nothing of anybody and nobody waits for it: a slow or failing store delays the mirror alone, and is told. When
the pipe that it was given closes, it brings the newest one and ends. It imports no torch.
"""

import contextlib
import errno
import fcntl
import logging
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.mirror_process import ELSEWHERE, MirrorOrder
from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.errors import EverstepError, EvidenceError
from everstep.domain.events import CheckpointDelayed, CheckpointMirrored
from everstep.domain.ids import Attempt
from everstep.worker.format import manifest as manifests
from everstep.worker.mirror.store_copies import HELD, Mirror
from everstep.worker.notes import Notes
from everstep.worker.saving.storage_watch import Answer, Patience

_log = logging.getLogger(__name__)
POLL_S = 0.5
BACKOFF_S = (1.0, 5.0, 15.0, 60.0)
STILL_S = 60.0
"""At the end of the job, a store that has not moved for as long is given up."""
_TELL_AFTER_S = 60.0
_BEAT_S = 10.0
_DEAD_AFTER_S = 180.0
"""Longer than NFS may keep a file's time in its cache."""
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems say that have no locks at all."""
_LOCK_NAME = ".mirror.lock"
_NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What one look did. `step` is the newest complete one of the disk; 0 when there is none."""

    step: int = 0
    size_bytes: int = 0
    took_s: float = 0.0


class Uploader:
    """`turn` looks and tells; the work itself is done in a thread, which may hang."""

    def __init__(self, order: MirrorOrder, mirror: Mirror | None = None) -> None:
        self._order = order
        self._mirror = mirror or Mirror(ObjectStore(order.url), self._move)
        paths = WorkerPaths(run="", attempt=0, rank=0, notes=order.notes, clock_zero_ns=order.clock_zero_ns)
        self._notes = Notes(paths)
        self._answer: Answer[_Done] | None = None
        self._moved_s = time.monotonic()
        self._closing_since_s = 0.0
        self._next_s = 0.0
        self._failed_in_a_row = 0
        self._spoilt: set[int] = set()
        self._mirrored = -1
        self._waiting = 0  # the step that is being brought, and since when it has waited
        self._waiting_since_s = 0.0
        self._usual_s = 0.0
        self._patience = Patience(_TELL_AFTER_S)
        self._error = ""

    def turn(self, *, closing: bool = False) -> bool:
        """One look. Whether, at the end of the job, there is nothing more to do or to hope for."""
        now_s = time.monotonic()
        if closing and not self._closing_since_s:
            self._closing_since_s = now_s
        if self._answer is not None:
            if not self._answer.is_there(0.0):
                self._tell_lag()
                return closing and self._has_given_up(now_s)
            answer, self._answer = self._answer, None
            if self._take(answer) and closing and answer.asked_s >= self._closing_since_s:
                return True  # an earlier look may have missed the last step
        elif now_s >= self._next_s or (closing and not self._failed_in_a_row):
            self._answer = Answer(self._work, name="mirror")
        self._tell_lag()
        return closing and self._has_given_up(now_s)

    @property
    def mirrored(self) -> int:
        """The newest step that is known to be there; below 0 when none is."""
        return self._mirrored

    # In the thread.

    def _work(self) -> _Done:
        directory = self._directory()
        try:
            if next(iter(manifests.all_steps(directory)), 0) == self._mirrored:
                return _Done(step=self._mirrored)
            complete = [step for step in manifests.complete_steps(directory) if step not in self._spoilt]
        except FileNotFoundError:
            return _Done()  # no checkpoint yet
        step = next(iter(complete), 0)
        if step == self._mirrored or not complete:
            return _Done(step=step)
        if step != self._waiting:
            if not self._waiting:
                self._waiting_since_s = time.monotonic()
            self._waiting = step
        started_s = time.monotonic()
        try:
            manifest = self._mirror.upload(directory, step)
        except EvidenceError as damage:
            self._spoilt.add(step)
            raise EvidenceError(f"step {step} is damaged on disk and was not uploaded: {damage}") from damage
        self._mirror.prune(step, self._order.keep)
        return _Done(step=step, size_bytes=manifest.size_bytes, took_s=time.monotonic() - started_s)

    def _directory(self) -> Path:
        """Where the checkpoints are: the run's folder, or what `attach(directory=...)` left word of."""
        directory = Path(self._order.directory)
        with contextlib.suppress(OSError):
            return Path((directory / ELSEWHERE).read_text().strip())
        return directory

    def _move(self) -> None:
        self._moved_s = time.monotonic()

    # In the loop.

    def _take(self, answer: Answer[_Done]) -> bool:
        """What the work came to; whether everything is there."""
        try:
            done = answer.get()
        except FileNotFoundError:
            return False  # it was pruned while it was read: look again
        except (EverstepError, OSError) as error:
            self._fail(str(error))
            return False
        self._failed_in_a_row, self._error, self._waiting = 0, "", 0
        self._next_s = time.monotonic() + POLL_S
        if done.took_s:
            self._mirrored, self._usual_s = done.step, max(self._usual_s, done.took_s)
            self._tell_done(done)
            return False  # a newer one may be there meanwhile
        return True

    def _fail(self, reason: str) -> None:
        self._error = reason
        self._next_s = time.monotonic() + BACKOFF_S[min(self._failed_in_a_row, len(BACKOFF_S) - 1)]
        self._failed_in_a_row += 1
        if self._failed_in_a_row == 1:
            self._tell(0.0, reason)

    def _has_given_up(self, now_s: float) -> bool:
        """Bytes that move are waited for; what hangs or fails is not for ever."""
        if now_s - max(self._moved_s, self._closing_since_s) < STILL_S:
            return False
        _log.warning(
            "everstep: %s has not moved for %.0f s; step %d is not there", self._order.url, STILL_S, self._waiting
        )
        return True

    def _tell_lag(self) -> None:
        lag_s = time.monotonic() - self._waiting_since_s if self._waiting else 0.0
        if self._patience.is_over(lag_s, usual_s=self._usual_s):
            self._tell(lag_s, self._error or f"{self._order.url} is slow")

    def _tell(self, waited_s: float, reason: str) -> None:
        event = CheckpointDelayed(
            at_s=self._notes.now_s(),
            attempt=Attempt(0),
            step=max(self._waiting, 0),
            waited_s=round(waited_s, 1),
            reason=f"{reason} (so for {waited_s:.0f} s)" if waited_s else reason,
        )
        _log.warning("everstep: %s", event.sentence)
        self._notes.write(event)

    def _tell_done(self, done: _Done) -> None:
        event = CheckpointMirrored(
            at_s=self._notes.now_s(),
            attempt=Attempt(0),
            step=done.step,
            url=f"{self._order.url}/{manifests.folder_name(done.step)}",
            size_bytes=done.size_bytes,
            duration_s=done.took_s,
        )
        self._notes.write(event)


class _Lock:
    """Held by the one uploader that is at work on a directory; its time tells others that it lives."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._beat_s = float("-inf")

    def take(self) -> None:
        """Wait for an earlier uploader, also when the run is over: it may not know of the last step.

        One that is dead may have left its lock on a server; nothing is lost when two write the same step.
        """
        beat, beat_s = 0, time.monotonic()
        while not self._try():
            if (found := os.fstat(self._fd).st_mtime_ns) != beat:
                beat, beat_s = found, time.monotonic()
            if time.monotonic() - beat_s > _DEAD_AFTER_S:
                name = self._directory / _LOCK_NAME
                _log.warning("everstep: %s is held by an uploader that does nothing; going on without it", name)
                return
            time.sleep(POLL_S)
        for leftover in self._directory.glob(f"{HELD}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def beat(self) -> None:
        if time.monotonic() - self._beat_s > _BEAT_S:
            self._beat_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            return problem.errno in _NO_LOCKS
        return True


def _is_over(pipe: int, within_s: float) -> bool:
    return bool(select.select([pipe], [], [], within_s)[0]) and not os.read(pipe, 1)


def main(arguments: list[str]) -> int:
    """`upload FD ORDER`: upload until the pipe closes, then the newest one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the job closes the pipe
    os.nice(_NICENESS)
    pipe, order = int(arguments[0]), msgspec.json.decode(arguments[1], type=MirrorOrder)
    lock = _Lock(Path(order.directory))
    lock.take()
    uploader, closing = Uploader(order), False
    while not uploader.turn(closing=closing):
        lock.beat()
        closing = closing or _is_over(pipe, POLL_S)
        if closing:
            time.sleep(POLL_S / 10)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a store must not hold the process
