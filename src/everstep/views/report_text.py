"""The report in plain lines, for pipes, logs and mail; the wording here is what the coloured form shows too.

It knows no terminal: no colour, no cursor, and no width but its own.
"""

from collections.abc import Iterable, Sequence

from everstep.domain.causes import LLAMA3_DAYS, LLAMA3_GPU_COUNT, LLAMA3_UNEXPECTED_COUNT
from everstep.domain.evidence import EvidenceFile
from everstep.policy.accounting import Category, Part
from everstep.policy.incidents import Incident, InterruptionRow, VerdictAccuracy
from everstep.views.report import Report, RunReport
from everstep.views.storage_troubles import StorageTrouble

TOLD_IN_FULL_MAX = 5
"""More incidents than this are listed in short, and `--incident` tells one."""
BAR_CELLS = 32
LLAMA3_NOTE = (
    f"Llama 3: {LLAMA3_UNEXPECTED_COUNT} unexpected interruptions of {LLAMA3_GPU_COUNT:,} GPUs in {LLAMA3_DAYS} days "
    "(arXiv 2407.21783, Table 5; shares from its counts)"
)
CATEGORY_NOTES = {
    Category.PRODUCTIVE: "steps done for the first time, at the job's healthy pace",
    Category.REPLAYED: "steps done again",
    Category.SLOW: "what steps took above the healthy pace",
    Category.CHECKPOINT: "ranks stood still to save",
    Category.DETECTION: "from the last progress to the first sign",
    Category.DIAGNOSIS: "from the first sign to the order to stop",
    Category.TEARDOWN: "until no worker lived",
    Category.WAITING: "for hosts, or for the backoff",
    Category.STARTING: "processes, imports, groups, model",
    Category.RESTORING: "from a checkpoint",
    Category.WARMING_UP: "first steps, above the healthy pace",
    Category.EVALUATION: "",
    Category.MAINTENANCE: "planned interruptions",
    Category.IDLE: "no coordinator, or the script was ending",
}


def report_lines(report: Report) -> list[str]:
    """The whole report."""
    if len(report.runs) == 1:
        return run_lines(report.runs[0])
    lines = ["", headline(report.effective_share, report.parts), f"{len(report.runs)} runs", ""]
    lines += aligned([RUNS_HEAD, *run_rows(report)], right={1, 2, 3, 4, 5, 6})
    lines += ["", "Where the time went", *part_lines(report.parts)]
    return lines + interruption_lines(report.interruptions, report.accuracy)


def run_lines(run: RunReport) -> list[str]:
    lines = [title(run), state(run), "", headline(run.account.effective_share, run.account.parts), steps_line(run)]
    if not run.account.step_count:
        lines.append(NO_STEP_NOTE)
    lines += ["", "Where the time went", *part_lines(run.account.parts)]
    lines += interruption_lines(run.interruptions, run.accuracy)
    lines += storage_lines(run.storage)
    if run.incidents:
        lines += ["", "Incidents"]
        in_full = len(run.incidents) <= TOLD_IN_FULL_MAX
        for incident in run.incidents:
            lines += ["", *(incident_lines(incident) if in_full else incident_lines(incident)[:2])]
        if not in_full:
            lines += ["", f"Timeline and evidence of one: everstep report {run.name} --incident {run.incidents[-1].id}"]
    return lines


def storage_lines(troubles: Sequence[StorageTrouble]) -> list[str]:
    """When checkpoints were not durable; nothing when they always were."""
    lines = ["", "Checkpoints that were late"] if troubles else []
    for trouble in troubles[-TOLD_IN_FULL_MAX:]:
        until_s = trouble.until_s
        span = "to the end" if until_s is None else f"for {duration(until_s - trouble.since_s)}"
        where = "on disk" if trouble.where == "disk" else "in the mirror"
        lines.append(f"  {where} from {duration(trouble.since_s)} {span}, since step {trouble.step}: {trouble.reason}")
    if len(troubles) > TOLD_IN_FULL_MAX:
        lines.append(f"  and {len(troubles) - TOLD_IN_FULL_MAX} times before")
    return lines


NO_STEP_NOTE = (
    "No step was seen, so what was productive is unknown: the script ended before its first step, or runs without the "
    "observer (--no-python), or steps no torch optimizer and never calls run.steps()."
)
RUNS_HEAD = ("run", "workers", "elapsed", "effective", "steps", "incidents", "lost", "state")


def run_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per run under `RUNS_HEAD`, and the total."""
    rows = [
        (
            run.name,
            f"{run.started.world_size:,}",
            duration(run.account.elapsed_s),
            percent(run.account.effective_share),
            f"{run.account.step_count:,}",
            f"{len(run.incidents):,}",
            duration(run.lost_s),
            "no end yet" if run.end is None else run.end.exit_code.name.lower(),
        )
        for run in report.runs
    ]
    total = (
        "total",
        "",
        duration(report.elapsed_s),
        percent(report.effective_share),
        f"{sum(run.account.step_count for run in report.runs):,}",
        f"{sum(len(run.incidents) for run in report.runs):,}",
        duration(sum(run.lost_s for run in report.runs)),
        "",
    )
    return [*rows, total]


def title(run: RunReport) -> str:
    workers, hosts = run.started.world_size, run.started.host_count
    return (
        f"{run.name}: run {run.started.run}, {counted(workers, 'worker')} on {counted(hosts, 'host')}, "
        f"started {run.started_wall}\n{' '.join(run.started.command)}"
    ).rstrip()


def state(run: RunReport) -> str:
    if run.end is None:
        return f"still running, or cut off: no end in the ledger; last entry {run.last_wall}"
    code = run.end.exit_code
    return f"ended with code {int(code)} ({code.name.lower().replace('_', ' ')}): {run.end.summary}"


def headline(share: float, parts: Sequence[Part]) -> str:
    elapsed_s = sum(part.duration_ns for part in parts) / 1e9
    productive_s = sum(part.duration_ns for part in parts if part.category is Category.PRODUCTIVE) / 1e9
    return f"EFFECTIVE TRAINING TIME  {percent(share)}   {duration(productive_s)} productive of {duration(elapsed_s)}"


def steps_line(run: RunReport) -> str:
    account = run.account
    parts = [f"{counted(account.step_count, 'step')}, the last one {account.last_step:,}"]
    if account.replayed_step_count:
        parts.append(f"{account.replayed_step_count:,} done again")
    if account.healthy_step_s is not None:
        parts.append(f"healthy step {duration(account.healthy_step_s)}")
    parts.append(counted(account.attempt_count, "attempt"))
    return "; ".join(parts)


def part_lines(parts: Sequence[Part]) -> list[str]:
    rows = [(f"  {name}", share, spent, cells, note) for name, share, spent, cells, note in part_rows(parts)]
    return aligned(rows, right={1, 2})


def part_rows(parts: Sequence[Part]) -> list[tuple[str, str, str, str, str]]:
    """Name, share, time, bar and note of every category that got time, and the total."""
    elapsed_ns = sum(part.duration_ns for part in parts)
    rows = [
        (
            part.category.replace("_", " "),
            percent(part.duration_ns / elapsed_ns),
            duration(part.duration_s),
            bar(part.duration_ns / elapsed_ns),
            CATEGORY_NOTES[part.category],
        )
        for part in parts
        if part.duration_ns
    ]
    return [*rows, ("total", percent(1.0 if elapsed_ns else 0.0), duration(elapsed_ns / 1e9), "", "")]


INTERRUPTIONS_HEAD = ("component", "category", "count", "share", "Llama 3", "lost")


def interruption_rows(table: Iterable[InterruptionRow]) -> list[tuple[str, ...]]:
    return [
        (
            row.component,
            row.category,
            f"{row.count:,}",
            percent(row.share),
            "–" if row.llama3_share is None else percent(row.llama3_share),
            duration(row.lost_s),
        )
        for row in table
    ]


def interruption_lines(table: Sequence[InterruptionRow], accuracy: VerdictAccuracy | None) -> list[str]:
    count = sum(row.count for row in table)
    lines = ["", f"Unexpected interruptions: {count:,}"]
    if table:
        rows = [tuple(f"  {cell}" if i == 0 else cell for i, cell in enumerate(row))
                for row in (INTERRUPTIONS_HEAD, *interruption_rows(table))]  # fmt: skip
        lines += [*aligned(rows, right={2, 3, 4, 5}), f"  {LLAMA3_NOTE}"]
    if accuracy is not None:
        lines.append(accuracy_sentence(accuracy))
    return lines


def accuracy_sentence(accuracy: VerdictAccuracy) -> str:
    missed = accuracy.injected_count - accuracy.found_count
    sentence = (
        f"Verdicts: {accuracy.named_count} of {counted(accuracy.injected_count, 'injected fault')} "
        f"{'was' if accuracy.named_count == 1 else 'were'} traced to the injected rank"
    )
    return sentence + (f"; {missed} led to no incident." if missed else ".")


def incident_lines(incident: Incident, *, times: bool = True) -> list[str]:
    """The story of one incident: head, verdict, then the rest."""
    lines = [incident_head(incident), f"  {incident.verdict.reason}"]
    if incident.verdict.where:
        lines.append(f"  where: {incident.verdict.where}")
    lines += [f"  because {fact}" for fact in incident.verdict.evidence]
    if incident.injected is not None:
        lines.append(f"  {injected_sentence(incident)}")
    if incident.why:
        lines.append(f"  recovery: {incident.why}")
    if incident.parts:
        lines.append(f"  {parts_sentence(incident)}")
    lines += evidence_lines(incident.evidence_files)
    if times:
        lines += [f"  {offset(moment.at_s, incident):>12}  {moment.sentence}" for moment in incident.timeline]
    return lines


def evidence_lines(files: tuple[EvidenceFile, ...]) -> list[str]:
    """One line for each folder of evidence; `--json` lists the files."""
    folders: dict[str, list[EvidenceFile]] = {}
    for file in files:
        folders.setdefault(file.path.rpartition("/")[0], []).append(file)
    return [
        f"  evidence: {folder}/ ({counted(len(held), 'file')}, {size(sum(file.size_bytes for file in held))})"
        for folder, held in folders.items()
    ]


def incident_head(incident: Incident) -> str:
    cause = f"{incident.cause.component} ({incident.cause.category})"
    kind = "planned, " if incident.planned else ""
    outcome = "" if incident.recovered_at_s is not None else ", not recovered"
    return (
        f"{incident.id}  {cause}: {kind}{incident.verdict.trouble.replace('_', ' ')} after step {incident.step:,}, "
        f"at {duration(incident.detected_at_s)}; lost {duration(incident.lost_s)}{outcome}"
    )


def injected_sentence(incident: Incident) -> str:
    fault = incident.injected
    assert fault is not None
    verdict = "and the verdict names it" if incident.names_the_injected_rank else "and the verdict does not name it"
    return f"injected: {fault.kind} on rank {fault.rank}, {verdict}"


def parts_sentence(incident: Incident) -> str:
    return " · ".join(f"{part.name.replace('_', ' ')} {duration(part.duration_s)}" for part in incident.parts)


def offset(at_s: float, incident: Incident) -> str:
    """A moment against the first sign of the incident."""
    return f"{at_s - incident.detected_at_s:+.2f} s"


def percent(share: float) -> str:
    return "<0.1 %" if 0 < share < 0.0005 else f"{share:.1%}".replace("%", " %")


def duration(seconds: float) -> str:
    """Seconds as people say them, with three digits or so."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def bar(share: float) -> str:
    """A bar of eighths, so that small shares still differ."""
    eighths = round(share * BAR_CELLS * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def size(size_bytes: int) -> str:
    if size_bytes < 1000:
        return f"{size_bytes} B"
    for unit in ("kB", "MB"):
        size_bytes //= 1000
        if size_bytes < 1000:
            return f"{size_bytes} {unit}"
    return f"{size_bytes // 1000} GB"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def aligned(rows: Sequence[Sequence[str]], *, right: set[int]) -> list[str]:
    """Rows of equal length as columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
