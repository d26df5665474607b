"""A call to storage that does not return is told of while it lasts, and the rank that waits in it is seen to live."""

import json
import threading
import time
from pathlib import Path

import pytest

from everstep.adapters.workers.progress_page import PageReader, create_page
from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.errors import ConfigError
from everstep.worker.format.manifest import Manifest
from everstep.worker.observer import Observer
from everstep.worker.restoring import storage_listing
from everstep.worker.restoring.storage_listing import StorageListing
from everstep.worker.saving import storage_watch
from everstep.worker.saving.storage_watch import Answer, Patience, StorageWatch


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    page = tmp_path / "page"
    create_page(page, rank=0, world_size=1, attempt=3)
    return Observer(WorkerPaths(run="r", attempt=3, rank=0, page=str(page), notes=str(tmp_path / "notes")))


def told(folder: Path) -> list[dict[str, object]]:
    path = folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        json.loads(body) for kind, _, body in (line.partition(" ") for line in lines) if kind == "CheckpointDelayed"
    ]


def wait_for(folder: Path, count: int) -> list[dict[str, object]]:
    ends_s = time.monotonic() + 10
    while len(found := told(folder)) < count:
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    return found


def test_a_silence_is_told_of_once_and_again_when_it_has_lasted_six_times_longer() -> None:
    patience = Patience(10.0)
    assert [second for second in range(400) if patience.is_over(float(second))] == [10, 60, 360]
    assert not patience.is_over(0.0)
    assert patience.is_over(11.0)
    assert not Patience(10.0).is_over(25.0, usual_s=9.0)


def test_a_hanging_call_is_told_of_and_the_page_beats_meanwhile(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TELL_AFTER_S", 0.1), ("_BEAT_AFTER_S", 0.05), ("_POLL_S", 0.01)):
        monkeypatch.setattr(storage_watch, name, value)
    page = PageReader(tmp_path / "page", to_run_s=lambda ns: ns / 1e9)
    watch = StorageWatch(observer, rank=2)
    with watch.asking(40, attempt=3):
        [event] = wait_for(tmp_path, 1)
        before_s = page.view().changed_at_s
        ends_s = time.monotonic() + 10
        while page.view().changed_at_s == before_s:
            assert time.monotonic() < ends_s
    assert (event["step"], event["attempt"]) == (40, 3)
    assert "storage has not answered rank 2" in str(event["reason"])
    with watch.asking(41, attempt=3):
        watch.moved()
    assert len(told(tmp_path)) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "everstep-storage-watch"]


def test_a_disk_that_does_not_answer_is_left_out_where_memory_has_all_and_waited_for_where_it_has_not(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_listing, "_ROUND_S", 0.01)
    monkeypatch.setattr(storage_listing, "DISK_WITHIN_S", 0.05)
    answers = threading.Event()

    def look() -> list[Manifest]:
        answers.wait()
        return []

    listing = StorageListing(tmp_path, observer, 3)
    while (found := listing.ask(look, 70)) is None:
        pass
    assert found == []
    [event] = told(tmp_path)
    assert event["step"] == 70
    assert "resuming from memory" in str(event["reason"])
    listing = StorageListing(tmp_path, observer, 3)
    assert [listing.ask(look, None) for _ in range(10)] == [None] * 10
    answers.set()
    while listing.ask(look, None) is None:
        pass


def test_an_error_of_storage_comes_back_to_who_asked() -> None:
    def fail() -> int:
        raise OSError(5, "Input/output error")

    answer = Answer(fail, name="test")
    assert answer.is_there(5.0)
    with pytest.raises(OSError, match="Input/output error"):
        answer.get()


def test_a_disk_that_cannot_be_listed_ends_a_start_only_where_memory_cannot_do_without_it(
    observer: Observer, tmp_path: Path
) -> None:
    def look() -> list[Manifest]:
        raise OSError(5, "Input/output error")

    listing = StorageListing(tmp_path, observer, 3)
    assert listing.ask(look, 70) == []
    assert "Input/output error; resuming from memory" in str(wait_for(tmp_path, 1)[0]["reason"])
    with pytest.raises(ConfigError, match="cannot be listed: Input/output error"):
        listing.ask(look, None)
