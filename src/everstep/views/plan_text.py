"""A plan's report in plain lines and as JSON; the rows and words here are what the coloured form shows too.

It knows no terminal. Every figure stands beside its formula and source; a letter marks each input that was assumed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.planning.catalogue import ARITHMETIC, CATALOGUE, SECTIONS
from everstep.planning.inputs import Inputs
from everstep.planning.keys import KEYS
from everstep.planning.plan import Figure, PlanReport
from everstep.planning.quantities import unit_of
from everstep.views.report_text import counted

_TIMES = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3_600.0, "h"), (86_400.0, "days"))
_TIME_LIMITS_S = (1.0, 100.0, 5_400.0, 172_800.0)
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
LEVERS_SECTION = "What buys most"
_TELLING_SHARE = 0.0005
"""Gains below are shown as 0.0 points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """One input as it is told: `mark` is empty unless it was assumed."""

    key: str
    value: str
    mark: str
    source: str


def plan_lines(report: PlanReport, notes: Sequence[str] = ()) -> list[str]:
    """The whole report."""
    marks = assumption_marks(report)
    lines = [title(report), "", *headlines(report)]
    for section in SECTIONS:
        rows = section_rows(report, section, marks)
        if rows:
            lines += ["", section, *(f"  {line}" for line in _aligned(rows))]
    lines += ["", "Inputs (a letter: assumed, since nobody said it)"]
    lines += [f"  {line}" for line in _aligned([(r.mark, r.key, r.value, r.source) for r in input_rows(report, marks)])]
    lines += ["", "Where published figures disagree", *disagreements(report)]
    if notes:
        lines += ["", *(f"Note: {note}" for note in notes)]
    return lines


def title(report: PlanReport) -> str:
    inputs = report.inputs
    size = f"{counted(inputs.gpu_count, 'GPU')} on {counted(inputs.host_count, 'host')}"
    return f"{report.name}: {size}, {amount(inputs.run_days, 'days')}"


def headlines(report: PlanReport) -> list[str]:
    """The few sentences that answer the two questions of every plan."""
    effective, between = report.figure("effective_share"), report.figure("mtbf_s")
    lines = [f"Effective training time {_with_range(effective)}, a failure every {_with_range(between)}"]
    gains = [f for f in report.figures if f.entry.section == LEVERS_SECTION]
    most = max(gains, key=lambda figure: figure.value)
    budget = report.value("interruption_budget_s")
    loss = report.value("loss_per_interruption_s")
    if most.value >= _TELLING_SHARE:
        advice = f"{most.entry.title.capitalize()} would buy most: {points(most.value)}"
    else:
        advice = "No single one of these would buy much: half the failures, restart time or checkpoint pause"
    lines.append(
        f"An interruption costs {amount(loss, 's')} all in all; {percent(report.inputs.target_share)} allows "
        f"{amount(budget, 's')}. {advice}"
    )
    if report.confidence is not None:
        lines.append(f"(ranges: {report.confidence * 100:.0f} % confidence of the failure rate)")
    elif between.low is not None:
        lines.append("(ranges: those of published failure rates)")
    return lines


def section_rows(report: PlanReport, section: str, marks: Mapping[str, str]) -> list[tuple[str, str, str, str, str]]:
    """Rows of title, value, range, marks of assumed inputs, and formula with source."""
    figures = [figure for figure in report.figures if figure.entry.section == section]
    if section == LEVERS_SECTION:
        figures.sort(key=lambda figure: -figure.value)
    return [_figure_row(figure, marks) for figure in figures]


def _figure_row(figure: Figure, marks: Mapping[str, str]) -> tuple[str, str, str, str, str]:
    entry = figure.entry
    value = points(figure.value) if entry.section == LEVERS_SECTION else amount(figure.value, entry.unit)
    told = entry.formula if entry.source in {"", ARITHMETIC} else f"{entry.formula}  [{entry.source}]"
    return entry.title, value, range_of(figure), "".join(sorted(marks[key] for key in figure.assumed)), told


def assumption_marks(report: PlanReport) -> dict[str, str]:
    """A letter for every assumed input, in the order of the keys."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assumed = [key.name for key in KEYS if key.name in report.assumptions]
    return dict(zip(assumed, letters, strict=False))


def input_rows(report: PlanReport, marks: Mapping[str, str]) -> list[InputRow]:
    """Every input, with its value and where it comes from."""
    rows = []
    for key in KEYS:
        origin = report.inputs.origins.get(key.name)
        value = input_value(report.inputs, key.name)
        if origin is not None and value is not None:
            told = amount(value, _unit_of_key(key.name))
            rows.append(InputRow(key=key.name, value=told, mark=marks.get(key.name, ""), source=origin.source))
    return rows


def input_value(inputs: Inputs, key: str) -> float | None:
    """The value of a key, after what was assumed; the failure rate under the key of its unit."""
    if key == "failures_per_1000_host_days":
        return inputs.rate.per_1000_host_days
    value: float | None = getattr(inputs, key, None)
    return value


def disagreements(report: PlanReport) -> list[str]:
    """Where published figures contradict each other, and what is used."""
    lines = []
    for found in report.contradictions:
        lines += [f"  {found.claim}", f"    But {found.check} Used here: {found.used}."]
    return lines


def plan_json(report: PlanReport, notes: Sequence[str] = ()) -> str:
    """One JSON document; keys carry their units, and a value that has no bound is null."""
    return json.dumps(plan_document(report, notes), indent=2, ensure_ascii=False) + "\n"


def plan_document(report: PlanReport, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What `plan_json` writes."""
    return {
        "name": report.name,
        "confidence": report.confidence,
        "inputs": {
            key.name: {
                "value": _finite(input_value(report.inputs, key.name)),
                "source": report.inputs.origins[key.name].source,
                "assumed": report.inputs.origins[key.name].is_assumed,
            }
            for key in KEYS
            if key.name in report.inputs.origins
        },
        "figures": {
            figure.key: {
                "value": _finite(figure.value),
                "low": _finite(figure.low),
                "high": _finite(figure.high),
                "unit": figure.unit,
                "title": figure.entry.title,
                "section": figure.entry.section,
                "formula": figure.formula,
                "source": figure.source,
                "assumed": sorted(figure.assumed),
            }
            for figure in report.figures
        },
        "contradictions": [
            {"claim": found.claim, "check": found.check, "used": found.used} for found in report.contradictions
        ],
        "notes": list(notes),
    }


def compare_json(first: PlanReport, second: PlanReport) -> str:
    return json.dumps({"plans": [plan_document(first), plan_document(second)]}, indent=2, ensure_ascii=False) + "\n"


def compare_lines(first: PlanReport, second: PlanReport) -> list[str]:
    """Two plans side by side: the inputs that differ, then every figure that does."""
    lines = [title(first), title(second), ""]
    for name, rows in compare_sections(first, second):
        head = (name, first.name, second.name, "change")
        lines += [*_aligned([head, *rows], right={1, 2, 3}), ""]
    return lines[:-1]


def compare_sections(first: PlanReport, second: PlanReport) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Sections of rows (title, first, second, change); what is equal is left out."""
    inputs: list[tuple[str, ...]] = []
    for key in KEYS:
        values = [input_value(report.inputs, key.name) for report in (first, second)]
        if values[0] != values[1]:
            unit = _unit_of_key(key.name)
            inputs.append((key.name, *("–" if v is None else amount(v, unit) for v in values), ""))
    found = [("Inputs", inputs)] if inputs else []
    one, two = first.by_key, second.by_key
    for section in SECTIONS:
        rows = [
            _compare_row(entry.title, entry.unit, one.get(key), two.get(key))
            for key, entry in CATALOGUE.items()
            if entry.section == section and (key in one or key in two)
        ]
        rows = [row for row in rows if row[1] != row[2]]
        if rows:
            found.append((section, rows))
    return found


def _compare_row(name: str, unit: str, one: Figure | None, two: Figure | None) -> tuple[str, ...]:
    told = ["–" if figure is None else amount(figure.value, unit) for figure in (one, two)]
    if one is None or two is None:
        return name, told[0], told[1], ""
    if unit == "share":
        return name, told[0], told[1], points(two.value - one.value)
    change = f"{(two.value / one.value - 1.0) * 100:+.1f} %" if one.value and math.isfinite(two.value) else ""
    return name, told[0], told[1], change


def range_of(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    low, high = amount(figure.low, figure.unit), amount(figure.high, figure.unit)
    number, _, unit = low.partition(" ")
    if unit and high.endswith(f" {unit}"):  # the unit once is enough
        low, high = number, high if figure.unit in {"s", "share"} else high.removesuffix(f" {unit}")
    return f"({low} to {high})"


def _with_range(figure: Figure) -> str:
    return f"{amount(figure.value, figure.unit)} {range_of(figure)}".rstrip()


def amount(value: float, unit: str) -> str:
    """A value as people write it, with about three digits."""
    if math.isinf(value):
        return "never" if unit in {"s", "GPU-days"} else "∞"
    match unit:
        case "s":
            return _time(value)
        case "share":
            return percent(value)
        case "J":
            return f"{_scaled(value / 3_600.0)}Wh"
        case "W" | "W/s" | "FLOP/s":
            return f"{_scaled(value)}{unit}"
        case "bytes":
            return f"{_scaled(value)}B"
        case "bytes/s":
            return f"{_scaled(value)}B/s"
        case "FLOP":
            return f"{value:.3g} FLOP".replace("e+", "e")
        case "parameters" | "tokens" | "count" | "":
            return _count(value)
        case "hosts" | "failures" | "GPU-hours":
            return f"{_count(value)} {unit}"
        case "days" if _three(value) == "1":
            return "1 day"
        case _:
            return f"{_three(value)} {unit}"


def percent(share: float) -> str:
    """A share with as many digits as tell it from 100 %."""
    digits = 1 if share < 0.9995 else 2 if share < 0.99995 else 3
    return f"{share * 100:.{digits}f} %"


def points(share: float) -> str:
    return f"{share * 100:+.1f} points"


def _time(value_s: float) -> str:
    if value_s == 0:
        return "0 s"
    at = sum(abs(value_s) >= limit for limit in _TIME_LIMITS_S)
    factor, unit = _TIMES[at]
    return f"{_three(value_s / factor)} {unit}"


def _scaled(value: float) -> str:
    factor, prefix = next(((f, p) for f, p in _PREFIXES if abs(value) >= f), (1.0, ""))
    return f"{_three(value / factor)} {prefix}"


def _count(value: float) -> str:
    for factor, letter in _COUNTS:
        if abs(value) >= factor:
            return f"{_three(value / factor)}{letter}"
    return _three(value)


def _three(value: float) -> str:
    """Three digits, all of them before the point, and no zeros behind it."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.2g}"


def _unit_of_key(key: str) -> str:
    ending = unit_of(key)[0]
    if key == "failures_per_1000_host_days":
        return "per 1000 host-days"
    if key == "bytes_per_parameter":
        return "bytes"
    return {
        "_bytes_per_s": "bytes/s",
        "_w_per_s": "W/s",
        "_s": "s",
        "_days": "days",
        "_w": "W",
        "_share": "share",
        "flops": "FLOP/s",
        "_count": "count",
    }.get(ending, "")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _aligned(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] | set[int] = frozenset()) -> list[str]:
    """Rows as columns, two spaces apart; a column that is empty everywhere is left out."""
    columns = list(zip(*rows, strict=True))
    kept = [i for i, column in enumerate(columns) if any(column)]
    widths = {i: max(map(len, columns[i])) for i in kept}
    return [
        "  ".join(row[i].rjust(widths[i]) if i in right else row[i].ljust(widths[i]) for i in kept).rstrip()
        for row in rows
    ]
