"""What a replicator is told and tells through files in the memory folder: roster, address, readiness, its pin."""

import contextlib
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.peer_line import is_loopback
from everstep.adapters.checkpoints.shared_pages import map_page
from everstep.domain.errors import ConfigError, EvidenceError

ROSTER_NAME, ADDRESS_NAME, READY_NAME, CREDENTIALS_NAME, COPIES_NAME = (
    "peers.json",
    "peers.address",
    "peers.ready",
    "peers.credentials",
    "copies",
)
_PIN_NAME, _MOVED_NAME = "peers.pin", "peers.moved"
BYTES_PER_S = 100e6
"""Sent while training runs. On two busy cores that both hosts share, 100 MB/s slow steps by 14 %, and 200 MB/s by 41 %;
without TLS a prototype's did by 4 and 16 % (bench/checkpoint_peers.py)."""
BYTES_PER_S_MIN = 1e6
"""Below it a piece would take longer than a peer waits."""
_PIN = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_PAGE = 4096
_LOOKS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRoster:
    """Who is in the job, as the launcher tells each host's replicator.

    Attributes:
        generation: goes up with each roster.
        host: this one.
        attempt: that it is for; 0 where nobody says.
        addresses: `HOST:PORT` of each host's replicator.
        ranks: of each host.
        keepers: who holds whose copies (policy/peers.py).
        racks: of the hosts whose rack somebody knows; keepers are chosen again once the ranks know their groups.
        restoring: no rank runs, and every host is to get the newest version that exists whole.
        bytes_per_s: what this host may send while ranks train; 0 for no limit.
        encrypted: False on loopback only.
    """

    generation: int
    host: str
    addresses: Mapping[str, str]
    ranks: Mapping[str, tuple[int, ...]]
    keepers: Mapping[str, str] = field(default_factory=dict)
    racks: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    restoring: bool = False
    bytes_per_s: float = BYTES_PER_S
    encrypted: bool = True

    def __post_init__(self) -> None:
        if self.host not in self.ranks or not any(0 in ranks for ranks in self.ranks.values()):
            raise ConfigError(f"the roster must name the ranks of {self.host}, and rank 0's host")
        if lacking := sorted(self.ranks.keys() - self.addresses.keys()):
            raise ConfigError(f"the roster has no address of {', '.join(lacking)}")
        if 0 < self.bytes_per_s < BYTES_PER_S_MIN or self.bytes_per_s < 0:
            raise ConfigError(
                f"bytes_per_s={self.bytes_per_s:g} must be 0 for no limit, or {BYTES_PER_S_MIN:g} or more"
            )
        if not self.encrypted and not all(is_loopback(address) for address in self.addresses.values()):
            raise ConfigError("copies go to other machines only encrypted; leave `encrypted` as it is")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What the replicator says when the ranks of a restored generation may start.

    Attributes:
        step: that every host now holds; None when there was nothing, or not all of it.
    """

    generation: int
    step: int | None = None
    reasons: tuple[str, ...] = ()


def write_roster(folder: Path, roster: PeerRoster) -> None:
    _replace(folder / ROSTER_NAME, msgspec.json.encode(roster))


def roster_stamp(folder: Path) -> tuple[int, int]:
    """Another one for another roster; cheap to ask for."""
    try:
        found = (folder / ROSTER_NAME).stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def read_roster(folder: Path) -> PeerRoster | None:
    """The roster; None while there is none.

    Raises:
        EvidenceError: malformed.
        ConfigError: it asks for what cannot be.
    """
    content = _content(folder / ROSTER_NAME)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=PeerRoster)
    except msgspec.MsgspecError as error:
        raise EvidenceError(f"{ROSTER_NAME} is malformed: {error}") from error


def write_address(folder: Path, address: str) -> None:
    _replace(folder / ADDRESS_NAME, address.encode())


def read_address(folder: Path) -> str:
    """Where the replicator listens; empty while it does not."""
    return (_content(folder / ADDRESS_NAME) or b"").decode()


def write_readiness(folder: Path, readiness: Readiness) -> None:
    _replace(folder / READY_NAME, msgspec.json.encode(readiness))


def read_readiness(folder: Path) -> Readiness | None:
    content = _content(folder / READY_NAME)
    return None if content is None else msgspec.json.decode(content, type=Readiness)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    fresh.rename(path)


class PeerPin:
    """The step whose slots the replicator reads; the ranks of this host do not overwrite them meanwhile.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path, name: str = _PIN_NAME) -> None:
        self._memory = map_page(folder / name, _PAGE)

    def step(self) -> int:
        """0 for none. Costs about a microsecond."""
        for _ in range(_LOOKS_MAX):
            fields = self._memory[: _PIN.size]
            (crc,) = _CRC.unpack_from(self._memory, _PIN.size)
            if crc == zlib.crc32(fields):
                return int(_PIN.unpack(fields)[0])
            if crc == 0:
                break
        return 0

    def write(self, step: int) -> None:
        fields = _PIN.pack(step)
        self._memory[: _PIN.size + _CRC.size] = fields + _CRC.pack(zlib.crc32(fields))


class PeerProgress:
    """A number that changes as long as some host of the job is being brought to the step to begin from.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path) -> None:
        self._page = PeerPin(folder, _MOVED_NAME)

    def read(self) -> int:
        return self._page.step()

    def write(self, number: int) -> None:
        if number != self._page.step():
            self._page.write(number)
