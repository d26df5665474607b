"""How the demo ends: the report of the run with faults, then whether its weights equal those of the untouched run."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.domain.causes import LLAMA3_DAYS, LLAMA3_UNEXPECTED_COUNT
from everstep.domain.errors import EvidenceError
from everstep.policy.incidents import Incident
from everstep.views.report import Report, RunReport
from everstep.views.report_text import accuracy_sentence, counted, duration, percent, report_lines

_LLAMA3_S_PER_FAULT = LLAMA3_DAYS * 86_400 / LLAMA3_UNEXPECTED_COUNT


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a training left behind: SHA-256 of all parameters and buffers, and of the optimizer's state."""

    weights_sha256: str
    optimizer_sha256: str
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoEnd:
    """The result of a demo. `faulted` is None when that run did not come to its end."""

    seed: int
    step_count: int
    wall_s: float
    untouched: Weights
    faulted: Weights | None
    report: RunReport

    @property
    def identical(self) -> bool:
        return self.faulted == self.untouched

    @property
    def planned_count(self) -> int:
        return len(self.report.started.faults)

    @property
    def injected_count(self) -> int:
        return self.report.accuracy.injected_count if self.report.accuracy else 0


def read_weights(path: Path) -> Weights:
    """Read what the demo's script has written.

    Raises:
        EvidenceError: the file is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Weights)
    except msgspec.DecodeError as error:
        raise EvidenceError(f"{path} does not hold the digests of a demo: {error}") from error


def show_end(end: DemoEnd, *, as_json: bool) -> None:
    """Write it to stdout."""
    if as_json:
        sys.stdout.write(end_json(end))
    elif sys.stdout.isatty():
        _show_rich(end)
    else:
        sys.stdout.write("\n".join([*report_lines(Report(runs=(end.report,))), "", *end_lines(end)]) + "\n")
    sys.stdout.flush()


def end_lines(end: DemoEnd) -> list[str]:
    """The last words; the very last is about the weights."""
    lines = [*_fault_lines(end), f"The whole demo took {duration(end.wall_s)}."]
    return [*lines, "", weights_sentence(end)]


def weights_sentence(end: DemoEnd) -> str:
    before, after = end.untouched, end.faulted
    if after is None:
        return "Final weights: none, since the run with faults did not come to its end."
    if end.identical:
        return f"Final weights: identical to the untouched run, bit for bit (sha256 {after.weights_sha256})."
    what = "weights" if after.weights_sha256 != before.weights_sha256 else "optimizer state or loss"
    return (
        f"Final weights: DIFFERENT from the untouched run's: the {what} after {counted(end.step_count, 'step')} "
        f"are not the same (weights sha256 {before.weights_sha256[:16]}… and {after.weights_sha256[:16]}…, "
        f"loss {before.loss} and {after.loss})."
    )


def _fault_lines(end: DemoEnd) -> list[str]:
    if not end.planned_count:
        return ["No fault was planned."]
    kinds = Counter(str(i.injected.kind) for i in end.report.incidents if i.injected)
    named = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    lines = [f"Faults: {end.injected_count} of {end.planned_count} planned were injected ({named})."]
    if end.injected_count < end.planned_count:
        lines.append("The others were not due before the run ended.")
    if end.report.accuracy:
        lines.append(accuracy_sentence(end.report.accuracy))
    recovered_s = [s for i in end.report.incidents if (s := recovery_s(i)) is not None]
    if recovered_s:
        mean_s = sum(recovered_s) / len(recovered_s)
        lines.append(
            f"Recoveries: {len(recovered_s)}, from the last progress to the next step in {duration(min(recovered_s))} "
            f"to {duration(max(recovered_s))}, {duration(mean_s)} on average."
        )
    return [*lines, *_outlook(end)]


def _outlook(end: DemoEnd) -> list[str]:
    incidents = end.report.incidents
    if not incidents:
        return []
    every_s = end.report.account.elapsed_s / len(incidents)
    lost_s = end.report.lost_s / len(incidents)
    estimate = percent(lost_s / _LLAMA3_S_PER_FAULT)
    return [
        f"A fault came every {duration(every_s)} here, every {duration(_LLAMA3_S_PER_FAULT)} in Llama 3's training.",
        f"At that rate {duration(lost_s)} lost to each would be {estimate} of the time (estimated for a small model).",
    ]


def recovery_s(incident: Incident) -> float | None:
    """From the last progress to the first step of the next attempt."""
    return None if incident.recovered_at_s is None else incident.recovered_at_s - incident.since_s


def end_json(end: DemoEnd) -> str:
    """One document; keys carry their units."""
    accuracy = end.report.accuracy
    document = {
        "identical": end.identical,
        "untouched": end.untouched,
        "faulted": end.faulted,
        "run_dir": end.report.name,
        "seed": end.seed,
        "worker_count": end.report.started.world_size,
        "step_count": end.step_count,
        "wall_s": round(end.wall_s, 3),
        "effective_share": end.report.account.effective_share,
        "planned_fault_count": end.planned_count,
        "injected_fault_count": end.injected_count,
        "named_fault_count": accuracy.named_count if accuracy else 0,
        "recoveries": [
            {
                "kind": incident.injected.kind if incident.injected else None,
                "rank": incident.injected.rank if incident.injected else None,
                "component": incident.cause.component,
                "trouble": incident.verdict.trouble,
                "named_ranks": incident.verdict.ranks,
                "recovery_s": recovery_s(incident),
                "lost_s": incident.lost_s,
            }
            for incident in end.report.incidents
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _show_rich(end: DemoEnd) -> None:
    from rich.console import Console
    from rich.text import Text

    from everstep.cli.report_rich import show_report

    console = Console(highlight=False, emoji=False)
    show_report(console, Report(runs=(end.report,)))
    *lines, last = end_lines(end)
    console.print()
    for line in lines:
        console.print(Text(line))
    console.print(Text(last, style="bold green" if end.identical else "bold red"))
