"""The report in colour, made of the same rows and sentences as the plain one; it decides only how they look."""

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everstep.policy.accounting import Category, Part
from everstep.policy.incidents import Incident, InterruptionRow, VerdictAccuracy
from everstep.views import report_text as plain
from everstep.views.report import Report, RunReport

_STYLES = {
    Category.PRODUCTIVE: "green",
    Category.REPLAYED: "red",
    Category.SLOW: "yellow",
    Category.CHECKPOINT: "blue",
    Category.DETECTION: "red",
    Category.DIAGNOSIS: "red",
    Category.TEARDOWN: "magenta",
    Category.WAITING: "bright_black",
    Category.STARTING: "cyan",
    Category.RESTORING: "cyan",
    Category.WARMING_UP: "yellow",
    Category.EVALUATION: "blue",
    Category.MAINTENANCE: "magenta",
    Category.IDLE: "bright_black",
}
_GOOD_SHARE, _FAIR_SHARE = 0.9, 0.7
"""Above Llama 3's published 90 % the headline is green; below the second it is red."""


def show_report(console: Console, report: Report) -> None:
    """The whole report."""
    if len(report.runs) == 1:
        _show_run(console, report.runs[0])
        return
    console.print(_headline(report.effective_share, report.parts, f"{len(report.runs)} runs"))
    console.print(_runs_table(report))
    console.print(_parts_table(report.parts))
    _show_interruptions(console, report.interruptions, report.accuracy)


def show_incident(console: Console, incident: Incident) -> None:
    """The whole story of one incident."""
    console.print(_incident(incident))


def _show_run(console: Console, run: RunReport) -> None:
    name, _, command = plain.title(run).partition("\n")
    console.print(Text(name, style="bold"))
    if command:
        console.print(Text(command, style="dim"))
    console.print(Text(plain.state(run), style="yellow" if run.end is None else ""))
    console.print(_headline(run.account.effective_share, run.account.parts, plain.steps_line(run)))
    if not run.account.step_count:
        console.print(Text(plain.NO_STEP_NOTE, style="yellow"))
    console.print(_parts_table(run.account.parts))
    _show_interruptions(console, run.interruptions, run.accuracy)
    for line in plain.storage_lines(run.storage):
        console.print(Text(line, style="yellow"))
    console.print()
    in_full = len(run.incidents) <= plain.TOLD_IN_FULL_MAX
    for incident in run.incidents:
        console.print(_incident(incident) if in_full else _incident_in_short(incident))
    if not in_full:
        hint = f"everstep report {run.name} --incident {run.incidents[-1].id}"
        console.print(Text(f"Timeline and evidence of one: {hint}", style="dim"))


def _headline(share: float, parts: tuple[Part, ...], below: str) -> RenderableType:
    style = "green" if share >= _GOOD_SHARE else "yellow" if share >= _FAIR_SHARE else "red"
    words = plain.headline(share, parts)
    name, rest = words.split("  ", 1)
    value, spent = rest.split("   ", 1)
    text = Text.assemble((name, "bold"), "  ", (value, f"bold reverse {style}"), f"  {spent}\n", (below, "dim"))
    return Panel(text, border_style=style, expand=False, padding=(1, 2))


def _parts_table(parts: tuple[Part, ...]) -> Table:
    table = _table("Where the time went")
    table.add_column("category")
    table.add_column("share", justify="right")
    table.add_column("time", justify="right")
    table.add_column("", width=plain.BAR_CELLS, no_wrap=True)
    table.add_column("", style="dim")
    styles = [_STYLES[part.category] for part in parts if part.duration_ns]
    for row, style in zip(plain.part_rows(parts), [*styles, "bold"], strict=True):
        name, share, spent, cells, note = row
        table.add_row(Text(name, style=style), share, spent, Text(cells, style=style), note)
    return table


def _runs_table(report: Report) -> Table:
    table = _table("Runs")
    for i, name in enumerate(plain.RUNS_HEAD):
        table.add_column(name, justify="right" if 0 < i < len(plain.RUNS_HEAD) - 1 else "left")
    *rows, total = plain.run_rows(report)
    for row in rows:
        table.add_row(*map(Text, row))
    table.add_section()
    table.add_row(*map(Text, total), style="bold")
    return table


def _show_interruptions(console: Console, rows: tuple[InterruptionRow, ...], accuracy: VerdictAccuracy | None) -> None:
    count = sum(row.count for row in rows)
    if rows:
        table = _table(f"Unexpected interruptions: {count:,}")
        for i, name in enumerate(plain.INTERRUPTIONS_HEAD):
            table.add_column(name, justify="left" if i < 2 else "right")
        for row in plain.interruption_rows(rows):
            table.add_row(*map(Text, row))
        console.print(table)
        console.print(Text(plain.LLAMA3_NOTE, style="dim"))
    else:
        console.print(Text("\nNo unexpected interruption.", style="green"))
    if accuracy is not None:
        is_perfect = accuracy.named_count == accuracy.injected_count
        console.print(Text(plain.accuracy_sentence(accuracy), style="green" if is_perfect else "yellow"))


def _incident(incident: Incident) -> RenderableType:
    head, verdict, *facts = plain.incident_lines(incident, times=False)
    timeline = Table.grid(padding=(0, 2))
    timeline.add_column(justify="right", style="cyan", no_wrap=True)
    timeline.add_column()
    for moment in incident.timeline:
        timeline.add_row(plain.offset(moment.at_s, incident), Text(moment.sentence))
    body = Group(Text(verdict.strip(), style="bold"), *(Text(fact.strip()) for fact in facts), Text(), timeline)
    style = "magenta" if incident.planned else "red"
    return Panel(body, title=Text(head, style=f"bold {style}"), title_align="left", border_style=style)


def _incident_in_short(incident: Incident) -> RenderableType:
    head, verdict = plain.incident_lines(incident)[:2]
    return Text.assemble((head, "bold"), "\n", verdict)


def _table(title: str) -> Table:
    return Table(
        title=Text(f"\n{title}", style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
