"""What makes a memory slot tell of itself: the layout of all ranks at the end of each file, packed, and `.metadata`.

So a slot that was copied to another host, or found by another attempt, needs nothing beside it. It imports no torch.
"""

import os
import struct
import zlib
from pathlib import Path

from everstep.domain.errors import EvidenceError
from everstep.worker.format.layout import PAGE_BYTES, Layout, decode, digest_of

_FOOTER = struct.Struct("<8sQQQ")  # magic, bytes of the packed layout, of the packed metadata, crc32 of these two
_MAGIC = b"EVSTLAY1"


def pack(layout: bytes, metadata: bytes) -> bytes:
    """The end of a file whose other parts end with a page."""
    packed = zlib.compress(layout), zlib.compress(metadata)
    content = b"".join(packed)
    footer = _FOOTER.pack(_MAGIC, len(packed[0]), len(packed[1]), zlib.crc32(content))
    return bytes(-(len(content) + len(footer)) % PAGE_BYTES) + content + footer


def unpack(path: Path, name: str) -> tuple[Layout, bytes, bytes]:
    """The layout, also as it was encoded, and the metadata that a file ends with.

    Args:
        name: digest of the layout that is expected.

    Raises:
        EvidenceError: the file cannot be read, or ends with something else.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _FOOTER.size))
            footer = file.read()
            if len(footer) != _FOOTER.size:
                raise EvidenceError(f"{path.name} is too short")
            magic, layout_bytes, metadata_bytes, crc = _FOOTER.unpack(footer)
            if magic != _MAGIC or (at := end - _FOOTER.size - layout_bytes - metadata_bytes) < 0:
                raise EvidenceError(f"{path.name} does not tell its layout")
            file.seek(at)
            content = file.read(layout_bytes + metadata_bytes)
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error.strerror}") from error
    if zlib.crc32(content) != crc:
        raise EvidenceError(f"{path.name} was changed after it was written: its layout has another checksum")
    layout, metadata = zlib.decompress(content[:layout_bytes]), zlib.decompress(content[layout_bytes:])
    if digest_of(layout) != name:
        raise EvidenceError(f"{path.name} has another layout than its header says")
    return decode(layout, name), layout, metadata
