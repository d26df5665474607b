"""What is captured can be put back, and what could not be read again is refused when it is saved."""

import copy
import enum
import random
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.domain.errors import ConfigError
from everstep.worker.data import randomness
from everstep.worker.data.feed import Feed, copy_of
from everstep.worker.state import TrainingState, compact, plain


class Colour(enum.Enum):
    RED = 1


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **extra: Any) -> TrainingState:
    return TrainingState(model=model, optimizer=optimizer, scheduler=None, extra=extra)


def test_importing_the_worker_package_loads_no_torch() -> None:
    script = "import sys, everstep.worker as w; w.phase('saving'); w.step(); sys.exit('torch' in sys.modules)"
    source = str(Path(__file__).parents[2] / "src")
    assert subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": source}, timeout=60).returncode == 0


def test_attach_is_found_again_after_its_module_is_loaded() -> None:
    from everstep.worker import attach, attachment

    assert attach is attachment.attach


def test_plain_values_keep_their_kinds_and_numpy_numbers_become_pythons() -> None:
    value = {"a": (1, [2.5, np.float64(0.1)]), "b": OrderedDict(c=Counter({3: 1})), "d": torch.float16, "e": {1, 2}}
    found = plain(value, "x")
    assert found == value
    assert type(found["a"][1][1]) is float
    assert [type(found["b"]), type(found["b"]["c"])] == [OrderedDict, Counter]


@pytest.mark.parametrize("value", [Colour.RED, lambda: 0, np.zeros(2), object()], ids=str)
def test_a_value_that_needs_code_to_be_read_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"extra\['x'\]\.deep\.0 is a "):
        plain({"deep": [value]}, "extra['x']")


def test_a_slice_of_something_large_is_saved_without_the_rest() -> None:
    large = torch.arange(1000.0)
    assert compact(large[3:5]).untyped_storage().nbytes() == 8
    assert compact(large).data_ptr() == large.data_ptr()


def test_every_generator_comes_back() -> None:
    state = randomness.capture()
    first = (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item())
    randomness.put_back(state)
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()) == first


def test_an_optimizers_state_of_higher_precision_than_its_parameter_is_not_rounded() -> None:
    model = nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = torch.rand(3, 3)
    optimizer.state[model.weight]["average"] = exact.clone()
    state = state_of(model, optimizer)
    parts = copy.deepcopy(state.capture(weights=True))
    optimizer.state[model.weight]["average"].zero_()
    state.put_back(parts, keep=False)
    assert torch.equal(optimizer.state[model.weight]["average"], exact)


def test_what_was_put_back_can_be_put_back_again_after_a_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    state = state_of(model, optimizer)

    def step() -> None:
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    step()
    saved = copy.deepcopy(state.capture(weights=True))
    for _ in range(2):
        state.put_back(saved, keep=True)
        step()
    state.put_back(saved, keep=False)
    found = state.capture(weights=True)
    assert str(found["weights"]) == str(saved["weights"])
    assert str(found["buffers"]) == str(saved["buffers"])


def test_a_buffer_that_the_forward_pass_makes_comes_back() -> None:
    model = nn.Linear(2, 2)
    state = state_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_buffer("cache", torch.ones(3), persistent=False)
    parts = copy.deepcopy(state.capture(weights=True))
    del model.cache
    state.put_back(parts, keep=False)
    assert torch.equal(model.cache, torch.ones(3))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": 3}, "needs a torch.nn.Module, not a int"),
        ({"optimizer": 3}, "needs a torch.optim.Optimizer, not a int"),
        ({"scheduler": 3}, r"attach\(scheduler\) has no state_dict"),
        ({"extra": {"ema": 3}}, r"extra\['ema'\]"),
    ],
)
def test_an_object_that_cannot_be_saved_is_refused(given: dict[str, Any], sentence: str) -> None:
    model = nn.Linear(1, 1)
    right = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "scheduler": None, "extra": {}}
    with pytest.raises(ConfigError, match=sentence):
        TrainingState(**{**right, **given})


def test_an_epoch_without_a_batch_is_an_error_and_not_an_endless_loop() -> None:
    feed = Feed(iter([1, 2]), lambda: None)
    assert [feed.next(), feed.next()] == [1, 2]
    with pytest.raises(ConfigError, match="no batch in epoch 1"):
        feed.next()


def test_fewer_batches_than_were_taken_is_an_error() -> None:
    feed = Feed([1, 2, 3], lambda: None)
    for _ in range(3):
        feed.next()
    with pytest.raises(ConfigError, match="gives 2 batches in epoch 0 and the checkpoint had taken 3"):
        Feed([1, 2], lambda: None).resume(feed.position())


def test_a_batch_of_another_size_is_named() -> None:
    loaders = [torch.utils.data.DataLoader(torch.arange(8), batch_size=size) for size in (2, 4)]
    position = Feed(loaders[0], lambda: None).position()
    assert Feed(loaders[1], lambda: None).changes(position) == ["the loader's batch_size was 2 and is 4"]


def test_a_batch_that_cannot_be_copied_is_given_as_it_is() -> None:
    batch = (number for number in [1])
    assert copy_of(batch) is batch
