"""What storage has to resume from, asked without trusting that it answers: a restart must not hang with a hung disk.

Where the disk lacks what the mirror has, that is fetched first.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from everstep.adapters.checkpoints.mirror_process import ELSEWHERE
from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.domain.errors import ConfigError, WorldError
from everstep.domain.events import CheckpointRefused
from everstep.domain.ids import Attempt
from everstep.worker.format.manifest import Manifest, folder_name
from everstep.worker.mirror.store_copies import FETCHED, Mirror
from everstep.worker.observer import Observer
from everstep.worker.saving.storage_watch import BEATS_FOR_S, Answer, Patience, tell_delay

_log = logging.getLogger(__name__)
DISK_WITHIN_S = 3.0
"""For as long the disk is waited for when memory has all that is needed to go on."""
_ROUND_S = 1.0
_TELL_EVERY_S = 10.0
BACKOFF_S = (1.0, 5.0, 15.0, 60.0)
"""Between tries of a mirror that fails, where there is nothing else to resume from."""
Look = Callable[[], list[Manifest]]


class StorageListing:
    """One restore's question to the disk and the mirror, on rank 0."""

    def __init__(self, directory: Path, observer: Observer, attempt: int) -> None:
        self._directory = directory
        self._observer = observer
        self._attempt = attempt
        self._mirror_url = observer.paths.mirror if observer.paths else ""
        self._answer: Answer[list[Manifest]] | None = None
        self._patience = Patience()
        self._moved_s = time.monotonic()
        self._fetch_told_s = 0.0
        self._told: set[tuple[int, str]] = set()

    def ask(self, look: Look, in_memory: int | None) -> list[Manifest] | None:
        """The newest there is; nothing where the disk fails or hangs and memory can do without it; None: ask again.

        Args:
            look: lists the disk.
            in_memory: the newest step of which memory has all; None when the disk or the mirror is needed.

        Raises:
            ConfigError: they are needed, and cannot be listed.
        """
        if self._answer is None:
            self._answer = Answer(lambda: self._look_everywhere(look, in_memory), name="listing")
        if not self._answer.is_there(_ROUND_S):
            return self._wait(self._answer, in_memory)
        answer, self._answer = self._answer, None
        try:
            return answer.get()
        except OSError as error:
            reason = f"the checkpoint directory {self._directory} cannot be listed: {error.strerror or error}"
            if in_memory is None:
                raise ConfigError(reason) from error
            self._tell(in_memory, 0.0, reason)
            return []

    def _wait(self, answer: Answer[list[Manifest]], in_memory: int | None) -> list[Manifest] | None:
        now_s = time.monotonic()
        waited_s = now_s - answer.asked_s
        if now_s - max(self._moved_s, answer.asked_s) < BEATS_FOR_S:
            self._observer.beat()  # no rank is at fault, and none would be better off anew
        if in_memory is not None and waited_s >= DISK_WITHIN_S:
            self._tell(in_memory, waited_s, f"the disk has not answered for {waited_s:.0f} s")
            self._answer = None
            return []
        if self._fetch_told_s:
            self._tell_fetch(now_s)
        elif self._patience.is_over(waited_s):
            _log.warning("everstep: waiting for %s, which has not answered for %.0f s", self._directory, waited_s)
        return None

    # In the thread.

    def _look_everywhere(self, look: Look, in_memory: int | None) -> list[Manifest]:
        disk = look()
        if not self._mirror_url:
            return disk
        self._leave_word()
        if in_memory is not None:
            return disk
        newest = disk[0].step if disk else 0
        return look() if self._fetch(newest) else disk

    def _fetch(self, newest: int) -> bool:
        """Whether the mirror had something newer, which is on disk now."""
        problem = ""
        for pause_s in (*BACKOFF_S, None):
            self._fetch_told_s = time.monotonic()
            try:
                mirror = Mirror(ObjectStore(self._mirror_url), self._move)
                step, refused = mirror.fetch(self._directory, newer_than=newest)
            except (WorldError, OSError) as error:
                problem = str(error)
            else:
                self._tell_refused(refused)
                if step is not None:
                    _log.warning("everstep: step %d was fetched from %s", step, self._mirror_url)
                return step is not None
            finally:
                self._fetch_told_s = 0.0
            if newest:
                _log.warning("everstep: %s; resuming from step %d of the disk", problem, newest)
                return False
            if pause_s is not None:
                _log.warning("everstep: %s; trying again in %.0f s", problem, pause_s)
                time.sleep(pause_s)
        raise ConfigError(
            f"there is no checkpoint here, and the mirror cannot be read: {problem}; "
            "to start afresh instead, leave out --checkpoint-mirror"
        )

    def _leave_word(self) -> None:
        """The uploader follows the script to a directory of its own choice."""
        paths = self._observer.paths
        if paths is not None and paths.checkpoints and self._directory != Path(paths.checkpoints):
            Path(paths.checkpoints).mkdir(parents=True, exist_ok=True)
            (Path(paths.checkpoints) / ELSEWHERE).write_text(f"{self._directory}\n")

    def _move(self) -> None:
        self._moved_s = time.monotonic()

    # Telling.

    def _tell_fetch(self, now_s: float) -> None:
        if now_s - self._fetch_told_s >= _TELL_EVERY_S:
            self._fetch_told_s = now_s
            files = [path for path in self._directory.glob(f"{FETCHED}*/*") if path.is_file()]
            here = sum(path.stat().st_size for path in files) / 1e9
            _log.warning("everstep: fetching from %s: %.2f GB so far", self._mirror_url, here)

    def _tell_refused(self, refused: list[tuple[int, str]]) -> None:
        for step, reason in refused:
            if (step, reason) not in self._told:
                self._told.add((step, reason))
                path = f"{self._mirror_url}/{folder_name(step)}"
                _log.warning("everstep does not use %s: %s", path, reason)
                at_s = self._observer.notes.now_s()
                event = CheckpointRefused(at_s=at_s, attempt=Attempt(self._attempt), path=path, reason=reason)
                self._observer.notes.write(event)

    def _tell(self, step: int, waited_s: float, reason: str) -> None:
        reason = f"{reason}; resuming from memory"
        tell_delay(self._observer, self._attempt, step=step, waited_s=waited_s, reason=reason)
