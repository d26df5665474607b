"""The samplers whose order of samples is one of the whole job, so that a loader can go on anywhere in it, on any ranks.

It counts in samples of the job; which batch a loader has handed out last is told by its caller.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from everstep.domain.errors import ConfigError
from everstep.worker.data.sampler import EpochSampler
from everstep.worker.data.seeded_dataset import SeededDataset


class GlobalOrder(Protocol):
    """A loader's order, as far as a position in it is concerned.

    Attributes:
        batch_size: samples in each batch of a rank, but for the last of an epoch.
        world_size: ranks that share the samples.
        cheap: whether every resume enters the order at its place; else only one with other ranks does.
    """

    batch_size: int
    world_size: int
    cheap: bool

    def enter(self, epoch: int, taken: int) -> None:
        """The next pass of the loader is the rest of this epoch after `taken` samples of the job."""

    def taken_after(self, start: int, batch_count: int) -> int:
        """How many samples of the epoch the job has had when each rank has had `batch_count` batches after `start`."""

    def facts(self) -> dict[str, Any]:
        """What the order depends on; `rule` names how it is made."""


def global_order_of(loader: Any) -> GlobalOrder | None:
    """The order of a loader with such a sampler and batches of one size; None for any other.

    Raises:
        ConfigError: the sampler is one for another data set.
    """
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    batch_size = 1
    if batches is not None:
        # A batch sampler of the script's may make batches of any size.
        if not (type(batches) is BatchSampler or _is_of_torchdata(batches)):
            return None
        batch_size, sampler = batches.batch_size, batches.sampler
    if isinstance(sampler, EpochSampler):
        return EpochOrder(sampler, batch_size, loader)
    whole = sampler.whole if type(sampler) is Rest else sampler
    if type(whole) is DistributedSampler and batches is not None:
        return DistributedOrder(whole, batches)
    return None


def seeds_each_sample(loader: Any) -> bool:
    """Whether what the data set draws depends on nothing but the sample and its epoch."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    seeded = isinstance(getattr(loader, "dataset", None), SeededDataset)
    return seeded and isinstance(sampler, EpochSampler) and sampler.carries_epochs


class EpochOrder:
    """The order of EpochSampler."""

    cheap = True

    def __init__(self, sampler: EpochSampler, batch_size: int, loader: Any) -> None:
        self.batch_size = batch_size
        self.world_size = sampler.num_replicas
        self._sampler = sampler
        if (length := len(loader.dataset)) != sampler.sample_count:
            raise ConfigError(
                f"EpochSampler was made for {sampler.sample_count} samples and the loader's data set has {length}; "
                "give both the same data set"
            )
        if isinstance(loader.dataset, SeededDataset):
            sampler.carries_epochs = True  # the script may have given it the data set inside of the wrapper

    def enter(self, epoch: int, taken: int) -> None:
        self._sampler.set_epoch(epoch, min(taken, self._sampler.sample_count))

    def taken_after(self, start: int, batch_count: int) -> int:
        per_rank = (self._sampler.sample_count - start) // self.world_size
        return start + min(batch_count * self.batch_size, per_rank) * self.world_size

    def facts(self) -> dict[str, Any]:
        sampler = self._sampler
        return {"rule": "epoch", "seed": sampler.seed, "shuffle": sampler.shuffle, "sample_count": sampler.sample_count}


class DistributedOrder:
    """The order of torch's DistributedSampler: W ranks take turns in it, so equal steps have taken its beginning."""

    cheap = False

    def __init__(self, sampler: "DistributedSampler[Any]", batches: BatchSampler) -> None:
        self.batch_size = batches.batch_size
        self.world_size = sampler.num_replicas
        self._sampler = sampler
        self._batches = batches

    def enter(self, epoch: int, taken: int) -> None:
        self._sampler.set_epoch(epoch)
        self._batches.sampler = Rest(self._sampler, taken) if taken else self._sampler

    def taken_after(self, start: int, batch_count: int) -> int:
        left = max(0, self._sample_count - start)
        per_rank = left // self.world_size if self._sampler.drop_last else -(-left // self.world_size)
        return start + min(batch_count * self.batch_size, per_rank) * self.world_size

    def facts(self) -> dict[str, Any]:
        sampler = self._sampler
        return {"rule": "torch", "seed": sampler.seed, "shuffle": sampler.shuffle, "sample_count": self._sample_count}

    @property
    def _sample_count(self) -> int:
        return len(self._sampler.dataset)  # type: ignore[arg-type]


class Rest(Sampler[int]):
    """The samples of a DistributedSampler's epoch after `taken`, divided among its ranks.

    What does not divide is left out or filled up from the beginning, as that sampler's `drop_last` says.

    Attributes:
        whole: that sampler.
    """

    def __init__(self, whole: "DistributedSampler[Any]", taken: int) -> None:
        self.whole = whole
        self._taken = taken

    def set_epoch(self, epoch: int) -> None:
        self.whole.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[int]:
        whole = self.whole
        alone: DistributedSampler[Any] = DistributedSampler(
            whole.dataset, num_replicas=1, rank=0, shuffle=whole.shuffle, seed=whole.seed
        )
        alone.set_epoch(whole.epoch)
        order = list(alone)
        rest = order[self._taken :]
        excess = len(rest) % whole.num_replicas
        if excess and whole.drop_last:
            del rest[-excess:]
        elif excess:
            rest += (order * whole.num_replicas)[: whole.num_replicas - excess]
        return iter(rest[whole.rank :: whole.num_replicas])


def _is_of_torchdata(batches: Any) -> bool:
    return isinstance(batches, BatchSampler) and type(batches).__module__.startswith("torchdata.")
