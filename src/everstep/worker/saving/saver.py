"""The saver: one process per host that makes memory slots durable, survives the training, and imports no torch.

It looks at the pages in the run's folder several times a second; nobody waits for it. When the pipe that it was given
closes, the run is over: it makes the newest complete state durable, removes the folder and ends; a state that no disk
took stays in it. Where the job has
several hosts, their savers make one checkpoint together (among_hosts.py): the one of rank 0's host says which.
"""

import contextlib
import dataclasses
import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.leader_page import LeaderWord, Stage
from everstep.adapters.checkpoints.memory_folder import WANTED_NAME, remove_folder, share_lock
from everstep.adapters.checkpoints.memory_slots import JOB_NAME, RankSlots, SavePages, SaverWord
from everstep.adapters.checkpoints.saver_process import KEPT_NAME
from everstep.domain.errors import EvidenceError
from everstep.policy.checkpoints import SlotState, committed_steps
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder, write_durably
from everstep.worker.format.manifest import FileEntry, Manifest
from everstep.worker.format.publishing import publish
from everstep.worker.format.retention import remove_old
from everstep.worker.saving.among_hosts import Following, Leading, Superseded, roster_of, size_of, try_name
from everstep.worker.saving.saver_order import SaverOrder
from everstep.worker.saving.slot_writing import Found, Overtaken, SlotFiles

_log = logging.getLogger(__name__)
POLL_S = 0.1
_EAGER_POLL_S = 0.01
"""While a save is due: what a look costs is added to how long a step takes to become durable."""
_LOOK_SHARE = 0.02
"""Of a core, for such looks."""
TEMPORARY = ".saving-"
_NICENESS = 10
_BACKOFF_S = (5.0, 10.0, 30.0, 60.0)
_DURATIONS_BETWEEN = 3
_HEADERS_WITHIN_S = 2.0
_LEADER_ENDS_WITHIN_S = 10.0
"""A host whose run is over waits for so long after the leader's last word to hear that it is over there, too."""
_LEADER_SILENT_S = 60.0
"""The same while a step is written, or the last one is to be: bytes in its folder count as words do."""
_LOOK_AFTER_S = 1.0
_AGAIN_AFTER_S = 1.0
"""After a step that was overtaken or damaged, and before the last step is tried once more."""


class Saver:
    """The work of the saver on one folder.

    Raises:
        WorldError: the folder is gone or full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages = SavePages(folder)
        word = self._pages.word()
        # A dead saver's pin holds nothing, and its disk keeps nobody waiting.
        self._word = dataclasses.replace(word, pinned=0, pid=os.getpid(), began_ns=0, moved_ns=0)
        self._pages.write_word(self._word)
        self._job: SaverOrder | None = None
        self._job_stamp = 0
        self._headers: list[RankSlots] = []
        self._next_s = 0.0
        self._look_s = 0.0
        self._failed_in_a_row = 0
        self._spoilt: set[int] = set()
        self._own: tuple[int, ...] = ()
        self._leading: Leading | None = None
        self._following: Following | None = None
        self.keeps_folder = False
        """After `flush`: what is in memory is not on disk, and is wanted when the job is started again."""
        (folder / KEPT_NAME).unlink(missing_ok=True)

    def pause_s(self) -> float:
        """How long to wait before the next turn."""
        left_s = self._next_s - time.monotonic()
        if self._job is None or self._following is not None or left_s > POLL_S:
            return POLL_S
        return min(POLL_S, max(left_s, _EAGER_POLL_S, self._look_s / _LOOK_SHARE))

    def turn(self) -> None:
        """Make a step durable if one is due."""
        began_s = time.monotonic()
        self._read_job()
        if self._following is not None:
            self._follow(self._following)
        if self._job is None or self._following is not None or time.monotonic() < self._next_s:
            return
        if self._leading is not None and self._leading.is_superseded():
            return
        every = self._job.every_steps
        steps = [s for s in self._committed() if s > self._word.durable and (every is None or s % every == 0)]
        step = steps[0] if steps else None
        if steps and self._leading is not None and every is None:
            step = self._leading.choose(steps, self._pages.plan().at(steps[0]).stride)
        self._look_s = time.monotonic() - began_s
        if step is not None:
            started_s = time.monotonic()
            is_saved = self._save(step)
            took_s = time.monotonic() - started_s
            if every is None and is_saved:
                self._next_s = started_s + max(self._job.every_s, _DURATIONS_BETWEEN * took_s)
            elif every is None and self._next_s <= started_s:  # overtaken or damaged; a disk that fails backs off
                self._next_s = started_s + took_s + min(self._job.every_s, max(_AGAIN_AFTER_S, took_s))

    def flush(self) -> None:
        """Make the newest complete step durable, whatever the schedule says."""
        self._read_job()
        if self._job is None:
            return
        if self._following is not None:
            self.keeps_folder = not self._follow_to_the_end(self._following)
        elif self._leading is None:
            self.keeps_folder = not self._flush()
        else:
            self._leading.tell(stage=Stage.LAST)
            self._leading.is_alone = False
            self._await_headers()
            self.keeps_folder = not self._flush()
            self._leading.tell(stage=Stage.DONE)

    def _flush(self) -> bool:
        """Whether nothing newer is in memory than on disk. A step that could not be written is tried once more."""
        if self._flush_once():
            return True
        if self._is_left_alone():
            return False
        time.sleep(_AGAIN_AFTER_S)
        return self._flush_once()

    def _flush_once(self) -> bool:
        for step in self._committed():
            if step <= self._newest_durable() or self._is_left_alone() or self._save(step):
                break
        return max(self._committed(), default=0) <= self._newest_durable()

    def _is_left_alone(self) -> bool:
        """Whether the other hosts have gone, or on to another attempt."""
        return self._leading is not None and (self._leading.is_alone or self._leading.is_superseded())

    def _newest_durable(self) -> int:
        assert self._job is not None
        with self._asking_the_disk():
            return max(self._word.durable, *self._on_disk(Path(self._job.directory)), 0)

    def _await_headers(self) -> None:
        """What the other hosts' ranks saved last is told by their replicators, and may be under way."""
        own = self._headers[self._own[0]].slots()
        newest = max((slot.step for slot in own if slot.state is SlotState.COMPLETE), default=0)
        ends_s = time.monotonic() + _HEADERS_WITHIN_S
        while max(self._committed(), default=0) < newest and time.monotonic() < ends_s:
            time.sleep(POLL_S)

    def _follow(self, following: Following) -> bool:
        """Do this host's part of what the leader has announced; whether there was any."""
        assert self._job is not None
        durable = following.word().durable
        if durable != self._word.durable:
            self._say(dataclasses.replace(self._word, durable=durable))
        if (word := following.order()) is None:
            return False
        temporary = self._folder_of(word)

        def moved() -> None:
            self._moved()
            following.check_wanted()

        with self._asking_the_disk(word.step):
            error = following.serve(word, temporary, self._files(moved))
        if error:
            self._say(self._failed(self._word, word.step, error))
        return True

    def _follow_to_the_end(self, following: Following) -> bool:
        """The run is over: serve the leader until it is done; whether this host's memory is not needed any more."""
        assert self._job is not None
        heard_s = time.monotonic()
        before, written = following.word(), 0
        while (word := following.word()).stage is not Stage.DONE or word.order != self._job.attempt:
            is_ours = word.order == self._job.attempt  # another attempt's words are no reason to stay
            if self._follow(following) or (is_ours and word != before):
                before, heard_s = word, time.monotonic()
            silent_s = time.monotonic() - heard_s
            if is_ours and word.step and silent_s > _LOOK_AFTER_S and (size := self._size_of(word)) != written:
                written, heard_s = size, time.monotonic()
            is_busy = is_ours and (word.step or word.stage is not Stage.WORKING)
            patience_s = _LEADER_SILENT_S if is_busy else _LEADER_ENDS_WITHIN_S
            if silent_s > patience_s or (self._folder / WANTED_NAME).exists():
                break
            time.sleep(POLL_S)
        newest = max(self._committed(), default=0)
        if newest <= word.durable:
            return True
        with self._asking_the_disk():
            return newest <= max(self._on_disk(Path(self._job.directory)), default=0)

    def _size_of(self, word: LeaderWord) -> int:
        """What all hosts have written of the step that the leader has announced, as far as it is seen here."""
        try:
            return size_of(self._folder_of(word))
        except OSError:
            return 0

    def _folder_of(self, word: LeaderWord) -> Path:
        assert self._job is not None
        return Path(self._job.directory) / f"{TEMPORARY}{try_name(word)}"

    def _read_job(self) -> None:
        path = self._folder / JOB_NAME
        try:
            stamp = path.stat().st_mtime_ns
            if stamp == self._job_stamp:
                return
            job = msgspec.json.decode(path.read_bytes(), type=SaverOrder)
        except (OSError, msgspec.MsgspecError):
            return  # not there yet
        self._job, self._job_stamp = job, stamp
        self._spoilt.clear()
        self._headers = [RankSlots(self._folder, rank) for rank in range(job.world_size)]
        self._take_part(job)
        if self._following is not None:
            return  # the folder is the leader's to look after
        with self._asking_the_disk():
            on_disk = self._on_disk(Path(job.directory))
            with contextlib.suppress(OSError):
                for leftover in Path(job.directory).glob(f"{TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
        # A job may have gone back to an older step; then newer ones than that are none of its own.
        self._say(dataclasses.replace(self._word, durable=on_disk[0] if on_disk else 0))
        if self._leading is not None:
            self._leading.tell(durable=self._word.durable)

    def _take_part(self, job: SaverOrder) -> None:
        """Alone, as the leader of several hosts, or as one of the others."""
        self._leading = self._following = None
        roster = roster_of(self._folder)
        if roster is None:
            return
        self._own = tuple(sorted(roster.ranks[roster.host]))
        if 0 in self._own:
            self._leading = Leading(self._folder, roster, order=job.attempt)
        else:
            self._following = Following(self._folder, roster, order=job.attempt)

    def _committed(self) -> list[int]:
        found = committed_steps([headers.slots() for headers in self._headers])
        return [step for step in found if step not in self._spoilt]

    def _on_disk(self, directory: Path) -> list[int]:
        try:
            return manifests.complete_steps(directory)
        except OSError:
            return []

    def _save(self, step: int) -> bool:
        assert self._job is not None
        with self._asking_the_disk(step):
            return self._try_to_save(step)

    def _try_to_save(self, step: int) -> bool:
        started_s = time.monotonic()
        word, error, overtaken = self._word, "", False
        temporary = None
        try:
            temporary = self._begin(step)
            size_bytes = self._write(step, temporary)
            took_s = time.monotonic() - started_s
            word = dataclasses.replace(
                self._word, durable=step, size_bytes=size_bytes, took_s=took_s, saves=word.saves + 1
            )
            self._failed_in_a_row = 0
        except Overtaken as reason:
            overtaken = not isinstance(reason, Superseded)
        except EvidenceError as damage:
            self._spoilt.add(step)
            error = str(damage)
        except OSError as problem:
            error = f"step {step} could not be made durable ({problem.strerror})"
            self._back_off()
        if self._leading is not None:
            self._leading.end(overtaken=overtaken, durable=word.durable)
        if temporary is not None and word.durable != step:
            shutil.rmtree(temporary, ignore_errors=True)
        if error:
            word = self._failed(word, step, error)
        self._say(dataclasses.replace(word, pinned=0, began_ns=self._word.began_ns, moved_ns=time.monotonic_ns()))
        if word.durable == step:
            self._prune()
        return word.durable == step

    def _begin(self, step: int) -> Path:
        """The folder of this try, which nobody has made yet."""
        assert self._job is not None
        name = f"{manifests.folder_name(step)}-{os.getpid()}"
        if self._leading is not None:
            name = self._leading.begin(step, self._files(self._moved).find(step, [0])[0][2])
        return Path(self._job.directory) / f"{TEMPORARY}{name}"

    def note_defect(self, error: Exception) -> None:
        """Something that should not happen: it is told like a disk that fails, and tried again as seldom."""
        self._back_off()
        if self._leading is not None:
            self._leading.end(overtaken=False, durable=self._word.durable)  # nobody needs to wait for it
        reason = f"the saver failed: {type(error).__name__}: {error}"
        self._say(self._failed(self._word, max(self._committed(), default=0), reason))

    def _back_off(self) -> None:
        self._next_s = time.monotonic() + _BACKOFF_S[min(self._failed_in_a_row, len(_BACKOFF_S) - 1)]
        self._failed_in_a_row += 1

    def _failed(self, word: SaverWord, step: int, error: str) -> SaverWord:
        with contextlib.suppress(OSError):  # a full /dev/shm must not end the saver
            (self._folder / "saver.error").write_text(f"{error}\n")
        return dataclasses.replace(word, failures=word.failures + 1, failed=step)

    @contextlib.contextmanager
    def _asking_the_disk(self, pinned: int = 0) -> Iterator[None]:
        """Say that the disk is asked before it is: whoever looks at the word sees a disk that does not answer."""
        now_ns = time.monotonic_ns()
        self._say(dataclasses.replace(self._word, pinned=pinned, began_ns=now_ns, moved_ns=now_ns))
        try:
            yield
        finally:
            self._say(dataclasses.replace(self._word, pinned=0, began_ns=0, moved_ns=0))

    def _moved(self) -> None:
        """The disk has answered."""
        self._say(dataclasses.replace(self._word, moved_ns=time.monotonic_ns()))

    def _say(self, word: SaverWord) -> None:
        self._word = word
        self._pages.write_word(word)

    def _write(self, step: int, temporary: Path) -> int:
        """All ranks' files, the manifest, and the rename that is the commit. Returns the size."""
        assert self._job is not None
        files = self._files(self._moved)
        everyone = files.find(step, range(self._job.world_size))
        temporary.mkdir(parents=True)
        if self._leading is None:
            entries = files.write_layout(temporary, everyone[0]) + files.write(temporary, everyone)
        else:
            entries = self._write_with_others(files, everyone, temporary)
        draft = msgspec.json.decode(everyone[0][2].facts, type=Manifest)
        manifest = dataclasses.replace(draft, files=tuple(entries))
        write_durably(temporary / manifests.MANIFEST_NAME, manifests.encode(manifest))
        if self._leading is not None:
            self._leading.check(temporary)
        sync_folder(temporary)
        publish(temporary, Path(self._job.directory) / manifests.folder_name(step))
        return manifest.size_bytes

    def _write_with_others(self, files: SlotFiles, everyone: Sequence[Found], temporary: Path) -> list[FileEntry]:
        """This host's part, while the other hosts write theirs into the same folder."""
        assert self._leading is not None
        self._leading.announce(temporary)
        entries = files.write_layout(temporary, everyone[0])
        mine = [found for found in everyone if found[0] in self._own]
        return entries + files.write(temporary, mine) + self._leading.gather(temporary, self._moved)

    def _files(self, moved: Callable[[], None]) -> SlotFiles:
        return SlotFiles(self._folder, self._headers, moved)

    def _prune(self) -> None:
        assert self._job is not None
        directory = Path(self._job.directory)
        try:
            remove_old(directory, self._job.keep, f"{TEMPORARY}old-")
        except OSError as error:
            _log.warning("everstep cannot remove old checkpoints in %s: %s", directory, error.strerror)


def main(arguments: list[str]) -> int:
    """`saver FD FOLDER`: save until the pipe closes, then once more, and remove the folder if that went well."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the job closes the pipe
    os.nice(_NICENESS)
    pipe, folder = int(arguments[0]), Path(arguments[1])
    lock = share_lock(folder)
    if lock is None:
        return 0  # the folder is gone, and with it all that there was to save
    saver = Saver(folder)
    while not (select.select([pipe], [], [], saver.pause_s())[0] and not os.read(pipe, 1)):
        _guarded(saver, saver.turn)
    if not _guarded(saver, saver.flush) or saver.keeps_folder:
        (folder / KEPT_NAME).touch()
    else:
        remove_folder(folder)
    return 0


def _guarded(saver: Saver, work: Callable[[], None]) -> bool:
    """Whether it went without a defect."""
    try:
        work()
    except Exception as error:  # outermost frame
        _log.exception("everstep: the saver failed, and goes on")
        saver.note_defect(error)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
