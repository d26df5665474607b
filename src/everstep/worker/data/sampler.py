"""The order in which a job goes through its data set: one for the whole job, each rank taking its part.

It knows neither loaders nor checkpoints; what a loader has handed out of it is counted in data.py.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Sampler

from everstep.domain.errors import ConfigError
from everstep.worker.data.permutation import LENGTH_MAX, Permutation
from everstep.worker.data.seeded_dataset import SampleIndex, SeededDataset, course_of

_BLOCK = 4096  # indices computed at a time: 0.3 ms, 70 ns each
_SEED_END = 1 << 64


class EpochSampler(Sampler[int]):
    """Every sample once per epoch, in an order that does not depend on the number of ranks.

    The order of an epoch is drawn by (seed, epoch, length of the data set) alone. Of each W samples that follow each
    other, each of W ranks takes one, so that after any number of equal steps the job has had the beginning of the
    order, and any other number of ranks can go on behind it. At the end of an epoch fewer than W samples are left out,
    so that all ranks get as many. `run.steps` sets epoch and position; a loop of the script's own calls `set_epoch`.

    Args:
        dataset: with a length, and the one that the loader gets.
        num_replicas: among how many the samples are divided; the ranks of the job, unless given. With tensor or
            pipeline parallelism it is the number of data parallel ranks.
        rank: which of them this one is; goes with num_replicas.
        seed: 0 to 2**64 - 1, the same on every rank.
        shuffle: False keeps the order of the data set; then the same last samples are left out in every epoch.

    Raises:
        ConfigError: what is given cannot be divided.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._length = _length_of(dataset)
        if type(seed) is not int or not 0 <= seed < _SEED_END:
            raise ConfigError(f"EpochSampler(seed={seed!r}) must be a whole number from 0 to 2**64 - 1")
        if (rank is None) != (num_replicas is None):
            raise ConfigError("EpochSampler takes rank and num_replicas together, or neither of them")
        if rank is None or num_replicas is None:
            rank, num_replicas = _place()
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ConfigError(
                f"EpochSampler: rank {rank} is not one of num_replicas={num_replicas}; ranks count from 0"
            )
        if self._length < num_replicas:
            raise ConfigError(
                f"EpochSampler has {self._length} samples for {num_replicas} ranks; each rank needs one at least"
            )
        self.num_replicas, self.rank, self.seed, self.shuffle = num_replicas, rank, seed, shuffle
        self._epoch = self._taken = 0
        self.carries_epochs = isinstance(dataset, SeededDataset)
        """Whether each index is a SampleIndex."""

    @property
    def epoch(self) -> int:
        """Which order comes next."""
        return self._epoch

    @property
    def sample_count(self) -> int:
        """The length of the data set."""
        return self._length

    def set_epoch(self, epoch: int, taken: int = 0) -> None:
        """What the next pass gives.

        Args:
            taken: samples of this epoch that all ranks together have had before.

        Raises:
            ConfigError: there is no such place.
        """
        if type(epoch) is not int or not 0 <= epoch < _SEED_END:
            raise ConfigError(f"EpochSampler.set_epoch({epoch!r}): epochs are whole numbers from 0 on")
        if type(taken) is not int or not 0 <= taken <= self._length:
            raise ConfigError(
                f"EpochSampler.set_epoch(taken={taken!r}) must be a whole number up to {self._length}, "
                "the length of the data set"
            )
        self._epoch, self._taken = epoch, taken

    def __len__(self) -> int:
        """The samples of this rank in a whole epoch."""
        return self._length // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return self._indices(self._epoch, self._taken)

    def _indices(self, epoch: int, taken: int) -> Iterator[int]:
        count = (self._length - taken) // self.num_replicas
        order = Permutation(length=self._length, seed=self.seed, epoch=epoch) if self.shuffle else None
        course = course_of(self.seed, epoch)
        for first in range(0, count, _BLOCK):
            turns = torch.arange(first, min(first + _BLOCK, count))
            places = turns * self.num_replicas + (taken + self.rank)
            block: list[int] = (order.at(places) if order is not None else places).tolist()
            if self.carries_epochs:
                for index in block:
                    yield SampleIndex(index, course)
            else:
                yield from block


def _length_of(dataset: Any) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"EpochSampler cannot order a {name}, which gives samples in an order of its own; "
            "use torchdata's StatefulDataLoader without a sampler"
        )
    try:
        length = len(dataset)
    except TypeError:
        raise ConfigError(f"EpochSampler needs a data set with a length and got {name}; give it __len__") from None
    if not 0 < length <= LENGTH_MAX:
        raise ConfigError(f"EpochSampler has no use for a data set of {length} samples; 1 to {LENGTH_MAX} will do")
    return length


def _place() -> tuple[int, int]:
    """Rank and number of ranks of this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"EpochSampler found no process group though WORLD_SIZE is {world}; call "
            "torch.distributed.init_process_group() before it, or give it rank and num_replicas"
        )
    return 0, 1
