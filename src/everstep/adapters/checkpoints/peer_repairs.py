"""What a rank asks of its host's replicator when it finds a slot damaged: the same bytes again, from a copy elsewhere.

Requests and answers are files in the memory folder; nobody asks while ranks train. A request can be withdrawn until its
files are about to be put in place, and never after: both are one rename or removal of the same file.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.policy.replication import Version

_FOLDER = "peers.repairs"
_ASKED, _TAKEN, _ANSWERED = ".asked", ".taken", ".answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Bring the files of this slot again.

    Attributes:
        serial: another one for each request.
    """

    serial: int
    shard: int
    slot: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """How it went.

    Attributes:
        source: the host that the bytes came from.
        problem: why they are not there; empty when they are.
    """

    serial: int
    source: str = ""
    problem: str = ""


def ask_repair(folder: Path, repair: Repair) -> None:
    """Leave a request.

    Raises:
        OSError: the folder is full or gone.
    """
    (folder / _FOLDER).mkdir(mode=0o700, exist_ok=True)
    _put(_path(folder, repair.serial, _ASKED), msgspec.json.encode(repair))


def withdraw_repair(folder: Path, serial: int) -> bool:
    """Whether nothing is put in place for the request any more; False where its files are about to be, or are."""
    try:
        _path(folder, serial, _ASKED).unlink()
    except OSError:
        return False
    return True


def is_asked(folder: Path, serial: int) -> bool:
    """Whether a request stands: neither withdrawn nor taken."""
    return _path(folder, serial, _ASKED).exists()


def is_open(folder: Path, serial: int) -> bool:
    """Whether a request still waits for its answer; the answer is there when it does not."""
    return is_asked(folder, serial) or _path(folder, serial, _TAKEN).exists()


def answer_of(folder: Path, serial: int) -> Repaired | None:
    """The answer to a request; None while there is none."""
    try:
        return msgspec.json.decode(_path(folder, serial, _ANSWERED).read_bytes(), type=Repaired)
    except (OSError, msgspec.MsgspecError):
        return None


def repairs_asked(folder: Path) -> list[Repair]:
    """The requests that stand."""
    try:
        names = sorted(os.listdir(folder / _FOLDER))
    except OSError:
        return []
    found = []
    for name in names:
        if name.endswith(_ASKED):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                repair = msgspec.json.decode((folder / _FOLDER / name).read_bytes(), type=Repair)
                if name == f"{repair.serial}{_ASKED}":
                    found.append(repair)
    return found


def take_repair(folder: Path, serial: int) -> bool:
    """The files are there, and come in place next; False where the request was withdrawn."""
    try:
        _path(folder, serial, _ASKED).rename(_path(folder, serial, _TAKEN))
    except OSError:
        return False
    return True


def answer_repair(folder: Path, answer: Repaired) -> None:
    """The request goes, also where the answer finds no room, so that it is not done twice.

    Raises:
        OSError: the folder is full or gone.
    """
    try:
        _put(_path(folder, answer.serial, _ANSWERED), msgspec.json.encode(answer))
    finally:
        for state in (_ASKED, _TAKEN):
            _path(folder, answer.serial, state).unlink(missing_ok=True)


def forget_repairs(folder: Path) -> None:
    """Before ranks start: what those of an earlier attempt asked for is not wanted any more."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def _path(folder: Path, serial: int, state: str) -> Path:
    return folder / _FOLDER / f"{serial}{state}"


def _put(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(content)
    fresh.rename(path)
