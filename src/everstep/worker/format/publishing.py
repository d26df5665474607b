"""The last steps of every save to disk, whoever makes it: small files, what is everybody's, and the final name."""

import shutil
import zlib
from pathlib import Path

from everstep.domain.errors import ConfigError, EvidenceError
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder, write_durably
from everstep.worker.format.layout import LAYOUT_NAME, METADATA_NAME
from everstep.worker.format.manifest import COMMON, FileEntry, crc32_digest


def write_small(folder: Path, name: str, content: bytes, *, rank: int) -> FileEntry:
    """A new small file, durable once its folder is; what the manifest says of it."""
    write_durably(folder / name, content)
    return FileEntry(name=name, rank=rank, size_bytes=len(content), digest=crc32_digest(zlib.crc32(content)))


def write_common(folder: Path, layout: bytes, metadata: bytes) -> list[FileEntry]:
    """The files that are everybody's."""
    contents = {LAYOUT_NAME: layout, METADATA_NAME: metadata}
    return [write_small(folder, name, content, rank=COMMON) for name, content in contents.items()]


def publish(temporary: Path, target: Path) -> None:
    """Give a whole checkpoint its name, which is the commit; where somebody was faster with this step, theirs stays.

    Raises:
        OSError: the disk is full or broken, or something else has that name.
    """
    try:
        temporary.rename(target)
    except OSError:
        if not _is_complete(target):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(target.parent)


def _is_complete(folder: Path) -> bool:
    try:
        manifests.read(folder)
    except (EvidenceError, ConfigError):
        return False
    return True
