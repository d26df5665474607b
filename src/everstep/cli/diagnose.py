"""`everstep diagnose`: why a job does not move, from flight recorder dumps or a run directory; it chooses the form."""

import argparse
import os
import sys
import time
from pathlib import Path

from everstep.adapters.evidence.dump_entries import entries_of
from everstep.adapters.evidence.snapshot_request import is_live, request_snapshot
from everstep.cli.diagnosing import diagnose
from everstep.cli.torchfrtrace_flags import add_torchfrtrace_flags, notices
from everstep.domain.diagnosis import HangVerdict
from everstep.domain.errors import ConfigError, WorldError
from everstep.domain.verdicts import Trouble
from everstep.views.diagnosis_html import diagnosis_html
from everstep.views.diagnosis_text import diagnosis_json, diagnosis_lines
from everstep.views.entries_text import entries_header, entry_lines

_POLL_S = 1.0
_DESCRIPTION = """\
Say why a job does not move: which rank, what it does, and who waits for it.

Reads the flight recorder dumps of any torchrun job (pickle or JSON, format 2.1 to 2.10, any file prefix, missing ranks
allowed), or the evidence in a run directory of everstep run. Nothing in a dump is executed."""
_EPILOG = """\
examples:
  everstep diagnose /tmp/nccl_dumps                 where you typed `torchfrtrace /tmp/nccl_dumps`
  everstep diagnose dumps --json | jq .ranks        for a script
  everstep diagnose dumps --html hang.html          one file to send around
  everstep diagnose everstep-runs/latest            the newest incident of a run
  everstep diagnose dumps --follow                  again and again, while dumps come in
"""

_Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def add_parser(subparsers: "_Subparsers[argparse.ArgumentParser]") -> None:
    """Add the `diagnose` command."""
    parser = subparsers.add_parser(
        "diagnose",
        help="say why a job does not move, from its flight recorder dumps",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="folder or file of dumps, or run directory")
    parser.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="a run directory of everstep run; a live job is looked at now"
    )
    parser.add_argument("--world-size", type=int, default=None, help="ranks of the job, where dumps do not say")
    parser.add_argument("--json", action="store_true", help="one JSON document with everything")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with the picture")
    parser.add_argument("--follow", action="store_true", help="watch the paths, and say when the verdict changes")
    add_torchfrtrace_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Diagnose, and write the verdict to stdout.

    Raises:
        ConfigError: no path was given, or one does not exist or holds no dump.
        WorldError: the HTML file can't be written.
    """
    for sentence in notices(args):
        sys.stderr.write(f"everstep: {sentence}\n")
    if args.run and is_live(args.run):
        request_snapshot(args.run)  # its evidence becomes the newest incident of the run directory
    paths = [*args.paths, *([args.run] if args.run else [])]
    if not paths:
        raise ConfigError("name a folder of flight recorder dumps, or --run RUN_DIR")
    if args.world_size is not None and args.world_size < 1:
        raise ConfigError("--world-size counts ranks and starts at 1")
    try:
        if args.just_print_entries:
            _print_entries(paths, args)
        elif args.follow:
            _follow(paths, args)
        else:
            _write(diagnose(paths, world_size=args.world_size, prefix=args.prefix), args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print_entries(paths: list[Path], args: argparse.Namespace) -> None:
    print(entries_header())
    for one in entries_of(paths, prefix=args.prefix, ranks=args.selected_ranks):
        if isinstance(one, str):
            sys.stderr.write(f"everstep: {one}\n")
            continue
        rank, entries = one
        for line in entry_lines(rank, entries, groups=args.pg_filters, stacks=args.print_stack_trace):
            print(line)


def _write(verdict: HangVerdict, args: argparse.Namespace) -> None:
    text = diagnosis_json(verdict) if args.json else "\n".join(diagnosis_lines(verdict))
    print(text)
    if args.html:
        try:
            args.html.write_text(diagnosis_html(verdict), encoding="utf-8")
        except OSError as error:
            raise WorldError(f"{args.html} can't be written: {error.strerror}") from error


def _follow(paths: list[Path], args: argparse.Namespace) -> None:
    """Look once a second; diagnose when files have changed, until Ctrl-C."""
    seen: object = None
    said: HangVerdict | None = None
    try:
        while True:
            state = [_fingerprint(path) for path in paths]
            if state != seen:
                seen = state
                try:
                    verdict = diagnose(paths, world_size=args.world_size, prefix=args.prefix)
                except ConfigError as error:
                    sys.stderr.write(f"everstep: waiting: {error}\n")
                else:
                    if said is None or (verdict.trouble, verdict.ranks) != (said.trouble, said.ranks):
                        print(f"-- {time.strftime('%H:%M:%S')}")
                        _write(verdict, args)
                        sys.stdout.flush()
                    said = verdict
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        if said is not None and said.trouble is not Trouble.HEALTHY:
            sys.stderr.write("\n")


def _fingerprint(path: Path) -> list[tuple[str, int, int]]:
    if not path.exists():
        return []
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return [(str(one), stat.st_size, stat.st_mtime_ns) for one in files if (stat := _stat(one)) is not None]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
