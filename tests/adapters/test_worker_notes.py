"""Notes of workers: whole lines once, half lines later, and nonsense never."""

from pathlib import Path

import pytest

from everstep.adapters.workers.progress_page import PageReader, PageWriter, create_page
from everstep.adapters.workers.roster import Roster, Worker
from everstep.adapters.workers.worker_notes import RosterPages
from everstep.domain.codec import to_json
from everstep.domain.events import CheckpointSaved, Event, WorkerReady
from everstep.domain.ids import Attempt, Rank
from everstep.domain.phases import Phase


def ready(rank: int, part: str = "imported") -> WorkerReady:
    return WorkerReady(at_s=1.0, attempt=Attempt(1), rank=Rank(rank), part=part, after_s=0.5)


def line(event: Event) -> bytes:
    return type(event).__name__.encode() + b" " + to_json(event) + b"\n"


@pytest.fixture
def roster(tmp_path: Path) -> Roster:
    """Two ranks with empty pages and no notes."""
    made = Roster()
    for number in (4, 5):
        page = tmp_path / f"{number}.page"
        create_page(page, rank=number, world_size=8, attempt=1)
        places = {name: tmp_path / f"{number}.{name}" for name in Worker.__annotations__}
        known = {
            "rank": Rank(number),
            "pid": 100 + number,
            "page": PageReader(page, to_run_s=lambda ns: ns / 1e9),
            "exit_code": None,
        }
        made.workers[Rank(number)] = Worker(**(places | known))  # type: ignore[arg-type]
    return made


def write(roster: Roster, rank: int, text: bytes) -> None:
    with roster.workers[Rank(rank)].notes.open("ab") as file:
        file.write(text)


def test_without_files_there_are_no_notes(roster: Roster) -> None:
    assert list(RosterPages(roster).notes()) == []


def test_each_note_is_told_once_rank_after_rank(roster: Roster) -> None:
    pages = RosterPages(roster)
    saved = CheckpointSaved(at_s=2.0, attempt=Attempt(1), step=9, path="c", size_bytes=1, duration_s=0.1)
    write(roster, 5, line(ready(5)))
    write(roster, 4, line(ready(4)) + line(saved))
    assert list(pages.notes()) == [ready(4), saved, ready(5)]
    assert list(pages.notes()) == []
    write(roster, 4, line(ready(4, "first_step")))
    assert list(pages.notes()) == [ready(4, "first_step")]


def test_half_a_line_waits_for_its_rest(roster: Roster) -> None:
    pages, text = RosterPages(roster), line(ready(4))
    for cut in range(1, len(text)):
        write(roster, 4, text[:cut])
        assert list(pages.notes()) == []
        write(roster, 4, text[cut:])
        assert list(pages.notes()) == [ready(4)], f"cut at byte {cut}"


@pytest.mark.parametrize(
    "nonsense",
    [b"\n", b"hello\n", b"WorkerReady\n", b"WorkerReady {}\n", b"WorkerReady [1]\n", b"Invented {}\n", b"\xff\0 {}\n"],
)
def test_a_line_that_makes_no_sense_is_left_out_and_hides_no_other(roster: Roster, nonsense: bytes) -> None:
    write(roster, 4, line(ready(4)) + nonsense + line(ready(4, "attached")))
    assert list(RosterPages(roster).notes()) == [ready(4), ready(4, "attached")]


def test_the_pages_of_all_ranks_are_seen(roster: Roster, tmp_path: Path) -> None:
    PageWriter(tmp_path / "5.page").finish_step(7)
    views = RosterPages(roster).views()
    assert [(view.rank, view.step, view.phase) for view in views] == [
        (4, 0, Phase.UNOBSERVED),
        (5, 7, Phase.TRAINING),
    ]
