"""Where a run stands in its data: the epoch, what it has had of it, and the randomness the epoch began with.

It knows iterables, not models; the global random numbers of the checkpoint are put back by its caller, afterwards.
"""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from everstep.domain.errors import ConfigError
from everstep.worker.data import randomness
from everstep.worker.data.global_order import global_order_of, seeds_each_sample
from everstep.worker.state import plain


class Feed:
    """The batches of a loader, epoch after epoch.

    Where the loader's order is one of the whole job (EpochSampler), a position is a number of samples of the job, and a
    resume goes on there without fetching anything twice, with any number of ranks. Any other loader fetches again what
    it had given.

    Args:
        loader: any iterable; one with `state_dict` and `load_state_dict` (StatefulDataLoader) keeps its own position.
        beat: called for each batch that a resume fetches again.
    """

    def __init__(self, loader: Iterable[Any], beat: Callable[[], None]) -> None:
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"run.steps() needs an iterable of batches, not a {type(loader).__name__}")
        self._loader: Any = loader
        self._beat = beat
        self._order = global_order_of(loader)
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not self._enters
        self._generators = _generators_of(loader)
        self._epoch, self._consumed = 0, 0
        self._start = 0  # samples of the job in this epoch that came before the batches consumed
        self._began: randomness.State = {}
        self._has_passed = False
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch, of the next epoch where this one is over.

        Raises:
            ConfigError: an epoch without a batch.
        """
        while True:
            if self._iterator is None:
                self._begin_epoch()
            assert self._iterator is not None
            for batch in self._iterator:
                self._consumed += 1
                return batch
            if self._consumed == self._start == 0:
                raise ConfigError(
                    f"the loader gave no batch in epoch {self._epoch}; give run.steps() one that can restart, "
                    "and no larger batches than each rank has samples"
                )
            self._iterator, self._epoch = None, self._epoch + 1

    def position(self) -> dict[str, Any]:
        """The position after the last batch that `next` gave; what a loader has fetched ahead does not count."""
        order = self._order
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "start": self._start,
            "taken": order.taken_after(self._start, self._consumed) if order else None,
            "order": order.facts() if order else None,
            "world_size": self._world_size,
            "began": self._began,
            "generators": [generator.get_state() for generator in self._generators],
            "loader": plain(self._loader.state_dict(), "the loader's state") if self._stateful else None,
            "traits": self._traits(),
        }

    def agree(self, word_of_rank_0: Callable[[Callable[[], int]], int]) -> None:
        """Make sure that all ranks take turns in one order. A collective.

        Args:
            word_of_rank_0: gives rank 0's number on every rank.

        Raises:
            ConfigError: this rank has another order than rank 0, or other batches.
        """
        facts = {**self._order.facts(), "batch_size": self._order.batch_size} if self._order and self._enters else {}
        own = zlib.crc32(repr(facts).encode()) if facts else 0
        lead = word_of_rank_0(lambda: own)
        if lead and own and lead != own:
            told = ", ".join(f"{key}={facts[key]}" for key in ("seed", "shuffle", "sample_count", "batch_size"))
            raise ConfigError(
                f"EpochSampler goes through another order here than on rank 0: this rank has {told}; "
                "give all ranks the same data set, seed, shuffle and batch_size"
            )

    def resume(self, position: dict[str, Any]) -> None:
        """Stand where `position` was taken, by any rank of a job with any number of them.

        Raises:
            ConfigError: the loader cannot be that one any more.
        """
        self._refuse_misfit(position)
        self._epoch, self._began = position["epoch"], position["began"]
        if self._order and (self._enters or position["start"] or position["world_size"] != self._world_size):
            self._start = position["taken"]
            if self._start:
                self._order.enter(self._epoch, self._start)
                self._iterator = iter(self._loader)
        else:
            if self._stateful:
                self._set_epoch()
                self._loader.load_state_dict(position["loader"])
                self._iterator = iter(self._loader)
            elif position["consumed"]:
                self._skip(position["consumed"])
            self._consumed = position["consumed"]
        self._has_passed = self._iterator is not None
        for generator, state in zip(self._generators, position["generators"], strict=True):
            generator.set_state(state)

    def changes(self, position: dict[str, Any]) -> list[str]:
        """What about the loader is not as it was at `position`, and may give other batches."""
        then, now = position["traits"], self._traits()
        found = [
            f"the loader's {key} was {then.get(key)} and is {now[key]}" for key in now if then.get(key) != now[key]
        ]
        if self._order:
            then, now = position["order"], self._order.facts()
            found += [f"the sampler's {key} was {then[key]} and is {now[key]}" for key in now if then[key] != now[key]]
            if self._start and not self._enters and getattr(self._loader, "num_workers", 0):
                found.append("what the data set draws in the loader's workers, if anything, is not repeated")
        return found

    @property
    def _enters(self) -> bool:
        return self._order is not None and self._order.cheap

    @property
    def _world_size(self) -> int:
        if self._order:
            return self._order.world_size
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def _refuse_misfit(self, position: dict[str, Any]) -> None:
        rule = self._order.facts()["rule"] if self._order else None
        kept_its_own, saved_rule = position["loader"] is not None, (position["order"] or {}).get("rule")
        generators = len(position["generators"])
        if kept_its_own != self._stateful or saved_rule != rule or generators != len(self._generators):
            raise ConfigError("the checkpoint was saved with another kind of loader; give run.steps() the same kind")
        if position["world_size"] != self._world_size and not self._order:
            raise ConfigError(
                f"the checkpoint was saved by {position['world_size']} ranks and this job has {self._world_size}, and "
                "the order of this loader cannot be divided anew as EpochSampler's can; start the job with "
                f"{position['world_size']}, or give attach() another directory"
            )

    def _skip(self, count: int) -> None:
        """Begin the epoch as it began, and fetch again what it had given: a dataset may count or draw as it goes."""
        if self._began["again"]:
            iter(self._loader)  # persistent workers are made, and draw, in the first pass only
        self._set_epoch()
        randomness.put_back(self._began["global"])
        for generator, state in zip(self._generators, self._began["generators"], strict=True):
            generator.set_state(state)
        self._iterator = iter(self._loader)
        for number in range(count):
            if next(self._iterator, _END) is _END:
                raise ConfigError(
                    f"the loader gives {number} batches in epoch {self._epoch} and the checkpoint had taken {count}; "
                    "restore the old data and batch size, or give attach() another directory"
                )
            self._beat()

    def _begin_epoch(self) -> None:
        self._set_epoch()
        self._consumed = self._start = 0
        if not self._stateful and not self._enters:
            self._began = {
                "global": randomness.capture(devices=False),
                "generators": [generator.get_state() for generator in self._generators],
                "again": self._has_passed and bool(getattr(self._loader, "persistent_workers", False)),
            }
        self._iterator = iter(self._loader)
        self._has_passed = True

    def _set_epoch(self) -> None:
        if self._order:
            self._order.enter(self._epoch, 0)
            return
        batches = getattr(self._loader, "batch_sampler", None)
        places = (getattr(self._loader, "sampler", None), getattr(batches, "sampler", None), batches, self._loader)
        for place in places:
            if callable(set_epoch := getattr(place, "set_epoch", None)):
                set_epoch(self._epoch)
                return

    def _traits(self) -> dict[str, Any]:
        loader = self._loader
        seeded = seeds_each_sample(loader)
        keys = ["persistent_workers"] if self._order else ["batch_size", "persistent_workers"]
        if not seeded or getattr(loader, "collate_fn", None) is not default_collate:
            keys.append("num_workers")  # else a batch is the same wherever it is made
        traits = {key: getattr(loader, key, None) for key in keys} | {"seeding per sample": seeded}
        if self._order:
            traits["batch of the whole job"] = self._order.batch_size * self._order.world_size
        return {key: value for key, value in traits.items() if isinstance(value, int)}


_END = object()


def copy_of(batch: Any) -> Any:
    """A copy that the script may change; the batch itself where it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except (TypeError, RuntimeError, copy.Error):
        return batch


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that the script gave to its loader and samplers, each once."""
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(place, "generator", None) for place in places)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
