"""One checkpoint by the savers of several hosts: each writes its own ranks' files into one folder, and one leads.

The leader, on rank 0's host, names the step and the folder, waits for a small record of every other host, and commits.
Words go by the leader's page, parts by the checkpoint folder, which all hosts share. It imports no torch.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.leader_page import LeaderPage, LeaderWord, Stage
from everstep.adapters.checkpoints.memory_folder import WANTED_NAME
from everstep.adapters.checkpoints.memory_slots import SlotHeader
from everstep.adapters.checkpoints.peer_files import PeerRoster, read_roster
from everstep.domain.errors import ConfigError, EvidenceError
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder, write_durably
from everstep.worker.format.layout import tensors_name
from everstep.worker.format.manifest import FileEntry
from everstep.worker.saving.slot_writing import Overtaken, SlotFiles

SILENT_S = 30.0
"""A host that has written nothing for so long does not keep the others waiting."""
_FOLDER_WITHIN_S = 25.0
"""Shorter than the leader's patience, so that it hears why."""
_SEEN_WITHIN_S = 60.0
"""Network file systems show sizes as late as that (nfs(5): acregmax)."""
_LOOK_S = 0.05
_STILL_S = 2.0
_AHEAD_MAX = 64


class Superseded(Overtaken):
    """Another attempt has begun; some hosts may be new and know nothing of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What a host leaves in the folder when its part is on disk, or why it is not.

    Attributes:
        overtaken: the step was overwritten first; another one may do.
        spoilt: the step's memory is damaged.
    """

    serial: int
    entries: tuple[FileEntry, ...] = ()
    error: str = ""
    overtaken: bool = False
    spoilt: bool = False


def roster_of(folder: Path) -> PeerRoster | None:
    """Who takes part; None where this host is alone, or nobody has said yet."""
    try:
        roster = read_roster(folder)
    except (EvidenceError, ConfigError):
        return None
    return roster if roster is not None and len(roster.ranks) > 1 else None


def part_name(first_rank: int) -> str:
    """Of the record of the host whose first rank this is."""
    return f"part-{first_rank:05d}.json"


def try_name(word: LeaderWord) -> str:
    """What every host calls the try that the leader announced; no other try ever has this name."""
    return f"{manifests.folder_name(word.step)}-a{word.attempt:04d}-{word.serial:016x}"


class Leading:
    """The leader's side.

    Args:
        folder: of this host in shared memory.
        order: attempt of the order that is followed.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path, roster: PeerRoster, *, order: int) -> None:
        self._folder = folder
        self._roster = roster
        self._page = LeaderPage(folder)
        self._others = {host: min(ranks) for host, ranks in roster.ranks.items() if host != roster.host and ranks}
        self._ahead = 0
        self._newest, self._since_s = 0, 0.0
        self._word = self._next = LeaderWord(order=order)
        self._page.write(self._word)
        self.is_alone = False
        """The other hosts did not do their part of the last try."""

    def tell(self, *, durable: int | None = None, stage: Stage | None = None) -> None:
        """What is on disk, and where the leader is in its life."""
        word = self._word
        if durable is not None:
            word = replace(word, durable=durable)
        self._say(word if stage is None else replace(word, stage=stage))

    def is_superseded(self) -> bool:
        """Whether the next attempt has begun, perhaps with other hosts, and its ranks have not ordered anything yet.

        Or the next start of the run waits for this folder: what is in memory is the newest that it can have.
        """
        if (self._folder / WANTED_NAME).exists():
            return True
        now = roster_of(self._folder)
        return now is None or now.ranks != self._roster.ranks or now.attempt > self._word.order

    def choose(self, steps: Sequence[int], stride: int) -> int | None:
        """Which of the steps that all ranks have to write now; None: one to come is better, and is asked to stay.

        Args:
            steps: newest first.
            stride: steps between two saves to memory.
        """
        if not self._ahead:
            return steps[0]
        now_s = time.monotonic()
        if not self._word.keep_from:
            self._newest, self._since_s = steps[0], now_s
            self._say(replace(self._word, keep_from=steps[0] + self._ahead * max(1, stride)))
            return None
        if ready := [step for step in steps if step >= self._word.keep_from]:
            return ready[-1]
        if steps[0] != self._newest:
            self._newest, self._since_s = steps[0], now_s
        elif now_s - self._since_s > _STILL_S:
            return steps[0]  # nothing is saved any more, so nothing is overwritten
        return None

    def begin(self, step: int, header: SlotHeader) -> str:
        """The name of a try, to be announced once its folder is there."""
        serial = secrets.randbits(63) | 1
        self._next = replace(self._word, serial=serial, step=step, attempt=header.attempt, layout=header.layout)
        return try_name(self._next)

    def announce(self, temporary: Path) -> None:
        """Tell the other hosts of the try that was begun; its folder must be there for them.

        Raises:
            OSError: the disk is full or broken.
        """
        sync_folder(temporary.parent)
        self._say(self._next)

    def end(self, *, overtaken: bool, durable: int) -> None:
        """The try is over. After one that was overtaken, steps are asked to stay ever earlier."""
        if overtaken:
            self._ahead = min(max(2, 2 * self._ahead), _AHEAD_MAX)
        self._say(replace(self._word, step=0, keep_from=0, durable=durable))

    def gather(self, temporary: Path, moved: Callable[[], None]) -> list[FileEntry]:
        """Wait for the other hosts' parts; what they wrote.

        Raises:
            Overtaken, EvidenceError: the step cannot be had whole.
            OSError: a host's disk failed, or it has written nothing for `SILENT_S`.
        """
        self.is_alone = False
        entries: list[FileEntry] = []
        waiting = dict(self._others)
        written, moved_s = -1, time.monotonic()
        while True:
            size = size_of(temporary)  # first: on a network file system, listing a folder makes its new names seen
            for host, first in list(waiting.items()):
                record = _read_record(temporary / part_name(first), self._word.serial)
                if record is not None:
                    entries += _entries_of(host, record)
                    del waiting[host]
            if not waiting:
                return entries
            if size != written:
                written, moved_s = size, time.monotonic()
                moved()
            elif time.monotonic() - moved_s > SILENT_S:
                self.is_alone = True
                raise OSError(errno.ETIMEDOUT, f"{_named(waiting)} has written nothing for {SILENT_S:.0f} s")
            if self.is_superseded():
                raise Superseded
            time.sleep(_LOOK_S)

    def check(self, temporary: Path) -> None:
        """Whether all files are seen here in their sizes, as on one shared folder; then the records have done theirs.

        Raises:
            Superseded: another attempt has begun.
            OSError: some are not.
        """
        ends_s = time.monotonic() + _SEEN_WITHIN_S
        while True:
            os.listdir(temporary)
            try:
                manifests.read(temporary)
                break
            except EvidenceError as missing:
                if time.monotonic() > ends_s:
                    reason = f"{missing}: the folder must be one that all hosts share"
                    raise OSError(errno.ENOENT, reason) from missing
                if self.is_superseded():
                    raise Superseded from missing
                time.sleep(_LOOK_S)
        for first in self._others.values():
            (temporary / part_name(first)).unlink(missing_ok=True)

    def _say(self, word: LeaderWord) -> None:
        if word != self._word:
            self._word = word
            self._page.amend(word)


class Following:
    """The side of every other host.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path, roster: PeerRoster, *, order: int) -> None:
        self._page = LeaderPage(folder)
        self._order = order
        self._own = sorted(roster.ranks[roster.host])
        self._served = 0
        self._serving = 0

    def word(self) -> LeaderWord:
        return self._page.read()

    def order(self) -> LeaderWord | None:
        """A try that this host has not served yet; a host that is no part of this attempt any more has none."""
        word = self._page.read()
        is_new = word.step and word.serial != self._served and word.order == self._order and self._own
        return word if is_new else None

    def check_wanted(self) -> None:
        """Raises Overtaken where the leader has given up the try that is being served."""
        if self._serving:
            word = self._page.read()
            if (word.serial, bool(word.step)) != (self._serving, True):
                raise Overtaken

    def serve(self, word: LeaderWord, temporary: Path, files: SlotFiles) -> str:
        """Write this host's part, and leave the record; what went wrong, else an empty string."""
        self._serving = word.serial
        try:
            record = self._part(word, temporary, files)
            if record is not None:
                self._leave(record, temporary)
        except Overtaken:
            return ""  # and the leader does not wait for it any more
        except OSError as problem:
            return f"step {word.step} could not be made durable ({problem.strerror})"
        finally:
            self._serving, self._served = 0, word.serial
        return record.error if record is not None else ""

    def _part(self, word: LeaderWord, temporary: Path, files: SlotFiles) -> PartRecord | None:
        """The record to leave; None where it is there already, and its files must not be touched any more."""
        self._await_folder(temporary)
        if _read_record(temporary / part_name(self._own[0]), word.serial) is not None:
            return None  # a saver before this one was killed afterwards
        self._remove_own(temporary)
        try:
            found = files.find(word.step, self._own)
            if any((header.attempt, header.layout) != (word.attempt, word.layout) for _, _, header in found):
                return PartRecord(serial=word.serial, overtaken=True)
            return PartRecord(serial=word.serial, entries=tuple(files.write(temporary, found)))
        except Overtaken:
            self.check_wanted()
            return PartRecord(serial=word.serial, overtaken=True)
        except EvidenceError as damage:
            return PartRecord(serial=word.serial, error=str(damage), spoilt=True)
        except OSError as problem:
            self.check_wanted()
            self._remove_own(temporary)  # room for the record
            return PartRecord(serial=word.serial, error=problem.strerror or "the disk failed")

    def _await_folder(self, temporary: Path) -> None:
        """The leader has made it before it spoke, and another host may see that late."""
        ends_s = time.monotonic() + _FOLDER_WITHIN_S
        while not _is_seen(temporary):
            self.check_wanted()
            if time.monotonic() > ends_s:
                raise FileNotFoundError(errno.ENOENT, f"{temporary} is not there; all hosts must share it")
            time.sleep(_LOOK_S)

    def _remove_own(self, temporary: Path) -> None:
        for rank in self._own:
            for name in (tensors_name(rank), manifests.rest_name(rank)):
                (temporary / name).unlink(missing_ok=True)

    def _leave(self, record: PartRecord, temporary: Path) -> None:
        """The record comes by rename when all it speaks of is durable."""
        name = part_name(self._own[0])
        fresh = temporary / f"{name}.new"
        fresh.unlink(missing_ok=True)
        sync_folder(temporary)
        write_durably(fresh, msgspec.json.encode(record))
        fresh.rename(temporary / name)
        sync_folder(temporary)


def _read_record(path: Path, serial: int) -> PartRecord | None:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=PartRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return record if record.serial == serial else None


def _entries_of(host: str, record: PartRecord) -> tuple[FileEntry, ...]:
    if record.overtaken:
        raise Overtaken
    if record.spoilt:
        raise EvidenceError(f"host {host}: {record.error}")
    if record.error:
        raise OSError(errno.EIO, f"host {host}: {record.error}")
    return record.entries


def _is_seen(folder: Path) -> bool:
    """Looks into the folder above first: a network file system may remember for long that a name was not there."""
    with contextlib.suppress(OSError):
        os.listdir(folder.parent)
    return folder.is_dir()


def size_of(folder: Path) -> int:
    """Grows with every file and every byte; the other hosts make, rename and remove files meanwhile.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it had this name a moment ago
                size += 1 + entry.stat().st_size
    return size


def _named(hosts: "dict[str, int]") -> str:
    names = sorted(hosts)
    return f"host {names[0]}" if len(names) == 1 else f"hosts {', '.join(names[:8])}"
