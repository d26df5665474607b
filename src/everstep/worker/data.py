"""Where a run stands in its data: the epoch, the batches it has had of it, and the randomness the epoch began with.

It knows iterables, not models; the global random numbers of the checkpoint are put back by its caller, afterwards.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from everstep.domain.errors import ConfigError
from everstep.worker import randomness
from everstep.worker.state import plain


class Feed:
    """The batches of a loader, epoch after epoch.

    Args:
        loader: any iterable; one with `state_dict` and `load_state_dict` (StatefulDataLoader) keeps its own position.
        beat: called for each batch that a resume skips.
    """

    def __init__(self, loader: Iterable[Any], beat: Callable[[], None]) -> None:
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"run.steps() needs an iterable of batches, not a {type(loader).__name__}")
        self._loader: Any = loader
        self._beat = beat
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._generators = _generators_of(loader)
        self._epoch, self._consumed = 0, 0
        self._began: randomness.State = {}
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
            if self._consumed == 0:
                raise ConfigError(
                    f"the loader gave no batch in epoch {self._epoch}; give run.steps() one that can restart"
                )
            self._iterator, self._epoch = None, self._epoch + 1

    def position(self) -> dict[str, Any]:
        """The position after the last batch that `next` gave."""
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "began": self._began,
            "generators": [generator.get_state() for generator in self._generators],
            "loader": plain(self._loader.state_dict(), "the loader's state") if self._stateful else None,
            "traits": self._traits(),
        }

    def resume(self, position: dict[str, Any]) -> None:
        """Stand where `position` was taken.

        Raises:
            ConfigError: the loader cannot be that one any more.
        """
        if (position["loader"] is not None) != self._stateful or len(position["generators"]) != len(self._generators):
            raise ConfigError("the checkpoint was saved with another kind of loader; give run.steps() the same kind")
        self._epoch, self._began = position["epoch"], position["began"]
        if self._stateful:
            self._set_epoch()
            self._loader.load_state_dict(position["loader"])
            self._iterator = iter(self._loader)
        elif position["consumed"]:
            self._skip(position["consumed"])
        self._consumed = position["consumed"]
        for generator, state in zip(self._generators, position["generators"], strict=True):
            generator.set_state(state)

    def changes(self, position: dict[str, Any]) -> list[str]:
        """What about the loader is not as it was at `position`, and may give other batches."""
        then, now = position["traits"], self._traits()
        return [f"the loader's {key} was {then.get(key)} and is {now[key]}" for key in now if then.get(key) != now[key]]

    def _skip(self, count: int) -> None:
        """Begin the epoch as it began, and fetch again what it had given: a dataset may count or draw as it goes."""
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
        self._consumed = 0
        if not self._stateful:
            self._began = {
                "global": randomness.capture(devices=False),
                "generators": [generator.get_state() for generator in self._generators],
            }
        self._iterator = iter(self._loader)

    def _set_epoch(self) -> None:
        batches = getattr(self._loader, "batch_sampler", None)
        places = (getattr(self._loader, "sampler", None), getattr(batches, "sampler", None), batches, self._loader)
        for place in places:
            if callable(set_epoch := getattr(place, "set_epoch", None)):
                set_epoch(self._epoch)
                return

    def _traits(self) -> dict[str, Any]:
        traits = {key: getattr(self._loader, key, None) for key in ("batch_size", "num_workers", "persistent_workers")}
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
