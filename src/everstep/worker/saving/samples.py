"""A few bytes of tensors before they are copied, for a comparison with the copy: it sees what no version counter shows.

Version counters do not see writes through `.data`. Every sample takes other tensors and other places in them, so that a
writer of whole tensors is found at once, and one of few elements sooner or later. Only memory of the CPU is looked at.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from everstep.worker.saving.memory_image import Image

TENSORS_MAX = 64
BYTES = 64
"""A cache line: 64 of them are read in the time of some ten lines of Python."""
_STRIDE = 2_654_435_761
"""Knuth's multiplier, 2^32 ÷ the golden ratio: the places of consecutive samples lie far from each other."""
_PLAIN = (Tensor, torch.nn.Parameter)


class Sampler:
    """Takes samples of the tensors of one image; none costs more than the last."""

    def __init__(self) -> None:
        self._turn = 0

    def take(self, image: Image, tensors: Sequence[Tensor]) -> "Sample":
        """What some places hold now.

        Args:
            tensors: the live ones, for the first of the image's.
        """
        self._turn += 1
        parts: list[tuple[int, bytes]] = []
        every = -(-len(tensors) // TENSORS_MAX) or 1
        for number in range(self._turn % every, len(tensors), every):
            tensor = tensors[number]
            if type(tensor) not in _PLAIN or not tensor.is_cpu or not tensor.is_contiguous():
                continue
            begin, size_bytes = image.place_of(number)
            at = self._turn * _STRIDE % max(1, size_bytes - BYTES + 1)
            parts.append((begin + at, ctypes.string_at(tensor.data_ptr() + at, min(BYTES, size_bytes))))
        return Sample(image, parts)


class Sample:
    """Bytes, and where in the image their copies are."""

    def __init__(self, image: Image, parts: Sequence[tuple[int, bytes]]) -> None:
        self._image = image
        self._parts = parts

    def is_copied(self) -> bool:
        """Whether the image has the very same."""
        return all(self._image.bytes_at(at, len(part)) == part for at, part in self._parts)
