"""What a rank asks of its host's replicator when it finds a slot damaged: the same bytes again, from a copy elsewhere.

Requests and answers are files in the memory folder; nobody asks while ranks train.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.policy.replication import Version

_FOLDER = "peers.repairs"
_ASKED, _ANSWERED = ".asked", ".answered"


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


def ask_repair(folder: Path, rank: int, repair: Repair) -> None:
    """Leave a request.

    Raises:
        OSError: the folder is full or gone.
    """
    (folder / _FOLDER).mkdir(mode=0o700, exist_ok=True)
    _put(folder / _FOLDER / f"{rank}{_ASKED}", msgspec.json.encode(repair))


def answer_of(folder: Path, rank: int, serial: int) -> Repaired | None:
    """The answer to a request; None while there is none."""
    try:
        answer = msgspec.json.decode((folder / _FOLDER / f"{rank}{_ANSWERED}").read_bytes(), type=Repaired)
    except (OSError, msgspec.MsgspecError):
        return None
    return answer if answer.serial == serial else None


def repairs_asked(folder: Path) -> list[tuple[int, Repair]]:
    """The requests that nobody has answered, with the rank that asks."""
    found = []
    try:
        names = sorted(os.listdir(folder / _FOLDER))
    except OSError:
        return []
    for name in names:
        rank = name.removesuffix(_ASKED)
        if rank == name or not rank.isdecimal():
            continue
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append((int(rank), msgspec.json.decode((folder / _FOLDER / name).read_bytes(), type=Repair)))
    return found


def answer_repair(folder: Path, rank: int, answer: Repaired) -> None:
    """The request goes, so that it is not done twice.

    Raises:
        OSError: the folder is full or gone.
    """
    _put(folder / _FOLDER / f"{rank}{_ANSWERED}", msgspec.json.encode(answer))
    (folder / _FOLDER / f"{rank}{_ASKED}").unlink(missing_ok=True)


def _put(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(content)
    fresh.rename(path)
