"""The order of a job's samples: the same for any number of ranks, a true shuffle, entered anywhere at no cost."""

import math
import random
import time
from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from everstep.domain.errors import ConfigError
from everstep.worker import EpochSampler
from everstep.worker.data.permutation import LENGTH_MAX, Permutation


def indices(length: int, rank: int = 0, world: int = 1, *, epoch: int = 0, taken: int = 0, **options: Any) -> list[int]:
    sampler = EpochSampler(range(length), num_replicas=world, rank=rank, **options)
    sampler.set_epoch(epoch, taken)
    return list(sampler)


def job(length: int, world: int, **options: Any) -> list[int]:
    """What all ranks get, turn by turn."""
    ranks = [indices(length, rank, world, **options) for rank in range(world)]
    return [index for turn in zip(*ranks, strict=True) for index in turn]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_sample_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(indices(length, seed=seed, epoch=epoch)) == list(range(length))


@pytest.mark.parametrize("length", [2**16, 2**16 + 1, 70_001, 2**18, 299_999])
def test_an_epoch_has_every_sample_once_also_beyond_a_table(length: int) -> None:
    assert sorted(indices(length, epoch=3)) == list(range(length))


@given(st.integers(2**16 + 1, LENGTH_MAX), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_places_of_any_long_order_hold_samples_of_their_own(length: int, epoch: int) -> None:
    spread = torch.arange(0, length - 600, (length - 600) // 300)[:300]
    places = torch.cat([torch.arange(300), spread[spread >= 300], torch.arange(length - 300, length)])
    numbers = Permutation(length=length, seed=2, epoch=epoch).at(places)
    assert len(set(numbers.tolist())) == len(places)
    assert 0 <= int(numbers.min()) <= int(numbers.max()) < length


@given(length=st.integers(20, 400), worlds=st.lists(st.integers(1, 12), min_size=1, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_world_sizes_goes_through_one_order(
    length: int, worlds: list[int], data: st.DataObject
) -> None:
    whole, had = indices(length, epoch=2), list[int]()
    for world in worlds:
        rest = job(length, world, epoch=2, taken=len(had))
        assert len(had) + len(rest) > length - world
        had += rest[: world * data.draw(st.integers(0, len(rest) // world))]
    had += job(length, 1, epoch=2, taken=len(had))
    assert had == whole


def test_orders_differ_by_seed_epoch_and_length() -> None:
    orders = [indices(50), indices(50, epoch=1), indices(50, seed=1), indices(51)[:50]]
    assert len({tuple(order) for order in orders}) == 4
    assert indices(6, shuffle=False, epoch=4) == [0, 1, 2, 3, 4, 5]
    assert indices(7, 1, 2, shuffle=False) == [1, 3, 5]


def test_the_order_is_the_one_of_every_earlier_version() -> None:
    assert indices(10) == [4, 9, 7, 5, 1, 6, 0, 3, 8, 2]
    places = torch.tensor([0, 1, 2, 500_000_000, 999_999_999])
    assert Permutation(length=10**9, seed=7, epoch=3).at(places).tolist() == [
        258698132,
        81193964,
        192762065,
        642159506,
        587402998,
    ]


def deviation(observed: torch.Tensor, expected: float, freedom: int) -> float:
    """Chi squared in its own standard deviations."""
    chi = float(((observed.double() - expected) ** 2 / expected).sum())
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_over_many_epochs_every_permutation_comes_equally_often(length: int) -> None:
    count = 1500
    seen = Counter(tuple(indices(length, epoch=epoch)) for epoch in range(count))
    every = torch.tensor([seen[order] for order in permutations(range(length))])
    assert abs(deviation(every, count / len(every), len(every) - 1)) < 4


@pytest.mark.parametrize("length", [1000, 65_536, 65_537, 300_000])
def test_neighbours_places_and_epochs_have_nothing_to_do_with_each_other(length: int) -> None:
    orders = [Permutation(length=length, seed=5, epoch=e).at(torch.arange(length)).double() for e in range(3)]
    first, second, third = ((order - order.mean()) / order.std() for order in orders)
    place = torch.arange(length).double()
    place = (place - place.mean()) / place.std()
    pairs = [(first, second), (second, third), (first, place), *((first[lag:], first[:-lag]) for lag in (1, 8, 256))]
    for one, other in pairs:
        assert abs(float((one * other).mean())) * math.sqrt(length) < 4
    blocks = (orders[0] * 20 / length).long()
    follows = torch.bincount(blocks[:-1] * 20 + blocks[1:], minlength=400)
    assert abs(deviation(follows, (length - 1) / 400, 399)) < 4


def test_a_billion_samples_are_entered_in_the_middle_at_once() -> None:
    sampler = EpochSampler(range(10**9), num_replicas=16, rank=3)
    sampler.set_epoch(5, taken=500_000_000)
    started_s = time.perf_counter()
    first = [index for index, _ in zip(sampler, range(64), strict=False)]
    assert time.perf_counter() - started_s < 1
    assert len(set(first)) == 64


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number": (100, {}, "needs a data set with a length and got int"),
    "a stream": (Stream(), {}, "use torchdata's StatefulDataLoader"),
    "an empty data set": ([], {}, "data set of 0 samples"),
    "fewer samples than ranks": ([1, 2], {"rank": 0, "num_replicas": 3}, "2 samples for 3 ranks"),
    "a rank alone": ([1, 2], {"rank": 0}, "together"),
    "a rank too high": ([1, 2], {"rank": 2, "num_replicas": 2}, "ranks count from 0"),
    "a seed below zero": ([1, 2], {"seed": -1}, "must be a whole number from 0"),
    "a broken seed": ([1, 2], {"seed": 1.5}, "must be a whole number from 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence_for(case: str) -> None:
    dataset, options, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        EpochSampler(dataset, **options)


def test_a_place_that_is_none_is_refused() -> None:
    sampler = EpochSampler(range(5))
    for place in ((-1, 0), (0, 6), (0, -1), (1.5, 0), (0, None)):
        with pytest.raises(ConfigError, match="set_epoch"):
            sampler.set_epoch(*place)  # type: ignore[arg-type]


def test_ranks_without_a_process_group_are_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="init_process_group"):
        EpochSampler(range(8))


def test_an_order_draws_nothing_from_the_global_generators() -> None:
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    indices(100)
    indices(70_000)
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
