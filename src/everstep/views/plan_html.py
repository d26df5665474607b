"""A plan's report as one self-contained page: plots as SVG, tables, no script and nothing from elsewhere."""

from collections.abc import Sequence
from html import escape

from everstep.planning.catalogue import SECTIONS
from everstep.planning.curves import Curve, availability_over_spares, share_over_gpus, share_over_interval
from everstep.planning.plan import PlanReport
from everstep.views import plan_text as plain
from everstep.views.svg_plot import Axis, Line, Mark, plot

_SIZES = (256.0, 1_024.0, 4_096.0, 16_384.0, 65_536.0, 262_144.0, 1_048_576.0)
_TIMES_S = (1.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 43_200.0, 172_800.0)
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --grid: #d8dee4; --page: #ffffff; --card: #f6f8fa;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --mark: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --page: #0d1117;
  --card: #161b22; --c0: #4493f8; --c1: #f0883e; --c2: #3fb950; --c3: #ab7df8; --mark: #ff7b72; } }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.lead { background: var(--card); border-left: 4px solid var(--c0); padding: .8rem 1rem; margin: 0 0 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; background: var(--card); padding: .8rem; border-radius: 6px; }
figcaption { font-weight: 600; margin-bottom: .3rem; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .legend { fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; } .line { fill: none; stroke-width: 2.2; }
.line-0 { stroke: var(--c0); } .line-1 { stroke: var(--c1); } .line-2 { stroke: var(--c2); }
.line-3 { stroke: var(--c3); } .line-1, .line-2 { stroke-dasharray: 6 4; }
.mark { stroke: var(--mark); stroke-width: 1.4; stroke-dasharray: 2 3; } svg .mark-name { fill: var(--mark); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.value { font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.range { white-space: nowrap; } td.marks { color: var(--c1); white-space: nowrap; }
td.told, .soft { color: var(--soft); } footer { margin-top: 3rem; color: var(--soft); }
"""


def plan_html(report: PlanReport, notes: Sequence[str] = ()) -> str:
    """The page."""
    parts = [
        f"<h1>{escape(plain.title(report))}</h1>",
        f'<p class="lead">{"<br>".join(map(escape, plain.headlines(report)))}</p>',
        f'<div class="plots">{_share_plot(report)}{_interval_plot(report)}{_spares_plot(report)}</div>',
    ]
    marks = plain.assumption_marks(report)
    for section in SECTIONS:
        rows = plain.section_rows(report, section, marks)
        if rows:
            classes = ("", "value", "range", "marks", "told")
            parts.append(f"<h2>{escape(section)}</h2>{_table(rows, classes)}")
    inputs = [(row.mark, row.key, row.value, row.source) for row in plain.input_rows(report, marks)]
    parts.append(
        "<h2>Inputs</h2><p class='soft'>A letter: assumed, since nobody said it. The same letter stands beside each "
        f"figure that rests on it.</p>{_table(inputs, ('marks', '', 'value', 'told'))}"
    )
    parts.append("<h2>Where published figures disagree</h2><ul>")
    parts += [
        f"<li>{escape(found.claim)}<br><span class='soft'>But {escape(found.check)} "
        f"Used here: {escape(found.used)}.</span></li>"
        for found in report.contradictions
    ]
    parts.append("</ul>")
    parts += [f"<p>Note: {escape(note)}</p>" for note in notes]
    parts.append("<footer>Calculated by everstep plan: an estimate, not a measurement.</footer>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.name)} – everstep plan</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _share_plot(report: PlanReport) -> str:
    curves = share_over_gpus(report.inputs)
    low, high = curves[0].points[0][0], curves[0].points[-1][0]
    axis = Axis(name="GPUs", low=low, high=high, text=_gpus, is_logarithmic=True, ticks=_SIZES)
    marks = (Mark(name="this plan", x=report.inputs.gpu_count),)
    return _figure("Effective training time against GPUs, at the best interval", axis, _shares(), curves, marks)


def _interval_plot(report: PlanReport) -> str:
    best_s = report.value("exact_interval_s")
    curves = share_over_interval(report.inputs, best_interval_s=best_s)
    low, high = curves[0].points[0][0], curves[0].points[-1][0]
    axis = Axis(
        name="checkpoint interval",
        low=low,
        high=high,
        text=lambda value: plain.amount(value, "s"),
        is_logarithmic=True,
        ticks=_TIMES_S,
    )
    marks = [Mark(name=f"best: {plain.amount(best_s, 's')}", x=best_s)]
    if report.inputs.checkpoint_interval_s is not None:
        marks.append(Mark(name="this plan", x=report.inputs.checkpoint_interval_s))
    return _figure("Effective training time against the checkpoint interval", axis, _shares(), curves, marks)


def _spares_plot(report: PlanReport) -> str:
    needed = report.value("spare_count")
    curves = availability_over_spares(report.inputs, spare_count=int(needed))
    axis = Axis(name="spare hosts", low=0.0, high=curves[0].points[-1][0], text=lambda value: f"{value:,.0f}")
    marks = [Mark(name=f"{plain.percent(report.inputs.availability_share)}: {needed:,.0f}", x=needed)]
    if report.inputs.spare_host_count is not None:
        marks.append(Mark(name="this plan", x=float(report.inputs.spare_host_count)))
    shares = _shares("time in which they suffice")
    return _figure("Spare hosts against availability", axis, shares, curves, marks, legend_x=0.68)


def _shares(name: str = "effective training time") -> Axis:
    return Axis(name=name, low=0.0, high=1.0, text=lambda value: f"{value * 100:.0f} %")


def _figure(title: str, x: Axis, y: Axis, curves: Sequence[Curve], marks: Sequence[Mark], legend_x: float = 0.0) -> str:
    lines = [Line(name=curve.name, points=curve.points) for curve in curves]
    drawn = plot(title, x=x, y=y, lines=lines, marks=marks, legend_x=legend_x)
    return f"<figure><figcaption>{escape(title)}</figcaption>\n{drawn}\n</figure>\n"


def _gpus(value: float) -> str:
    if value >= 1024**2:
        return f"{value / 1024**2:,.0f}M"
    return f"{value / 1024:,.0f}k" if value >= 1024 else f"{value:.0f}"


def _table(rows: Sequence[tuple[str, ...]], classes: Sequence[str]) -> str:
    lines = []
    for row in rows:
        cells = "".join(
            f'<td class="{name}">{escape(cell)}</td>' if name else f"<td>{escape(cell)}</td>"
            for cell, name in zip(row, classes, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
