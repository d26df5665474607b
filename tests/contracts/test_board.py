"""The board on which the hosts of a job leave each other addresses."""

import threading
import time

import pytest

from everstep.adapters.board import KEYS_MAX, LocalBoard
from everstep.domain.errors import WorldError
from everstep.ports import Board


@pytest.fixture
def boards() -> tuple[Board, Board]:
    """The board as two hosts see it."""
    board = LocalBoard()
    return board, board


def test_what_one_host_posts_another_reads(boards: tuple[Board, Board]) -> None:
    boards[0].post("store/1", b"10.0.0.1:4321")
    assert boards[1].read("store/1", within_s=5.0) == b"10.0.0.1:4321"
    assert boards[0].read("store/1", within_s=5.0) == b"10.0.0.1:4321"


def test_a_reader_waits_for_the_value(boards: tuple[Board, Board]) -> None:
    timer = threading.Timer(0.1, boards[0].post, ("late", b"x"))
    timer.start()
    started_s = time.monotonic()
    assert boards[1].read("late", within_s=30.0) == b"x"
    assert time.monotonic() - started_s < 10.0
    timer.join()


def test_a_value_that_nobody_posts_is_an_error_in_time(boards: tuple[Board, Board]) -> None:
    with pytest.raises(WorldError, match=r"'never' within 0\.05 s"):
        boards[1].read("never", within_s=0.05)


def test_the_newest_value_wins(boards: tuple[Board, Board]) -> None:
    boards[0].post("key", b"old")
    boards[0].post("key", b"new")
    assert boards[0].read("key", within_s=5.0) == b"new"


def test_a_board_forgets_the_oldest_beyond_its_limit() -> None:
    board = LocalBoard()
    for number in range(KEYS_MAX + 1):
        board.post(str(number), b"")
    with pytest.raises(WorldError):
        board.read("0", within_s=0.0)
    assert board.read("1", within_s=0.0) == b""
