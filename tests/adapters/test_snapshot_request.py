"""Asking a running job for evidence through a file: it is answered, refused, or nobody is there."""

import fcntl
import threading
from pathlib import Path

import pytest

from everstep.adapters.evidence.snapshot_request import answering, is_live, request_snapshot
from everstep.domain.errors import WorldError
from everstep.domain.ids import Attempt, IncidentId


def test_a_request_is_answered_with_two_snapshots_and_leaves_no_file(tmp_path: Path) -> None:
    taken: list[tuple[str, int, str]] = []

    def collect(*, attempt: Attempt, incident: IncidentId, snapshot: int) -> None:
        taken.append((incident, snapshot, threading.current_thread().name))

    with answering(tmp_path, collect):
        folder = request_snapshot(tmp_path)
    assert [(name, number) for name, number, _ in taken] == [(folder.name, 1), (folder.name, 2)]
    assert folder.parent == tmp_path / "evidence"
    assert not list((tmp_path / "requests").iterdir())
    assert not any(thread.name == "everstep-requests" for thread in threading.enumerate())


def test_workers_that_end_meanwhile_are_a_reason_and_no_crash(tmp_path: Path) -> None:
    def collect(*, attempt: Attempt, incident: IncidentId, snapshot: int) -> None:
        raise ValueError("mmap closed or invalid")

    with answering(tmp_path, collect):
        for _ in range(2):
            with pytest.raises(WorldError, match="mmap closed"):
                request_snapshot(tmp_path)


def test_nobody_answers_where_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="within 0"):
        request_snapshot(tmp_path, timeout_s=0.05)
    assert not list((tmp_path / "requests").iterdir())


def test_a_run_is_live_while_its_ledger_is_locked(tmp_path: Path) -> None:
    assert not is_live(tmp_path)
    with (tmp_path / "ledger.jsonl").open("w") as ledger:
        assert not is_live(tmp_path)
        fcntl.flock(ledger, fcntl.LOCK_EX)
        assert is_live(tmp_path)
    assert not is_live(tmp_path)
