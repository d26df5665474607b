"""A simulation as one HTML page without scripts or outside files: the table, and a plot of where the time went."""

from collections.abc import Sequence
from html import escape

from everstep.cli.simulate_text import HEAD, NOTE, shares_of, table_row
from everstep.policy.accounting import Category
from everstep.sim.montecarlo import Summary, cause_table

_COLOURS = {
    Category.REPLAYED: "#c0392b",
    Category.SLOW: "#f1c40f",
    Category.CHECKPOINT: "#2980b9",
    Category.DETECTION: "#e67e22",
    Category.DIAGNOSIS: "#d35400",
    Category.TEARDOWN: "#8e44ad",
    Category.WAITING: "#7f8c8d",
    Category.STARTING: "#16a085",
    Category.RESTORING: "#1abc9c",
    Category.WARMING_UP: "#f39c12",
    Category.MAINTENANCE: "#9b59b6",
    Category.IDLE: "#bdc3c7",
}
_WIDTH, _ROW, _LEFT = 900, 30, 260
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:960px;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.3em .7em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}p.note{color:#666}"
)


def simulation_html(rows: Sequence[Summary]) -> str:
    """The page."""
    one = rows[0].scenario
    causes = [("cause", "per run", "share", "Llama 3")] + [
        (
            cause.component,
            f"{cause.mean_count:.1f}",
            f"{100 * cause.share:.1f} %",
            "-" if cause.llama3_count is None else str(cause.llama3_count),
        )
        for cause in cause_table(rows[0].outcomes)
    ]
    delays = [("scenario", "delay", "mean", "origin", "source")] + [
        (row.label, name, f"{delay.mean_s:.3g} s", delay.origin.value, delay.source)
        for row in rows
        for name, delay in row.scenario.delays.of()
    ]
    return "\n".join(
        [
            "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>everstep simulate</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>Simulated: {one.gpus:,} GPUs for {one.days:.4g} days</h1>",
            f"<p class='note'>{escape(NOTE)} {rows[0].seed_count} seed(s).</p>",
            _table([HEAD, *(table_row(row) for row in rows)]),
            "<h2>Lost time, of all time</h2>",
            lost_time_svg(rows),
            "<h2>Unexpected interruptions</h2>",
            _table(causes),
            "<h2>Where the delays come from</h2>",
            _table(delays),
            "</body></html>",
            "",
        ]
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return "\n".join([*lines, "</table>"])


def lost_time_svg(rows: Sequence[Summary]) -> str:
    """Stacked bars of every category but productive, on one scale."""
    scale = max(*(1 - row.effective_share.mean for row in rows), 1e-9)
    height = _ROW * len(rows) + 60
    drawn = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>"]
    for number, row in enumerate(rows):
        y = number * _ROW
        drawn.append(f"<text x='0' y='{y + 18}' font-size='13'>{escape(row.label)}</text>")
        x = float(_LEFT)
        for category, share in shares_of(row).items():
            if category is Category.PRODUCTIVE or share <= 0:
                continue
            width = share / scale * (_WIDTH - _LEFT - 80)
            name = category.value.replace("_", " ")
            drawn.append(
                f"<rect x='{x:.1f}' y='{y + 4}' width='{width:.1f}' height='{_ROW - 10}' fill='{_COLOURS[category]}'>"
                f"<title>{name}: {100 * share:.2f} %</title></rect>"
                if category in _COLOURS
                else ""
            )
            x += width
        drawn.append(
            f"<text x='{x + 6:.1f}' y='{y + 18}' font-size='13'>{100 * (1 - row.effective_share.mean):.2f} %</text>"
        )
    return "\n".join([*drawn, *_legend(height), "</svg>"])


def _legend(height: int) -> list[str]:
    drawn = []
    for number, (category, colour) in enumerate(_COLOURS.items()):
        x, y = number % 6 * 150, height - 40 + number // 6 * 20
        drawn.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{colour}'/>")
        drawn.append(f"<text x='{x + 18}' y='{y + 11}' font-size='12'>{category.value.replace('_', ' ')}</text>")
    return drawn
