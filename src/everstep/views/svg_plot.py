"""A small line plot as SVG text: axes, grid, lines with names, marks; it knows nothing of what it shows.

Colours are CSS classes (`line-0` …, `grid`, `axis`, `mark`), so that the page decides how they look.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 30, 16, 52
_TICKS = 6
_LEGEND_PX = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        name: with its unit.
        text: how a value of it is told.
        ticks: values with a line and a label; empty: chosen here.
    """

    name: str
    low: float
    high: float
    text: Callable[[float], str]
    is_logarithmic: bool = False
    ticks: tuple[float, ...] = ()

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.is_logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named line; `points` are (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line with words, such as "this plan"."""

    name: str
    x: float


def plot(
    title: str, *, x: Axis, y: Axis, lines: Sequence[Line], marks: Sequence[Mark] = (), legend_x: float = 0.0
) -> str:
    """The plot, scaled to its place in the page.

    Args:
        title: for screen readers.
        legend_x: where the names of the lines begin, as a share of the width.
    """
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
    ]
    parts += _grid(x, y)
    parts += [_mark(mark, x, at) for at, mark in enumerate(marks) if 0 <= x.place(mark.x) <= 1]
    parts += [_line(line, at, x, y) for at, line in enumerate(lines)]
    parts += _legend(lines, left=_LEFT + 10 + legend_x * (WIDTH - _LEFT - _RIGHT))
    return "\n".join([*parts, "</svg>"])


def _px(axis: Axis, value: float, *, is_x: bool) -> float:
    share = axis.place(value)
    if is_x:
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in ticks(y):
        at = _px(y, value, is_x=False)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(y.text(value))}</text>')
    for value in ticks(x):
        at = _px(x, value, is_x=True)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        below = HEIGHT - _BOTTOM + 18
        parts.append(f'<text x="{at:.1f}" y="{below}" text-anchor="middle">{escape(x.text(value))}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x.name)}</text>')
    aside = f"translate(14 {(_TOP + HEIGHT - _BOTTOM) / 2}) rotate(-90)"
    parts.append(f'<text class="name" transform="{aside}" text-anchor="middle">{escape(y.name)}</text>')
    return parts


def _line(line: Line, number: int, x: Axis, y: Axis) -> str:
    inside = [(a, min(max(b, y.low), y.high)) for a, b in line.points if math.isfinite(b)]
    drawn = " ".join(f"{_px(x, a, is_x=True):.1f},{_px(y, b, is_x=False):.1f}" for a, b in inside)
    return f'<polyline class="line line-{number}" points="{drawn}"><title>{escape(line.name)}</title></polyline>'


def _mark(mark: Mark, x: Axis, number: int) -> str:
    at = _px(x, mark.x, is_x=True)
    is_right = x.place(mark.x) > 0.75
    anchor, text_at = ("end", at - 6) if is_right else ("start", at + 6)
    height = _TOP + 14 + number * _LEGEND_PX
    return (
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        f'<text class="mark-name" x="{text_at:.1f}" y="{height}" text-anchor="{anchor}">{escape(mark.name)}</text>'
    )


def _legend(lines: Sequence[Line], *, left: float) -> list[str]:
    top = HEIGHT - _BOTTOM - 12 - (len(lines) - 1) * _LEGEND_PX
    parts = []
    for number, line in enumerate(lines):
        at = top + number * _LEGEND_PX
        parts.append(f'<line class="line line-{number}" x1="{left:.0f}" x2="{left + 24:.0f}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="legend" x="{left + 30:.0f}" y="{at + 4}">{escape(line.name)}</text>')
    return parts


def ticks(axis: Axis) -> list[float]:
    """Round values along an axis: decades of a long logarithmic one, else steps of 1, 2 or 5."""
    if axis.ticks:
        return [value for value in axis.ticks if axis.low <= value <= axis.high]
    if axis.is_logarithmic:
        first, last = math.ceil(math.log10(axis.low) - 1e-9), math.floor(math.log10(axis.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]
    rough = (axis.high - axis.low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(axis.low / step - 1e-9)
    return [number * step for number in range(first, math.floor(axis.high / step + 1e-9) + 1)]
