"""The saver: one process per host that makes memory slots durable, survives the training, and imports no torch.

It looks at the pages in the run's folder several times a second; nobody waits for it. When the pipe that it was given
closes, the run is over: it makes the newest complete state durable, removes the folder and ends.
"""

import contextlib
import dataclasses
import logging
import mmap
import os
import select
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from everstep.adapters.memory_folder import remove_folder, share_lock
from everstep.adapters.memory_slots import (
    JOB_NAME,
    RankSlots,
    SavePages,
    SaverWord,
    SlotHeader,
    image_path,
    rest_path,
)
from everstep.domain.errors import EvidenceError
from everstep.policy.checkpoints import SlotState, committed_steps
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder, write_durably, write_past_cache
from everstep.worker.format.layout import tensors_name
from everstep.worker.format.manifest import Crc32, FileEntry, Manifest
from everstep.worker.format.publishing import publish, write_common, write_small
from everstep.worker.format.seal import Seal
from everstep.worker.format.trailer import unpack
from everstep.worker.saving.saver_order import SaverOrder

_log = logging.getLogger(__name__)
POLL_S = 0.1
TEMPORARY = ".saving-"
_NICENESS = 10
_BACKOFF_S = (5.0, 10.0, 30.0, 60.0)
_DURATIONS_BETWEEN = 3


class Overtaken(Exception):
    """A slot was overwritten while it was read."""


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
        self._failed_in_a_row = 0
        self._spoilt: set[int] = set()

    def turn(self) -> None:
        """Make a step durable if one is due."""
        self._read_job()
        if self._job is None or time.monotonic() < self._next_s:
            return
        every = self._job.every_steps
        steps = [s for s in self._committed() if s > self._word.durable and (every is None or s % every == 0)]
        if steps:
            started_s = time.monotonic()
            self._save(steps[0])
            if every is None and not self._failed_in_a_row:
                took_s = time.monotonic() - started_s
                self._next_s = started_s + max(self._job.every_s, _DURATIONS_BETWEEN * took_s)

    def flush(self) -> None:
        """Make the newest complete step durable, whatever the schedule says."""
        self._read_job()
        if self._job is None:
            return
        for step in self._committed():
            with self._asking_the_disk():
                on_disk = self._on_disk(Path(self._job.directory))
            if step <= max(self._word.durable, *on_disk, 0):
                return
            if self._save(step):
                return

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
        with self._asking_the_disk():
            on_disk = self._on_disk(Path(job.directory))
            with contextlib.suppress(OSError):
                for leftover in Path(job.directory).glob(f"{TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
        # A job may have gone back to an older step; then newer ones than that are none of its own.
        self._say(dataclasses.replace(self._word, durable=on_disk[0] if on_disk else 0))

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
        assert self._job is not None
        started_s = time.monotonic()
        temporary = Path(self._job.directory) / f"{TEMPORARY}{manifests.folder_name(step)}-{os.getpid()}"
        word, error = self._word, ""
        try:
            size_bytes = self._write(step, temporary)
            took_s = time.monotonic() - started_s
            word = dataclasses.replace(
                self._word, durable=step, size_bytes=size_bytes, took_s=took_s, saves=word.saves + 1
            )
            self._failed_in_a_row = 0
        except Overtaken:
            shutil.rmtree(temporary, ignore_errors=True)
        except EvidenceError as damage:
            self._spoilt.add(step)
            error = str(damage)
        except OSError as problem:
            error = f"step {step} could not be made durable ({problem.strerror})"
            self._back_off()
        if error:
            shutil.rmtree(temporary, ignore_errors=True)
            word = self._failed(word, step, error)
        self._say(dataclasses.replace(word, pinned=0, began_ns=self._word.began_ns, moved_ns=time.monotonic_ns()))
        if word.durable == step:
            self._prune()
        return word.durable == step

    def note_defect(self, error: Exception) -> None:
        """Something that should not happen: it is told like a disk that fails, and tried again as seldom."""
        self._back_off()
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
        directory = Path(self._job.directory)
        slots = self._slots_of(step)
        temporary.mkdir(parents=True)
        entries = self._write_layout(temporary, slots[0])
        for rank, (slot, header) in enumerate(slots):
            entries.append(self._write_image(temporary, rank, slot, header))
            entries.append(self._write_rest(temporary, rank, slot, header))
            self._moved()
        if [(slot, header.step) for slot, header in self._slots_of(step)] != [(s, h.step) for s, h in slots]:
            raise Overtaken
        draft = msgspec.json.decode(slots[0][1].facts, type=Manifest)
        manifest = dataclasses.replace(draft, files=tuple(entries))
        write_durably(temporary / manifests.MANIFEST_NAME, manifests.encode(manifest))
        sync_folder(temporary)
        publish(temporary, directory / manifests.folder_name(step))
        return manifest.size_bytes

    def _slots_of(self, step: int) -> list[tuple[int, SlotHeader]]:
        found = []
        for headers in self._headers:
            slot = headers.find(step)
            if slot is None or (header := headers.read(slot)).state is not SlotState.COMPLETE or header.step != step:
                raise Overtaken
            found.append((slot, header))
        if len({header.layout for _, header in found}) > 1:
            raise Overtaken  # of two attempts with different states
        return found

    def _write_layout(self, folder: Path, first: tuple[int, SlotHeader]) -> list[FileEntry]:
        """What tells where everything is, for us and for Distributed Checkpoint: every slot ends with it.

        Raises:
            EvidenceError: it is not what the ranks wrote.
        """
        slot, header = first
        try:
            _, layout, metadata = unpack(image_path(self._folder, 0, slot), header.layout)
        except EvidenceError:
            self._raise_if_overtaken(0, slot, header)
            raise
        return write_common(folder, layout, metadata)

    def _write_image(self, folder: Path, rank: int, slot: int, header: SlotHeader) -> FileEntry:
        """Raises EvidenceError where the slot is not what its header says."""
        path = image_path(self._folder, rank, slot)
        seal, crc = Seal(), Crc32()

        def look(piece: memoryview) -> None:
            seal.update(piece)
            crc.update(piece)
            self._moved()

        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            is_sound = len(content) == header.image_bytes
            if is_sound:
                write_past_cache(folder / tensors_name(rank), content, look)
                is_sound = seal.value() == header.image_seal
        if not is_sound:
            self._raise_if_overtaken(rank, slot, header)
            raise EvidenceError(f"step {header.step}: the memory of rank {rank} was changed after it was written")
        return FileEntry(
            name=tensors_name(rank),
            rank=rank,
            size_bytes=header.image_bytes,
            digest=crc.hexdigest(),
            seal=header.image_seal,
        )

    def _write_rest(self, folder: Path, rank: int, slot: int, header: SlotHeader) -> FileEntry:
        content = rest_path(self._folder, rank, slot).read_bytes()
        if len(content) != header.rest_bytes or zlib.crc32(content) != header.rest_seal:
            self._raise_if_overtaken(rank, slot, header)
            raise EvidenceError(f"step {header.step}: the memory of rank {rank} was changed after it was written")
        return write_small(folder, manifests.rest_name(rank), content, rank=rank)

    def _raise_if_overtaken(self, rank: int, slot: int, header: SlotHeader) -> None:
        if self._headers[rank].read(slot) != header:
            raise Overtaken

    def _prune(self) -> None:
        assert self._job is not None
        directory = Path(self._job.directory)
        try:
            for step in manifests.complete_steps(directory)[self._job.keep :]:
                old = directory / manifests.folder_name(step)
                aside = directory / f"{TEMPORARY}old-{old.name}"
                old.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
        except OSError as error:
            _log.warning("everstep cannot remove old checkpoints in %s: %s", directory, error.strerror)


def main(arguments: list[str]) -> int:
    """`saver FD FOLDER`: save until the pipe closes, then once more, and remove the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the job closes the pipe
    os.nice(_NICENESS)
    pipe, folder = int(arguments[0]), Path(arguments[1])
    lock = share_lock(folder)
    if lock is None:
        return 1
    saver = Saver(folder)
    while not (select.select([pipe], [], [], POLL_S)[0] and not os.read(pipe, 1)):
        _guarded(saver, saver.turn)
    _guarded(saver, saver.flush)
    remove_folder(folder)
    return 0


def _guarded(saver: Saver, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # outermost frame
        _log.exception("everstep: the saver failed, and goes on")
        saver.note_defect(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
