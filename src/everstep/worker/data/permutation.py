"""A shuffled order of any length that can be entered anywhere: place in, number out.

It knows numbers only, and no data set. Nothing here depends on the version of torch or on the machine: the order of a
checkpoint must be the order of the job that resumes from it.
"""

import hashlib
import math
import struct

import torch
from torch import Tensor

LENGTH_MAX = 1 << 60
_TABLE_LENGTH_MAX = 1 << 16  # as a table of half a megabyte; the network is for longer orders
_ROUNDS = 8
_BITS = 31  # of a half and of a hash, so that no product leaves 63 bits
_MASK = (1 << _BITS) - 1
_MULTIPLIERS = 0x7FEB352D, 0x31848BAB  # of Wellons' low-bias hashes of integers


class Permutation:
    """A permutation of the numbers below `length`, drawn by `seed` and `epoch`.

    A generalised Feistel network over a rectangle of at least `length` cells, its results walked on until they lie
    below `length` (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 5): no table, and the same
    time for every place. Orders of up to 65,536 numbers, for which a network gives too few of all permutations, are
    sorted by their images in a network over 2**62 cells.

    Args:
        length: 1 to LENGTH_MAX.
        seed: below 2**64, like `epoch`.
    """

    def __init__(self, *, length: int, seed: int, epoch: int) -> None:
        self._length = length
        keys = hashlib.shake_128(struct.pack("<QQQ", seed, epoch, length)).digest(_ROUNDS * 8)
        self._keys = [word & _MASK for word in struct.unpack(f"<{_ROUNDS * 2}I", keys)]
        self._table: Tensor | None = None
        if length <= _TABLE_LENGTH_MAX:
            self._rows = self._columns = 1 << _BITS
            self._table = torch.argsort(self._network(torch.arange(length)))
        else:
            self._rows = math.isqrt(length - 1) + 1
            self._columns = -(-length // self._rows)

    def at(self, places: Tensor) -> Tensor:
        """The numbers at these places.

        Args:
            places: int64, each at least 0 and below the length.
        """
        if self._table is not None:
            return self._table[places]
        numbers = self._network(places)
        while len(outside := (numbers >= self._length).nonzero().flatten()):
            numbers[outside] = self._network(numbers[outside])
        return numbers

    def _network(self, numbers: Tensor) -> Tensor:
        row = numbers // self._columns
        column = numbers - row * self._columns
        for number in range(0, _ROUNDS * 2, 4):
            row = _moved(row, self._rows, by=column, keys=self._keys[number : number + 2])
            column = _moved(column, self._columns, by=row, keys=self._keys[number + 2 : number + 4])
        return row * self._columns + column


def _moved(half: Tensor, count: int, *, by: Tensor, keys: list[int]) -> Tensor:
    """One half moved round its `count` cells by a keyed hash of the other half, which is below 2**31."""
    before, between = keys
    first, second = _MULTIPLIERS
    mixed = (by ^ before).mul_(first)
    mixed = mixed.bitwise_xor_(mixed >> 29).bitwise_and_(_MASK)
    mixed = mixed.bitwise_xor_(between).mul_(second)
    mixed = mixed.bitwise_xor_(mixed >> 31).bitwise_and_(_MASK)
    moved = (mixed.mul_(count) >> _BITS).add_(half)
    return moved.sub_((moved >= count) * count)
