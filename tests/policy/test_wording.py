"""Ranks, signals and lines read the same in every sentence."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.domain.evidence import Frame
from everstep.policy.wording import few_ranks, fold_ranks, name_ranks, name_signal, own_line


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "none"),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([5, 0, 2, 1], "0-2, 5"),
        ([7, 9, 11], "7, 9, 11"),
        (range(16384), "0-16383"),
    ],
)
def test_neighbouring_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert fold_ranks(ranks) == text


@given(ranks=st.sets(st.integers(0, 60)))
def test_folding_loses_no_rank(ranks: set[int]) -> None:
    unfolded: set[int] = set()
    for part in fold_ranks(ranks).split(", ") if ranks else []:
        first, _, last = part.partition("-")
        unfolded |= set(range(int(first), int(last or first) + 1))
    assert unfolded == ranks


@given(ranks=st.sets(st.integers(0, 60)))
def test_sentences_about_many_lose_no_rank_until_they_say_others(ranks: set[int]) -> None:
    unfolded: set[int] = set()
    for part in few_ranks(ranks, ranges_max=99).split(", ") if ranks else []:
        span, _, step = part.partition(" by ")
        first, _, last = span.partition("-")
        unfolded |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    assert unfolded == ranks


def test_sentences_about_thousands_stay_short() -> None:
    assert few_ranks(range(5, 62, 8)) == "5-61 by 8"
    assert few_ranks([7, 9, 11]) == "7, 9, 11"
    assert few_ranks([0, 1, 9, 17, 25, 33, 40]) == "0-1, 9-33 by 8, 40"
    assert few_ranks([n * n for n in range(99)], ranges_max=3) == "0-1, 4, 9 and others (99 ranks)"
    assert len(name_ranks([n * n for n in range(999)])) < 80


def test_one_rank_is_a_rank_and_several_are_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 4, 9]) == "ranks 3-4, 9"


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGINT", "SIGXFSZ"])
def test_signals_have_the_kernels_names_for_their_numbers(number: str) -> None:
    assert name_signal(signal.Signals[number]) == number


def test_an_unknown_signal_keeps_its_number() -> None:
    assert name_signal(61) == "signal 61"


def test_the_users_own_line_comes_before_a_librarys() -> None:
    library = [Frame(file=f"/v/{place}/x.py", line=1, function="f") for place in ("site-packages", "lib/python3.11")]
    frozen = Frame(file="<frozen runpy>", line=1, function="run")
    mine = Frame(file="/home/me/train.py", line=3, function="main")
    assert own_line([*library, frozen, mine, Frame(file="/home/me/run.py", line=9, function="x")]) == mine
    assert own_line(library) == library[0]
    assert own_line([]) is None
