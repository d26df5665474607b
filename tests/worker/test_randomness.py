"""The global generators are put back where they were; a rank that nobody saved for gets a course of its own."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from everstep.worker.data import randomness


def drawn() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture
def saved() -> tuple[randomness.State, tuple[Any, ...]]:
    drawn()
    return randomness.capture_own(), drawn()


def test_a_rank_gets_its_own_back(saved: tuple[randomness.State, tuple[Any, ...]]) -> None:
    state, expected = saved
    drawn()
    randomness.put_back_own(state)
    assert drawn() == expected


def test_another_rank_draws_something_else_and_always_the_same(
    saved: tuple[randomness.State, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, of_rank_0 = saved
    courses = []
    for rank in (1, 2, 1):
        monkeypatch.setattr(randomness, "_rank", lambda rank=rank: rank)
        randomness.put_back_own(state)
        courses.append(drawn())
    assert courses[0] == courses[2]
    assert len({*of_rank_0, *courses[0], *courses[1]}) == 9


def test_what_is_drawn_inside_is_as_if_it_was_not(saved: tuple[randomness.State, tuple[Any, ...]]) -> None:
    state, expected = saved
    randomness.put_back_own(state)
    with randomness.kept():
        randomness.seed(bytes(20))
        drawn()
    assert drawn() == expected


def test_a_seed_decides_what_is_drawn() -> None:
    digests = [bytes(20), bytes(range(20)), bytes([255] * 20), bytes(20)]
    courses = [(randomness.seed(digest), drawn())[1] for digest in digests]
    assert courses[0] == courses[3]
    assert len({number for course in courses for number in course}) == 9
