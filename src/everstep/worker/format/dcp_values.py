"""Numbers of the optimizer as Distributed Checkpoint reads them, each in a place of fixed size in one tensor of bytes.

A value is written by `torch.save` in its older form, which may be followed by anything; the newer one, a zip file, ends
where the file ends.
"""

import io
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.worker.format.layout import ALIGNMENT, Path, Value, round_up

_ROOM_BYTES_MIN = 256
_FLOAT = struct.Struct(">cd")
"""A float in a pickle: BINFLOAT and eight bytes (CPython, Lib/pickletools.py)."""


class TooLarge(Exception):
    """A value has outgrown its place; the text names it."""


class Values:
    """Values by path, kept in `tensor`."""

    def __init__(self, now: dict[Path, Any]) -> None:
        content = {path: _written(value) for path, value in now.items()}
        places, at = [], 0
        for path, written in content.items():
            size = round_up(max(_ROOM_BYTES_MIN, len(written) * 3 // 2), ALIGNMENT)
            places.append(Value(path=path, at=at, size_bytes=size))
            at += size
        self.places = tuple(places)
        self.tensor = torch.zeros(at, dtype=torch.uint8)
        self._bytes = self.tensor.numpy()
        self._last: dict[Path, Any] = {}
        self.write(now)

    def write(self, now: dict[Path, Any]) -> None:
        """Write what has changed.

        Raises:
            TooLarge: a value does not fit, or is one that there was not before.
        """
        if len(now) != len(self.places):
            raise TooLarge("the optimizer has other numbers than before")
        for place in self.places:
            if place.path not in now:
                raise TooLarge(f"{'.'.join(map(str, place.path))} is gone")
            value = now[place.path]
            if place.path in self._last and not isinstance(value, Tensor) and self._last[place.path] == value:
                continue
            last = self._last.get(place.path)
            if type(value) is float and type(last) is float:
                self._swap(place, last, value)
                continue
            written = _written(value)
            if len(written) > place.size_bytes:
                raise TooLarge(f"{'.'.join(map(str, place.path))} takes more room than before")
            self._bytes[place.at : place.at + len(written)] = np.frombuffer(written, dtype=np.uint8)
            self._last[place.path] = value

    def _swap(self, place: Value, last: float, value: float) -> None:
        """Change a number where it stands: learning rates change at each step, and `torch.save` takes its time."""
        there = self._bytes[place.at : place.at + place.size_bytes]
        at = there.tobytes().index(_FLOAT.pack(b"G", last))
        there[at : at + _FLOAT.size] = list(_FLOAT.pack(b"G", value))
        self._last[place.path] = value


def _written(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content, _use_new_zipfile_serialization=False)
    return content.getvalue()
