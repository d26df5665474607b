"""`everstep report`: where a run's time went, what interrupted it and what that cost; it chooses the form of it."""

import argparse
import gc
import os
import sys
import time
from itertools import islice
from pathlib import Path

from everstep.adapters.ledger_file import ledger_path, read_entries
from everstep.domain.errors import ConfigError
from everstep.policy.incidents import Incident
from everstep.views.report import Report, RunFold, RunReport
from everstep.views.report_tables import CSV_TABLES, incident_json, report_csv, report_json
from everstep.views.report_text import incident_lines, report_lines

_BATCH_ENTRIES = 50_000
_PATIENCE_S = 2.0
"""After this long, a person at a terminal is told what is being read."""
_DESCRIPTION = """\
Say where a run's time went, what interrupted it, and what each interruption cost.

Effective training time is productive time divided by elapsed time. Every second of the run is in exactly one
category. Works on a run that is still going."""
_EPILOG = """\
examples:
  everstep report everstep-runs/latest                       one run, in full
  everstep report everstep-runs/latest --incident a0003-1    one incident, with its timeline and evidence
  everstep report everstep-runs/*                            a fleet: one row per run, and the total
  everstep report RUN --json | jq .runs[0].parts_s           for a script; keys carry their units
  everstep report RUN... --csv                               one row per run
  everstep report RUN... --csv --table incidents             one row per incident
"""

_Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def add_parser(subparsers: "_Subparsers[argparse.ArgumentParser]") -> None:
    """Add the `report` command."""
    parser = subparsers.add_parser(
        "report",
        help="say where a run's time went and what interrupted it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directory, or its ledger.jsonl")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON document with everything")
    form.add_argument("--csv", action="store_true", help="a table as CSV; --table says which")
    parser.add_argument("--table", choices=CSV_TABLES, default=None, help="the table of --csv (default: runs)")
    parser.add_argument("--incident", metavar="ID", help="tell this incident only, with its timeline and evidence")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal (the default)"
    )


def run(args: argparse.Namespace) -> int:
    """Read the ledgers and write the report to stdout.

    Raises:
        ConfigError: a path or an incident's id is wrong.
        EvidenceError: a ledger is empty, damaged or from a newer everstep.
        WorldError: a ledger can't be read.
    """
    if args.table and not args.csv:
        raise ConfigError("--table chooses among the tables of --csv: add --csv, or leave --table out")
    if args.incident and args.csv:
        raise ConfigError("--incident has no CSV form: use --json, or --csv --table incidents for all of them")
    report = Report(runs=tuple(_read(path) for path in args.runs))
    try:
        _write(report, args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _read(given: Path) -> RunReport:
    path = ledger_path(given)
    name = str(given if given.is_dir() else given.parent)
    fold = RunFold(name)
    gc.disable()  # a fold makes millions of short-lived objects and no cycles: it takes a third less time
    try:
        _fold_all(fold, path, name)
    finally:
        gc.enable()
    return fold.report()


def _fold_all(fold: RunFold, path: Path, name: str) -> None:
    """Read a ledger into the fold, with a word on stderr for a person who waits."""
    entries = read_entries(path)
    began_s, count, is_shown = time.monotonic(), 0, False
    while taken := fold.take_all(islice(entries, _BATCH_ENTRIES)):
        count += taken
        if sys.stderr.isatty() and time.monotonic() - began_s > _PATIENCE_S:
            is_shown = True
            sys.stderr.write(f"\r\x1b[Kreading {name}: {count:,} entries")
            sys.stderr.flush()
    if is_shown:
        sys.stderr.write("\r\x1b[K")


def _write(report: Report, args: argparse.Namespace) -> None:
    incident = _find(report, args.incident) if args.incident else None
    if args.json:
        sys.stdout.write(report_json(report) if incident is None else incident_json(incident))
    elif args.csv:
        sys.stdout.write(report_csv(report, args.table or "runs"))
    elif args.color == "always" or (args.color == "auto" and sys.stdout.isatty()):
        _write_rich(report, incident, is_forced=args.color == "always")
    else:
        lines = report_lines(report) if incident is None else incident_lines(incident)
        sys.stdout.write("\n".join(lines).lstrip("\n") + "\n")


def _write_rich(report: Report, incident: Incident | None, *, is_forced: bool) -> None:
    from rich.console import Console  # only a terminal pays for it

    from everstep.cli.report_rich import show_incident, show_report

    console = Console(force_terminal=is_forced or None, highlight=False, emoji=False)
    if incident is None:
        show_report(console, report)
    else:
        show_incident(console, incident)


def _find(report: Report, wanted: str) -> Incident:
    """The incident with this id.

    Raises:
        ConfigError: none has it, or more than one run does.
    """
    found = [incident for run in report.runs for incident in run.incidents if incident.id == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--incident {wanted}: {len(found)} of these runs have one; give one run directory")
    known = [incident.id for run in report.runs for incident in run.incidents]
    listed = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    raise ConfigError(
        f"--incident {wanted}: there is no such incident; " + (f"known: {listed}" if known else "the run had none")
    )
