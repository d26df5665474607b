"""What makes a checkpoint complete: a manifest with the size and checksum of every file; and the tests against it.

It knows files and numbers, nothing of torch or of what is inside a file.
"""

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.domain.errors import ConfigError, EvidenceError

FORMAT = 2
MANIFEST_NAME = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_READ_BYTES = 16 << 20
_CRC32 = "crc32:"
COMMON = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        rank: whose; COMMON for one that is everybody's. Ranks that hold the very same tensors share a file.
        digest: `crc32:` and 8 digits, of the whole file.
        seal: of a file with tensors: the checksum over its table of checksums (worker/format/seal.py).
    """

    name: str
    rank: int
    size_bytes: int
    digest: str
    seal: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint: it is there if and only if the checkpoint is complete.

    Attributes:
        torch: version of torch that wrote it.
        thread_count: torch's threads within an operation, which decide the order of sums.
        interval_steps: steps between two saves at that time; a resumed run begins with them.
        inexact_because: why a resume may not be bit-identical; empty when it is.
        files: for each rank one with tensors and one with the rest; the layout, and Distributed Checkpoint's metadata.
        layout: names the arrangement of the tensors (worker/format/layout.py).
        replicated: every rank's file has a share of weights that all ranks hold.
        digest: blake2b of this manifest with an empty digest.
    """

    format: int = FORMAT
    step: int
    world_size: int
    torch: str
    thread_count: int
    interval_steps: int
    inexact_because: tuple[str, ...]
    files: tuple[FileEntry, ...]
    layout: str = ""
    replicated: bool = False
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.each_file)

    @property
    def each_file(self) -> tuple[FileEntry, ...]:
        """Every file once, also one that ranks share."""
        return tuple({entry.name: entry for entry in self.files}.values())

    def entry(self, name: str, rank: int) -> FileEntry | None:
        """The file of this name that is this rank's."""
        return next((entry for entry in self.files if entry.rank == rank and entry.name == name), None)

    def tensors_of(self, rank: int) -> FileEntry | None:
        """The file with a rank's tensors."""
        return next((entry for entry in self.files if entry.rank == rank and entry.name != rest_name(rank)), None)


class _FormatOnly(msgspec.Struct):
    format: int


class Crc32:
    """The digest of a file as it is written."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: "memoryview | bytes | bytearray") -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return crc32_digest(self.value)


def crc32_digest(value: int) -> str:
    return f"{_CRC32}{value:08x}"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def rest_name(rank: int) -> str:
    return f"rank-{rank:05d}.rest.pt"


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON for people and machines, sealed with its own digest."""
    return msgspec.json.format(msgspec.json.encode(dataclasses.replace(manifest, digest=_seal(manifest))), indent=2)


def decode(data: bytes) -> Manifest:
    """The manifest of its JSON.

    Raises:
        EvidenceError: malformed, or not what was written.
        ConfigError: written by a newer everstep.
    """
    try:
        if (found := msgspec.json.decode(data, type=_FormatOnly).format) > FORMAT:
            raise ConfigError(
                f"the checkpoint has format {found} and this everstep reads up to {FORMAT}: "
                "upgrade everstep, or give attach() another directory"
            )
        if found < FORMAT:
            raise ConfigError(
                f"the checkpoint has format {found}, of an everstep before its first release, and this one reads "
                f"{FORMAT}: give attach() another directory"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{MANIFEST_NAME} is malformed: {error}") from error
    if manifest.digest != _seal(manifest):
        raise EvidenceError(f"{MANIFEST_NAME} was changed after it was written: its checksum is another")
    return manifest


def _seal(manifest: Manifest) -> str:
    content = msgspec.json.encode(dataclasses.replace(manifest, digest=""))
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a folder whose files are all there in their right sizes; their content is not read.

    Raises:
        EvidenceError: no manifest, a malformed one, or a file that is missing or has another size.
        ConfigError: written by a newer everstep.
    """
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError as error:
        raise EvidenceError(f"{folder.name} has no {MANIFEST_NAME}, so its save never finished") from error
    except OSError as error:
        raise EvidenceError(f"{MANIFEST_NAME} cannot be read: {error.strerror}") from error
    manifest = decode(data)
    for entry in manifest.files:
        _check_size(folder / entry.name, entry)
    return manifest


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise EvidenceError(f"{entry.name} is missing, expected {entry.size_bytes} bytes") from error
    except OSError as error:
        raise EvidenceError(f"{entry.name} cannot be read: {error.strerror}") from error
    if found != entry.size_bytes:
        raise EvidenceError(f"{entry.name} has {found} bytes, expected {entry.size_bytes}")


def pieces_of(folder: Path, entry: FileEntry) -> Iterator[bytes]:
    """The content of a file in pieces, read once; whether they are right is known after the last one.

    Raises:
        EvidenceError: missing, unreadable, of another size, or changed since it was written.
    """
    path, filled, crc = folder / entry.name, 0, Crc32()
    _check_size(path, entry)
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                crc.update(piece)
                filled += len(piece)
                yield piece
    except OSError as error:
        raise EvidenceError(f"{entry.name} cannot be read: {error.strerror}") from error
    if filled != entry.size_bytes:
        raise EvidenceError(f"{entry.name} has {filled} bytes, expected {entry.size_bytes}")
    if (found := crc.hexdigest()) != entry.digest:
        raise EvidenceError(
            f"{entry.name} ({entry.size_bytes} bytes, as expected) was changed after it was written: "
            f"its checksum is {found}, expected {entry.digest}"
        )


def check(folder: Path, entry: FileEntry, moved: Callable[[], None] = lambda: None) -> None:
    """Test a file against its manifest.

    Args:
        moved: called after each piece.

    Raises:
        EvidenceError: as `pieces_of`.
    """
    for _ in pieces_of(folder, entry):
        moved()


def read_verified(folder: Path, entry: FileEntry) -> bytes:
    """The content of a file that is what was written.

    Raises:
        EvidenceError: as `pieces_of`.
    """
    return b"".join(pieces_of(folder, entry))


def complete_steps(directory: Path) -> list[int]:
    """The steps whose folders are complete, newest first, by size alone."""
    found = []
    for step in all_steps(directory):
        try:
            read(directory / folder_name(step))
        except (EvidenceError, ConfigError):
            continue
        found.append(step)
    return found


def all_steps(directory: Path) -> list[int]:
    """The steps that have a folder, newest first.

    Raises:
        OSError: the directory cannot be listed.
    """
    steps = (step_of(path.name) for path in directory.iterdir())
    return sorted((step for step in steps if step is not None), reverse=True)
