"""The report for machines: one JSON document, and CSV tables. The keys are stable: they are added to, never renamed.

JSON: {"format": 1, "runs": [RUN, …], "total": {"run_count", "elapsed_s", "effective_training_share", "parts_s",
"interruptions", "verdicts"}}. A RUN has name, run, everstep, command, world_size, host_count, started_wall, last_wall,
entry_count, state ("ended" or "open"), exit_code and summary (null while open), elapsed_s, effective_training_share,
parts_s (category: seconds; they sum to elapsed_s), attempt_count, step_count, replayed_step_count, last_step,
healthy_step_s, interruptions, verdicts (null when nothing was injected), storage (when checkpoints were late: where,
since_s, until_s, step, reason, word_count) and incidents. Times `*_at_s` are on the run's
clock. Knows nothing of terminals or files.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from everstep.policy.accounting import Category, Part
from everstep.policy.incidents import Incident, InterruptionRow, VerdictAccuracy
from everstep.views.report import Report, RunReport

FORMAT = 1
CSV_TABLES = ("runs", "incidents", "interruptions")


def report_json(report: Report) -> str:
    """The whole report as one JSON document."""
    document = {
        "format": FORMAT,
        "runs": [_run(run) for run in report.runs],
        "total": {
            "run_count": len(report.runs),
            "elapsed_s": report.elapsed_s,
            "effective_training_share": report.effective_share,
            "parts_s": _parts(report.parts),
            "interruptions": _interruptions(report.interruptions),
            "verdicts": _accuracy(report.accuracy),
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def incident_json(incident: Incident) -> str:
    """One incident, in the form that it has in the report."""
    return json.dumps(_incident(incident), indent=2, ensure_ascii=False) + "\n"


def report_csv(report: Report, table: str) -> str:
    """A table with a head: `runs`, `incidents` or `interruptions`, with one row for each run, incident or cause."""
    assert table in CSV_TABLES
    rows = {"runs": _run_records, "incidents": _incident_records, "interruptions": _interruption_records}[table](report)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


def _run(run: RunReport) -> dict[str, object]:
    account, end = run.account, run.end
    return {
        "name": run.name,
        "run": run.started.run,
        "everstep": run.started.everstep,
        "command": list(run.started.command),
        "world_size": run.started.world_size,
        "host_count": run.started.host_count,
        "started_wall": run.started_wall,
        "last_wall": run.last_wall,
        "entry_count": run.entry_count,
        "state": "open" if end is None else "ended",
        "exit_code": None if end is None else int(end.exit_code),
        "summary": None if end is None else end.summary,
        "elapsed_s": account.elapsed_s,
        "effective_training_share": account.effective_share,
        "parts_s": _parts(account.parts),
        "attempt_count": account.attempt_count,
        "step_count": account.step_count,
        "replayed_step_count": account.replayed_step_count,
        "last_step": account.last_step,
        "healthy_step_s": account.healthy_step_s,
        "interruptions": _interruptions(run.interruptions),
        "verdicts": _accuracy(run.accuracy),
        "storage": [asdict(trouble) for trouble in run.storage],
        "incidents": [_incident(incident) for incident in run.incidents],
    }


def _parts(parts: Iterable[Part]) -> dict[str, float]:
    return {str(part.category): part.duration_s for part in parts}


def _interruptions(table: Iterable[InterruptionRow]) -> list[dict[str, object]]:
    return [
        {
            "component": row.component,
            "category": row.category,
            "count": row.count,
            "share": row.share,
            "llama3_share": row.llama3_share,
            "lost_s": row.lost_s,
        }
        for row in table
    ]


def _accuracy(accuracy: VerdictAccuracy | None) -> dict[str, int] | None:
    if accuracy is None:
        return None
    return {
        "injected_count": accuracy.injected_count,
        "found_count": accuracy.found_count,
        "named_count": accuracy.named_count,
    }


def _incident(incident: Incident) -> dict[str, object]:
    verdict, fault = incident.verdict, incident.injected
    return {
        "id": incident.id,
        "attempt": incident.attempt,
        "component": incident.cause.component,
        "category": incident.cause.category,
        "planned": incident.planned,
        "trouble": str(verdict.trouble),
        "ranks": list(verdict.ranks),
        "hosts": list(verdict.hosts),
        "reason": verdict.reason,
        "where": verdict.where,
        "facts": list(verdict.evidence),
        "step": incident.step,
        "since_at_s": incident.since_s,
        "detected_at_s": incident.detected_at_s,
        "verdict_at_s": incident.verdict_at_s,
        "stopped_at_s": incident.stopped_at_s,
        "restarted_at_s": incident.restarted_at_s,
        "recovered_at_s": incident.recovered_at_s,
        "lost_s": incident.lost_s,
        "rung": None if incident.rung is None else incident.rung.name.lower(),
        "why": incident.why,
        "parts": [{"name": part.name, "duration_s": part.duration_s} for part in incident.parts],
        "injected": None if fault is None else {"kind": str(fault.kind), "rank": fault.rank, "number": fault.number},
        "names_the_injected_rank": None if fault is None else incident.names_the_injected_rank,
        "evidence": [
            {"path": file.path, "size_bytes": file.size_bytes, "digest": file.digest}
            for file in incident.evidence_files
        ],
        "timeline": [{"at_s": moment.at_s, "sentence": moment.sentence} for moment in incident.timeline],
    }


def _run_records(report: Report) -> list[Sequence[object]]:
    plain = ("name", "run", "started_wall", "last_wall", "state", "exit_code", "world_size", "host_count", "elapsed_s",
             "effective_training_share", "attempt_count", "step_count", "replayed_step_count", "last_step",
             "healthy_step_s")  # fmt: skip
    records: list[Sequence[object]] = [
        [*plain, "incident_count", "lost_s", *(f"{category}_s" for category in Category)]
    ]
    for run in report.runs:
        row = _run(run)
        spent = [part.duration_s for part in run.account.parts]
        records.append([*(row[key] for key in plain), len(run.incidents), run.lost_s, *spent])
    return records


def _incident_records(report: Report) -> list[Sequence[object]]:
    plain = ("id", "attempt", "component", "category", "planned", "trouble", "step", "since_at_s", "detected_at_s",
             "verdict_at_s", "stopped_at_s", "restarted_at_s", "recovered_at_s", "lost_s", "reason",
             "where")  # fmt: skip
    records: list[Sequence[object]] = [["run_name", *plain, "ranks", "hosts"]]
    for run in report.runs:
        for incident in run.incidents:
            row = _incident(incident)
            ranks, hosts = " ".join(map(str, incident.verdict.ranks)), " ".join(incident.verdict.hosts)
            records.append([run.name, *(row[key] for key in plain), ranks, hosts])
    return records


def _interruption_records(report: Report) -> list[Sequence[object]]:
    head = ("component", "category", "count", "share", "llama3_share", "lost_s")
    return [head, *([row[key] for key in head] for row in _interruptions(report.interruptions))]
