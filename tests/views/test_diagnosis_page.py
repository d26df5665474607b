"""The page of a hang: a map of all ranks in which the culprit stands out, rows that fit, and the same as a table."""

from everstep.domain.diagnosis import HangVerdict, Waiting
from everstep.domain.ids import Rank
from everstep.domain.verdicts import Trouble
from everstep.views.diagnosis_html import diagnosis_html


def ranks(*numbers: int) -> tuple[Rank, ...]:
    return tuple(map(Rank, numbers))


def hang(count: int, *, trouble: Trouble = Trouble.NEVER_ENTERED) -> HangVerdict:
    """Rank 5 holds up its group of eight, and those all others; rank 9 left no dump."""
    group = ranks(0, 1, 2, 3, 4, 6, 7)
    rest = ranks(*(rank for rank in range(8, count) if rank != 9))
    return HangVerdict(
        trouble=trouble,
        ranks=ranks(5),
        reason="Rank 5 never entered <all_reduce>.",
        waits=(
            Waiting(waiting=group, operation="all_reduce of TP", missing=ranks(5), why="not entered"),
            Waiting(waiting=rest, operation="broadcast of WORLD", missing=ranks(4, 5), why="not entered"),
        ),
        silent=ranks(9),
        rank_count=count,
    )


def test_every_rank_has_its_place_on_the_map() -> None:
    page = diagnosis_html(hang(64))
    assert page.count('class="culprit"') == 2  # its cell, and the legend
    assert page.count('class="direct"') == 7 + 1
    assert page.count('class="silent"') == 1 + 1
    assert page.count('class="through"') == 64 - 9 + 1
    assert 'aria-label="map of 64 ranks: at fault 5; no dump of 9"' in page


def test_only_boxes_of_culprits_alone_are_marked_as_guilty() -> None:
    page = diagnosis_html(hang(64))
    assert page.count('class="guilty"') == 1
    assert "2 ranks, 5 among them" in page


def test_a_page_for_sixteen_thousand_ranks_stays_small_and_one_for_four_has_no_map() -> None:
    assert len(diagnosis_html(hang(16_384))) < 200_000
    assert "<h2>All ranks" not in diagnosis_html(hang(12))


def test_it_can_be_read_in_the_dark_without_colours_and_by_a_screen_reader() -> None:
    page = diagnosis_html(hang(64))
    assert "prefers-color-scheme:dark" in page
    assert "<details><summary>The same as a table" in page
    assert "&lt;all_reduce&gt;" in page


def test_a_job_that_does_not_hang_has_no_picture() -> None:
    assert "<svg" not in diagnosis_html(hang(64, trouble=Trouble.SLOW))
