"""A data set whose chance belongs to the sample: what is drawn for it does not depend on who fetches it, or when.

It knows no order and no loader; the indices of EpochSampler bring the epoch along.
"""

import hashlib
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from everstep.domain.errors import ConfigError
from everstep.worker.data import randomness


class SampleIndex(int):
    """An index that carries the epoch it is drawn in, wherever a loader sends it.

    Attributes:
        course: what stands for seed and epoch, the same object for all indices of an epoch.
    """

    course: bytes

    def __new__(cls, index: int, course: bytes) -> "SampleIndex":
        self = super().__new__(cls, index)
        self.course = course
        return self

    def __reduce__(self) -> tuple[type["SampleIndex"], tuple[int, bytes]]:
        return SampleIndex, (int(self), self.course)

    def digest(self) -> bytes:
        """20 bytes that seed, epoch and index alone determine."""
        return hashlib.blake2b(struct.pack("<Q", self), key=self.course, digest_size=20).digest()


def course_of(seed: int, epoch: int) -> bytes:
    """What stands for seed and epoch in each index; both below 2**64."""
    return hashlib.blake2b(struct.pack("<QQ", seed, epoch), digest_size=16).digest()


class SeededDataset(Dataset[Any]):
    """The samples of `dataset`, each fetched with Python's, numpy's and torch's global generators seeded for it.

    They are seeded by (seed, epoch, index), so augmentation is the same in any worker, after any resume, and
    with any number of workers; another in every epoch. In the training process the generators are put back after a
    fetch. It must be the outermost wrapper, and the loader's sampler an EpochSampler: an index from elsewhere, like
    `data[5]`, is fetched as it would be without it. A data set that fetches whole batches (`__getitems__`) is seeded
    once per batch, by the first index. Generators that the data set made itself are not touched.

    Raises:
        ConfigError: `dataset` is not one that is asked by index.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"SeededDataset needs a data set that is asked by index, not a {type(dataset).__name__}; "
                "give it __getitem__ and __len__"
            )
        if isinstance(dataset, SeededDataset):
            raise ConfigError("SeededDataset is given a SeededDataset; wrap a data set once")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, SampleIndex):
            return self.dataset[index]
        with _undone():
            return self._seeded(index)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """A batch, as DataLoader asks for it."""
        fetches_batches = _fetches_batches(self.dataset)
        if not isinstance(indices[0], SampleIndex):
            return self.dataset.__getitems__(indices) if fetches_batches else [self.dataset[i] for i in indices]
        with _undone():
            if not fetches_batches:
                return [self._seeded(index) for index in indices]
            randomness.seed(indices[0].digest())
            return self.dataset.__getitems__([int(index) for index in indices])

    def _seeded(self, index: SampleIndex) -> Any:
        randomness.seed(index.digest())
        return self.dataset[int(index)]


def _undone() -> Any:
    """In the training process its own chance goes on as if nothing was fetched; a worker has no other use for it."""
    return randomness.kept() if get_worker_info() is None else nullcontext()


def _fetches_batches(dataset: Any) -> bool:
    if type(dataset) is Subset:  # it has the method, and asks the data set inside of it one by one if that has not
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))
