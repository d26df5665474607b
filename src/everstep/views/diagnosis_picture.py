"""The two pictures of a hang as SVG: a map of all ranks, and who waits for whom. It knows no page and no style."""

from collections.abc import Collection, Iterator, Sequence
from html import escape

from everstep.domain.diagnosis import HangVerdict, Waiting
from everstep.domain.ids import Rank
from everstep.policy.wording import few_ranks

ROWS_MAX = 12
"""Rows of the waits-for picture; with more nobody sees the first ones."""
_ROW_PX, _WIDTH_PX, _BOX_PX, _BOX_HEIGHT_PX = 60, 1000, 310, 46
_TEXT_MAX, _OPERATION_MAX = 40, 44
_MAP_RANKS_MIN, _MAP_RANKS_MAX = 16, 1 << 17
_COLUMNS = ((128, 32), (2048, 64), (1 << 17, 256))
_MAP_PX = 1000
_KINDS = (
    ("culprit", "at fault"),
    ("suspect", "suspected"),
    ("direct", "waits for it"),
    ("through", "waits through others"),
    ("quiet", "not seen to wait"),
    ("silent", "no dump"),
)


def rank_map(verdict: HangVerdict) -> Iterator[str]:
    """One cell for each rank, by rows; nothing for a handful of ranks, or for more than fit a page."""
    count = verdict.rank_count
    if not _MAP_RANKS_MIN <= count <= _MAP_RANKS_MAX:
        return
    columns = next(width for most, width in _COLUMNS if count <= most)
    cell = min(22, _MAP_PX / columns)
    kinds = _kinds_of(verdict)
    rows = -(-count // columns)
    left, top, width = 56, 24, columns * cell
    yield (
        f'<svg class="map" width="{left + width:.0f}" height="{top + rows * cell + 6:.0f}" role="img" '
        f'viewBox="0 0 {left + width:.0f} {top + rows * cell + 6:.0f}" aria-label="{escape(_map_in_words(verdict))}">'
    )
    yield from _legend(set(kinds), left)
    labelled = max(1, -(-rows // 16))
    for row in range(rows):
        y = top + row * cell
        first = row * columns
        if row % labelled == 0:
            yield f'<text class="small" x="{left - 6}" y="{y + cell * 0.5 + 4:.1f}" text-anchor="end">{first}</text>'
        yield from _row_of_map(kinds[first : first + columns], first, left, y, cell)
    yield "</svg>"


def _row_of_map(kinds: Sequence[str], first: int, left: float, y: float, cell: float) -> Iterator[str]:
    """Neighbours of one kind share a rectangle, so that thousands of ranks stay a small file."""
    gap = 1 if cell >= 6 else 0
    place = 0
    while place < len(kinds):
        end = place + 1
        while end < len(kinds) and kinds[end] == kinds[place] and (cell < 6 or kinds[place] != "culprit"):
            end += 1
        span = f"{first + place}" if end == place + 1 else f"{first + place}-{first + end - 1}"
        for x in range(place, end) if gap else (place,):
            size = cell if gap else (end - place) * cell
            yield (
                f'<rect class="{kinds[place]}" x="{left + x * cell:.1f}" y="{y:.1f}" width="{size - gap:.1f}" '
                f'height="{cell - gap:.1f}"><title>{span}</title></rect>'
            )
        place = end


def _legend(present: Collection[str], left: int) -> Iterator[str]:
    x = left
    for kind, words in _KINDS:
        if kind in present:
            yield f'<rect class="{kind}" x="{x}" y="3" width="11" height="11"/>'
            yield f'<text class="small" x="{x + 16}" y="13">{words}</text>'
            x += 30 + 7 * len(words)


def _kinds_of(verdict: HangVerdict) -> list[str]:
    kinds = ["quiet"] * verdict.rank_count
    cause = {*verdict.ranks, *verdict.suspects}
    for arrow in verdict.waits:
        for rank in arrow.waiting:
            _put(kinds, rank, "through")
    for arrow in verdict.waits:
        if cause.issuperset(arrow.missing):
            for rank in arrow.waiting:
                _put(kinds, rank, "direct")
    for kind, ranks in (("silent", verdict.silent), ("suspect", verdict.suspects), ("culprit", verdict.ranks)):
        for rank in ranks:
            _put(kinds, rank, kind)
    return kinds


def _put(kinds: list[str], rank: Rank, kind: str) -> None:
    if 0 <= rank < len(kinds):
        kinds[rank] = kind


def _map_in_words(verdict: HangVerdict) -> str:
    named = f"at fault {few_ranks(verdict.ranks)}" if verdict.ranks else f"suspected {few_ranks(verdict.suspects)}"
    return f"map of {verdict.rank_count} ranks: {named}; no dump of {few_ranks(verdict.silent)}"


def waiting_picture(verdict: HangVerdict) -> Iterator[str]:
    """Rows of boxes and arrows, the cause first."""
    rows = verdict.waits[:ROWS_MAX]
    height = _ROW_PX * len(rows)
    yield (
        f'<svg viewBox="0 0 {_WIDTH_PX} {height}" role="img" aria-label="who waits for whom, as in the table below">'
        '<defs><marker id="head" markerWidth="9" markerHeight="7" refX="9" refY="3.5" orient="auto">'
        '<path d="M0,0 L9,3.5 L0,7 z"/></marker></defs>'
    )
    culprits = set(verdict.ranks)
    for number, arrow in enumerate(rows):
        yield from _row(arrow, number * _ROW_PX + 2, culprits)
    yield "</svg>"


def _row(arrow: Waiting, top: int, culprits: set[Rank]) -> Iterator[str]:
    middle, right, centre = top + _BOX_HEIGHT_PX // 2, _WIDTH_PX - _BOX_PX - 2, _WIDTH_PX // 2
    yield from _box(2, top, arrow.waiting, guilty=False)
    operation = escape(_cut(arrow.operation, _OPERATION_MAX))
    yield (
        f'<text x="{centre}" y="{middle - 6}" text-anchor="middle">{operation}</text>'
        f'<text class="small" x="{centre}" y="{middle + 15}" text-anchor="middle">{escape(arrow.why)}</text>'
        f'<path class="link" d="M{_BOX_PX + 6},{middle} L{right - 4},{middle}"/>'
    )
    if arrow.missing:
        among = culprits.intersection(arrow.missing)
        note = f", {few_ranks(among, 2)} among them" if among and len(among) < len(arrow.missing) else ""
        yield from _box(right, top, arrow.missing, guilty=culprits.issuperset(arrow.missing), note=note)
    else:
        yield f'<rect class="box" x="{right}" y="{top}" width="{_BOX_PX}" height="{_BOX_HEIGHT_PX}" rx="6"/>'
        yield f'<text x="{right + 10}" y="{middle + 5}">each other: all are inside</text>'


def _box(left: int, top: int, ranks: Sequence[Rank], *, guilty: bool, note: str = "") -> Iterator[str]:
    kind = "guilty" if guilty else "box"
    yield f'<rect class="{kind}" x="{left}" y="{top}" width="{_BOX_PX}" height="{_BOX_HEIGHT_PX}" rx="6"/>'
    words = _cut(f"{'rank' if len(ranks) == 1 else 'ranks'} {few_ranks(ranks, 99)}", _TEXT_MAX)
    lone = len(ranks) == 1 and not guilty
    yield f'<text x="{left + 10}" y="{top + (28 if lone else 20)}">{escape(words)}</text>'
    count = f"{len(ranks)} ranks{note}" if len(ranks) > 1 else "at fault" if guilty else ""
    yield f'<text class="small" x="{left + 10}" y="{top + 37}">{count}</text>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip(' ,')}…"
