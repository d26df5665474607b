"""The board on which the hosts of a job leave each other addresses."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contracts.hosts import center

from everstep.adapters.hosts.board import KEYS_MAX, LocalBoard
from everstep.domain.errors import WorldError
from everstep.ports import Board


@pytest.fixture(params=["one host", "two hosts", "two hosts, from the other"])
def boards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Board, Board]]:
    """The board as two hosts see it."""
    if request.param == "one host":
        board = LocalBoard()
        yield board, board
        return
    with center(tmp_path) as made:
        other = made.join()
        yield (made.board, other.board) if request.param == "two hosts" else (other.board, made.board)
        other.end.close()


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
    boards[0].post("after", b"")
    assert boards[1].read("after", within_s=5.0) == b""
    assert boards[1].read("key", within_s=5.0) == b"new"


def test_who_joins_later_reads_what_was_posted_before(tmp_path: Path) -> None:
    with center(tmp_path) as made:
        made.board.post("early", b"1")
        other = made.join()
        assert other.board.read("early", within_s=5.0) == b"1"
        other.end.close()


def test_without_the_coordinator_the_board_says_so_at_once(tmp_path: Path) -> None:
    with center(tmp_path) as made:
        other = made.join()
        other.board.post("mine", b"1")
        assert made.board.read("mine", within_s=5.0) == b"1"
    started_s = time.monotonic()
    with pytest.raises(WorldError, match="the coordinator is away"):
        other.board.read("never", within_s=30.0)
    with pytest.raises(WorldError, match="the coordinator is away"):
        other.board.post("mine", b"2")
    assert time.monotonic() - started_s < 10.0


def test_a_board_forgets_the_oldest_beyond_its_limit() -> None:
    board = LocalBoard()
    for number in range(KEYS_MAX + 1):
        board.post(str(number), b"")
    with pytest.raises(WorldError):
        board.read("0", within_s=0.0)
    assert board.read("1", within_s=0.0) == b""
