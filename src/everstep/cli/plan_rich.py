"""A plan's report in colour, made of the same rows and sentences as the plain one; it decides only how they look."""

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everstep.planning.catalogue import SECTIONS
from everstep.planning.plan import PlanReport
from everstep.views import plan_text as plain

_WIDE_COLUMNS = 130
"""A narrower terminal has no room for formulas beside the figures."""


def show_plan(report: PlanReport, notes: Sequence[str], *, is_forced: bool) -> None:
    """The whole report."""
    console = _console(is_forced=is_forced)
    console.print(Text(plain.title(report), style="bold"))
    share, target = report.value("effective_share"), report.inputs.target_share
    style = "green" if share >= target else "yellow" if share >= target - 0.1 else "red"
    console.print(Panel(Text("\n".join(plain.headlines(report))), border_style=style, expand=False, padding=(0, 1)))
    marks = plain.assumption_marks(report)
    is_wide = console.width >= _WIDE_COLUMNS
    for section in SECTIONS:
        rows = plain.section_rows(report, section, marks)
        if rows:
            table = _table(section)
            table.add_column(no_wrap=True)
            table.add_column(justify="right", style="bold cyan", no_wrap=True)
            table.add_column(style="cyan", no_wrap=True)
            table.add_column(style="yellow", no_wrap=True)
            if is_wide:
                table.add_column(style="dim", overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row if is_wide else row[:-1]))
            console.print(table)
    if not is_wide:
        console.print(Text(f"\nFormulas and sources: on {_WIDE_COLUMNS} columns, in a pipe, or --html", style="dim"))
    inputs = _table("Inputs (a letter: assumed, since nobody said it)")
    for look in ("yellow", "", "cyan"):
        inputs.add_column(style=look, no_wrap=True)
    inputs.add_column(style="dim")
    for line in plain.input_rows(report, marks):
        inputs.add_row(line.mark, line.key, Text(line.value), Text(line.source))
    console.print(inputs)
    console.print(Text("\nWhere published figures disagree", style="bold"))
    console.print(Text("\n".join(plain.disagreements(report)), style="dim"))
    for note in notes:
        console.print(Text(f"Note: {note}", style="yellow"))


def show_comparison(first: PlanReport, second: PlanReport, *, is_forced: bool) -> None:
    """Two plans side by side."""
    console = _console(is_forced=is_forced)
    console.print(Text(plain.title(first), style="bold"))
    console.print(Text(plain.title(second), style="bold"))
    for name, rows in plain.compare_sections(first, second):
        table = _table(name)
        table.add_column("")
        for head in (first.name, second.name, "change"):
            table.add_column(head, justify="right")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)


def _console(*, is_forced: bool) -> Console:
    return Console(force_terminal=is_forced or None, highlight=False, emoji=False)


def _table(title: str) -> Table:
    return Table(
        title=Text(f"\n{title}", style="bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_header=title not in SECTIONS and not title.startswith("Inputs ("),
    )
