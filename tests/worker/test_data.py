"""A feed stands again where it stood: at the exact sample, nothing fetched twice, on any ranks and loader workers."""

import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from everstep.domain.errors import ConfigError
from everstep.worker import EpochSampler, SeededDataset
from everstep.worker.data.feed import Feed
from everstep.worker.exactness import doubts_at_save


class Counting(Dataset):
    """Gives the index, and notes which were fetched."""

    def __init__(self, length: int) -> None:
        self.fetched: list[int] = []
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class Noisy(Dataset):
    """Index and augmentation from Python's, numpy's and torch's global generators."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Batched(Noisy):
    """Fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def nothing() -> None:
    """No beat."""


class Job:
    """The feeds of all ranks of a job, in one process."""

    def __init__(
        self,
        world: int,
        batch: int,
        data: Any,
        *,
        sampler: Any = EpochSampler,
        loader: Any = DataLoader,
        **options: Any,
    ) -> None:
        samplers = [sampler(data, num_replicas=world, rank=rank) for rank in range(world)]
        self.feeds = [Feed(loader(data, batch_size=batch, sampler=s, **options), nothing) for s in samplers]

    def resumed(self, positions: list[dict[str, Any]]) -> "Job":
        for rank, feed in enumerate(self.feeds):
            feed.resume(positions[rank] if len(positions) == len(self.feeds) else positions[0])
        return self

    def step(self) -> list[int]:
        """The samples of one step, in the order of the job."""
        batches = [feed.next().tolist() for feed in self.feeds]
        assert len({len(batch) for batch in batches}) == 1
        return [index for turn in zip(*batches, strict=True) for index in turn]

    def positions(self) -> list[dict[str, Any]]:
        return [feed.position() for feed in self.feeds]


@given(
    length=st.integers(16, 150),
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 8)), min_size=2, max_size=5),
    drop_last=st.booleans(),
)
@example(length=16, legs=[(2, 2, 2), (3, 3, 1), (1, 1, 1)], drop_last=True)
@settings(max_examples=60, deadline=None)
def test_any_ranks_and_batches_go_through_the_same_epochs(
    length: int, legs: list[tuple[int, int, int]], drop_last: bool
) -> None:
    """No sample comes twice in an epoch, and at its end less is left out than one step of the job takes."""
    epochs: dict[int, list[int]] = {}
    tolerated: dict[int, int] = {}  # by the last step in an epoch
    began: dict[int, int] = {}  # by the first one, for which the epoch before had too little left
    positions = None
    for world, batch_wanted, steps in legs:
        batch = min(batch_wanted, length // world)
        job = Job(world, batch, range(length), drop_last=drop_last)
        if positions:
            job.resumed(positions)
        for _ in range(steps):
            got = job.step()
            epoch = job.positions()[0]["epoch"]
            epochs.setdefault(epoch, []).extend(got)
            tolerated[epoch] = world * batch - 1 if drop_last else world - 1
            began.setdefault(epoch, tolerated[epoch])
        positions = job.positions()
        assert {position["taken"] for position in positions} == {len(epochs.get(positions[0]["epoch"], ()))}
    for epoch, got in epochs.items():
        whole = EpochSampler(range(length), num_replicas=1, rank=0)
        whole.set_epoch(epoch)
        assert got == list(whole)[: len(got)]
        if epoch < max(epochs):
            assert length - len(got) <= max(tolerated[epoch], began[epoch + 1])


def test_four_then_two_then_eight_ranks_fetch_each_sample_once() -> None:
    had: list[int] = []
    positions: list[dict[str, Any]] = []
    fetched: list[int] = []
    for world, batch, steps in ((4, 4, 3), (2, 8, 3), (8, 2, 4)):
        data = Counting(160)
        job = Job(world, batch, data)
        job = job.resumed(positions) if positions else job
        for _ in range(steps):
            had += job.step()
        positions, fetched = job.positions(), fetched + data.fetched
    assert sorted(had) == list(range(160))
    assert sorted(fetched) == sorted(had)


def test_augmentation_too_is_the_same_on_any_number_of_ranks() -> None:
    def batches(world: int, batch: int, steps: int, positions: list[dict[str, Any]]) -> tuple[list[Any], Job]:
        job = Job(world, batch, SeededDataset(Noisy()))
        job = job.resumed(positions) if positions else job
        return [tuple(row) for _ in range(steps) for row in job.step()], job

    expected, _ = batches(1, 16, 6, [])
    had: list[Any] = []
    positions: list[dict[str, Any]] = []
    for world, batch, steps in ((4, 4, 2), (2, 8, 3), (8, 2, 1)):
        got, job = batches(world, batch, steps, positions)
        had, positions = had + got, job.positions()
    assert had == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_fetched_ahead_does_not_count(workers: int) -> None:
    data = range(96)
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 4 if workers else None}
    whole, first = Job(1, 4, data), Job(1, 4, data, **options)
    expected = [whole.step() for _ in range(30)]
    assert [first.step() for _ in range(5)] == expected[:5]
    assert first.positions()[0]["taken"] == 20
    second = Job(1, 4, data, **options).resumed(first.positions())
    assert [second.step() for _ in range(25)] == expected[5:]


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    whole, first = Job(2, 4, range(16)), Job(2, 4, range(16))
    expected = [whole.step() for _ in range(4)]
    assert [first.step(), first.step()] == expected[:2]
    second = Job(2, 4, range(16)).resumed(first.positions())
    assert [second.step(), second.step()] == expected[2:]
    assert second.positions()[0]["epoch"] == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("then", "now"), [((4, 4), (2, 8)), ((2, 8), (3, 4)), ((1, 5), (4, 2))])
def test_a_distributed_sampler_goes_on_with_other_ranks_in_its_own_order(
    then: tuple[int, int], now: tuple[int, int], drop_last: bool
) -> None:
    length = 100

    def sampler(data: Any, **place: int) -> Any:
        return DistributedSampler(data, drop_last=drop_last, **place)

    one = DistributedSampler(range(length), num_replicas=1, rank=0)
    first = Job(*then, range(length), sampler=sampler, drop_last=True)
    had = [index for _ in range(3) for index in first.step()]
    data = Counting(length)
    second = Job(*now, data, sampler=sampler).resumed(first.positions())
    while second.positions()[0]["epoch"] == 0:
        if (got := second.step()) and second.positions()[0]["epoch"] == 0:
            had += got
    order = list(one)
    assert had[:length] == order[: len(had)]
    if drop_last:
        assert len(had) > length - now[0]
    else:
        assert len(had) >= length
        assert had[length:] == order[: len(had) - length]
    one.set_epoch(1)
    assert got == list(one)[: len(got)]


def test_a_distributed_sampler_that_went_on_with_other_ranks_is_resumed_again() -> None:
    first = Job(4, 2, range(96), sampler=DistributedSampler)
    had = first.step()
    for _ in range(3):
        first = Job(2, 2, range(96), sampler=DistributedSampler).resumed(first.positions())
        had += first.step() + first.step()
    assert had == list(DistributedSampler(range(96), num_replicas=1, rank=0))[: 8 + 24]


def loaders() -> dict[str, Any]:
    class Pairs(BatchSampler):
        """May do anything."""

    data = range(40)
    one = EpochSampler(data, num_replicas=2, rank=0)
    return {
        "a list": [torch.tensor([n]) for n in range(9)],
        "a shuffling loader": DataLoader(data, batch_size=2, shuffle=True),
        "batches of the script's own": DataLoader(data, batch_sampler=Pairs(one, 2, False)),
    }


@pytest.mark.parametrize("name", loaders())
def test_an_order_that_cannot_be_divided_anew_is_refused(name: str) -> None:
    feed = Feed(loaders()[name], nothing)
    feed.next()
    position = feed.position()
    Feed(loaders()[name], nothing).resume(position)
    with pytest.raises(ConfigError, match=r"saved by 4 ranks and this job has 1, .* start the job with 4"):
        Feed(loaders()[name], nothing).resume({**position, "world_size": 4})


def test_another_kind_of_sampler_is_refused() -> None:
    position = Job(1, 4, range(40)).positions()[0]
    with pytest.raises(ConfigError, match="another kind of loader"):
        Feed(DataLoader(range(40), batch_size=4, shuffle=True), nothing).resume(position)
    with pytest.raises(ConfigError, match="another kind of loader"):
        Job(1, 4, range(40), sampler=DistributedSampler).resumed([position])


def test_another_seed_length_or_batch_size_is_told() -> None:
    job = Job(1, 4, range(40))
    job.step()
    other = Feed(DataLoader(range(50), batch_size=5, sampler=EpochSampler(range(50), seed=1)), nothing)
    assert other.changes(job.positions()[0]) == [
        "the loader's batch of the whole job was 4 and is 5",
        "the sampler's seed was 0 and is 1",
        "the sampler's sample_count was 40 and is 50",
    ]


def test_a_sampler_for_another_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="made for 40 samples and the loader's data set has 30"):
        Feed(DataLoader(range(30), sampler=EpochSampler(range(40))), nothing)


@pytest.mark.parametrize("difference", [{"seed": 1}, {"shuffle": False}, {"length": 41}, {"batch": 3}, {}])
def test_a_rank_with_another_order_or_batch_than_rank_0_is_refused(difference: dict[str, Any]) -> None:
    def feed(*, length: int = 40, batch: int = 4, **options: Any) -> Feed:
        data = range(length)
        return Feed(DataLoader(data, batch, sampler=EpochSampler(data, **options)), nothing)

    words: list[int] = []
    feed().agree(lambda number: words.append(number()) or words[0])
    other = feed(**difference)
    if not difference:
        other.agree(lambda _: words[0])
        Feed([1], nothing).agree(lambda _: words[0])  # a pipeline stage that needs no data
        return
    with pytest.raises(ConfigError, match="another order here than on rank 0: this rank has seed="):
        other.agree(lambda _: words[0])


def test_batches_too_large_for_a_rank_are_told() -> None:
    with pytest.raises(ConfigError, match="no larger batches"):
        Job(4, 16, range(40), drop_last=True).step()


def seeded(workers: int, *, data: Any = None, **options: Any) -> Feed:
    wrapped = SeededDataset(data or Noisy())
    if workers:
        options = {"prefetch_factor": 3, **options}
    return Feed(DataLoader(wrapped, 4, sampler=EpochSampler(wrapped), num_workers=workers, **options), nothing)


def rows(feed: Feed, count: int) -> list[Any]:
    return [feed.next().tolist() for _ in range(count)]


@pytest.mark.parametrize("persistent", [False, True])
def test_augmentation_of_a_seeded_data_set_is_the_same_in_any_workers(persistent: bool) -> None:
    expected = rows(seeded(0), 30)
    assert len({tuple(row[1:]) for batch in expected for row in batch}) == 120  # another in each epoch
    first = seeded(2, persistent_workers=persistent)
    assert rows(first, 17) == expected[:17]
    for workers in (0, 1, 3):
        second = seeded(workers, persistent_workers=persistent and workers > 0)
        second.resume(first.position())
        assert rows(second, 13) == expected[17:]


def test_fetching_seeded_samples_leaves_the_training_process_its_chance() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = float(torch.rand(())), random.random(), float(np.random.rand())
    feed = seeded(0)
    feed.next()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    feed.next()
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == expected


def test_whole_batches_are_seeded_once_each() -> None:
    expected = rows(seeded(0, data=Batched()), 15)
    first = seeded(2, data=Batched())
    assert rows(first, 5) == expected[:5]
    second = seeded(1, data=Batched())
    second.resume(first.position())
    assert rows(second, 10) == expected[5:]


def test_a_subset_is_seeded_sample_by_sample_and_single_samples_too() -> None:
    expected = sorted(rows(seeded(0, data=Subset(Noisy(), range(48))), 12))
    by_sample = SeededDataset(Noisy())
    loader = DataLoader(by_sample, batch_size=None, sampler=EpochSampler(by_sample))
    singles = {tuple(row.tolist()) for row in loader}
    assert {tuple(row) for batch in expected for row in batch} == singles


def test_an_index_from_elsewhere_is_fetched_unseeded() -> None:
    assert SeededDataset(list(range(9)))[4] == 4
    assert SeededDataset(Noisy())[4].tolist() != SeededDataset(Noisy())[4].tolist()
    assert len(SeededDataset(Noisy())) == 48


def test_a_sampler_that_was_given_the_inner_data_set_is_told_of_the_wrapper() -> None:
    loader = DataLoader(SeededDataset(Noisy()), 4, sampler=EpochSampler(Noisy()))
    assert rows(Feed(loader, nothing), 3) == rows(seeded(0), 3)


def test_what_cannot_be_seeded_is_refused() -> None:
    for wrong, words in ((Stream(), "asked by index"), (3, "asked by index"), (SeededDataset([1]), "once")):
        with pytest.raises(ConfigError, match=words):
            SeededDataset(wrong)


def test_doubts_about_workers_are_told_only_where_there_are_any() -> None:
    data, wrapped = Noisy(), SeededDataset(Noisy())
    two = {"num_workers": 2}
    exact = [
        DataLoader(data, sampler=EpochSampler(data)),
        DataLoader(wrapped, sampler=EpochSampler(wrapped), **two),
        DataLoader(wrapped, sampler=EpochSampler(wrapped), persistent_workers=True, **two),
        DataLoader(data, shuffle=True, **two),
    ]
    assert [doubts_at_save(None, "auto", loader) for loader in exact] == [()] * 4
    doubtful = {
        "SeededDataset": DataLoader(data, sampler=EpochSampler(data), **two),
        "in_order=False": DataLoader(wrapped, sampler=EpochSampler(wrapped), in_order=False, **two),
        "first epoch only": DataLoader(wrapped, shuffle=True, persistent_workers=True, **two),
    }
    for words, loader in doubtful.items():
        [doubt] = doubts_at_save(None, "auto", loader)
        assert words in doubt


@pytest.mark.parametrize("batches", [3, 15])
def test_the_order_of_a_shuffling_loader_with_persistent_workers_comes_again(batches: int) -> None:
    def feed() -> Feed:
        return Feed(DataLoader(range(48), 4, shuffle=True, num_workers=1, persistent_workers=True), nothing)

    torch.manual_seed(4)
    first = feed()
    for _ in range(batches):
        first.next()
    position = first.position()
    expected = [first.next().tolist() for _ in range(5)]
    torch.manual_seed(5)
    second = feed()
    second.resume(position)
    assert [second.next().tolist() for _ in range(5)] == expected


@pytest.mark.parametrize("sampler", [EpochSampler, DistributedSampler])
def test_a_stateful_data_loader_goes_on_with_other_ranks(sampler: Any) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    data, had, positions = range(48), list[int](), []
    for world, steps in ((4, 1), (2, 3), (1, 2)):
        job = Job(world, 4, data, sampler=sampler, loader=stateful.StatefulDataLoader, num_workers=1)
        job = job.resumed(positions) if positions else job
        had += [index for _ in range(steps) for index in job.step()]
        positions = job.positions()
    assert had == list(sampler(data, num_replicas=1, rank=0))


KILLED = -9
TWO = {"kind": "ddp", "world": 2, "loader": "seeded", "num_workers": 2}


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        (TWO, [{"num_workers": 0}, {"num_workers": 4}]),
        ({**TWO, "persistent": True}, [{"num_workers": 1}]),
        ({**TWO, "loader": "ordered", "num_workers": 0}, [{}]),
    ],
    ids=["loader workers", "persistent workers", "no worker and nothing seeded"],
)
def test_a_job_killed_in_its_second_epoch_goes_on_bit_for_bit_with(
    spec: dict[str, Any], others: list[dict[str, Any]], lab: Any
) -> None:
    until = {"until": 14, "attach": {"save_every_steps": 7}}  # an epoch has 6 steps
    whole = lab.train("whole", **spec, **until, directory=str(lab.folder / "other"))
    lab.train("first", **spec, **until, die_at=9, code=KILLED)
    for number, other in enumerate(others):
        shutil.copytree(lab.directory, folder := lab.folder / f"copy{number}")
        resumed = lab.train(f"then{number}", **{**spec, **other}, **until, seed=99, directory=str(folder))
        assert lab.restored_step(f"then{number}") == 7
        assert resumed == [rank[7:] for rank in whole]
        assert "may not be bit-identical" not in lab.errors(f"then{number}")
