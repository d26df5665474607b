"""The `Ledger` port, on disk and in memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.adapters.ledger_file import LedgerFile
from everstep.domain.commands import FinishJob
from everstep.domain.errors import ExitCode
from everstep.domain.events import StopRequested
from everstep.ports import Ledger
from everstep.sim.ledger import MemoryLedger

END = FinishJob(at_s=9.0, exit_code=ExitCode.DONE, rung=None, summary="x")
Open = Callable[[], Ledger]
"""Opens the same ledger again, as a new coordinator would."""


def asked(number: int) -> StopRequested:
    return StopRequested(at_s=float(number), by="test")


def on_disk(folder: Path) -> Open:
    opened: list[LedgerFile] = []

    def again() -> Ledger:
        for ledger in opened:
            ledger.close()
        opened.append(LedgerFile(folder))
        return opened[-1]

    return again


def in_memory(folder: Path) -> Open:
    opened: list[MemoryLedger] = []

    def again() -> Ledger:
        opened.append(MemoryLedger(opened[-1].entries if opened else ()))
        return opened[-1]

    return again


@pytest.fixture(params=[on_disk, in_memory])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return request.param(tmp_path)  # type: ignore[no-any-return]


def test_a_new_ledger_is_empty(again: Open) -> None:
    assert list(again().read()) == []


def test_what_was_appended_is_there_for_the_next_in_order_and_numbered_from_one(again: Open) -> None:
    ledger = again()
    ledger.append([asked(1), asked(2)], wall="w1", durable=False)
    ledger.append([], wall="w2", durable=True)
    ledger.append([END], wall="w3", durable=True)
    entries = list(again().read())
    assert [(entry.number, entry.wall, entry.body) for entry in entries] == [
        (1, "w1", asked(1)),
        (2, "w1", asked(2)),
        (3, "w3", END),
    ]


def test_what_is_read_is_what_was_there_when_it_was_opened(again: Open) -> None:
    first = again()
    first.append([asked(1)], wall="w", durable=True)
    assert list(first.read()) == []
    second = again()
    second.append([asked(2)], wall="w", durable=True)
    assert [entry.body for entry in second.read()] == [asked(1)]
    assert [entry.number for entry in again().read()] == [1, 2]
