"""`everstep simulate`: plays a training run of weeks on a simulated cluster, with the real policy, over seeds."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.adapters.ledger_file import LEDGER_NAME, LedgerFile
from everstep.cli.simulate_batch import Variant, play_all
from everstep.cli.simulate_html import simulation_html
from everstep.cli.simulate_play import play
from everstep.cli.simulate_scenario import Request, variants
from everstep.cli.simulate_text import simulation_json, simulation_lines
from everstep.domain.commands import Command
from everstep.domain.errors import ConfigError, ExitCode, WorldError
from everstep.domain.events import Event

_PATIENCE_S = 2.0
_DESCRIPTION = """\
Play a training run of weeks on a simulated cluster: the real recovery policy answers every failure, and the run's time
is accounted for as `everstep report` does. Every figure is simulated; each delay is listed with where it comes from."""
_EPILOG = """\
examples:
  everstep simulate llama3                                          54 days of 16,384 GPUs, as published
  everstep simulate llama3 --compare everstep --compare torchrun    the same failures, other ways to recover
  everstep simulate 100k --sweep checkpoint_interval_s=60,120,300   a setting's effect
  everstep simulate llama3 --seeds 200 --json | jq .rows            over seeds, for a script
  everstep simulate stepfun --trace fault_trace.json                replay recorded faults
  everstep simulate mine.toml --ledger runs/simulated               then: everstep report runs/simulated
a file holds keys such as (everything else as in the preset it starts from):
  preset = "llama3"
  gpus = 32768
  lemon_share = 0.012
"""

_Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def add_parser(subparsers: "_Subparsers[argparse.ArgumentParser]") -> None:
    """Add the `simulate` command."""
    parser = subparsers.add_parser(
        "simulate",
        help="play a run of weeks on a simulated cluster with the real policy",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("scenario", metavar="SCENARIO", help="llama3, 100k, stepfun, or a TOML file")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds (default: 1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B,…", help="one row for each value; several combine"
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        choices=("everstep", "torchrun"),
        help="the same failures with everstep's delays, or with timeouts of 600 s and 1800 s and a requeue",
    )
    parser.add_argument(
        "--delays", default="", metavar="WHICH", help="published (the preset's), everstep, or a result of `make bench`"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded faults in StepFun's JSON format")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one for each core)")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal (the default)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document with everything")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables and the plot as one HTML page")
    parser.add_argument("--ledger", type=Path, metavar="DIR", help="keep the first seed's ledger, for everstep report")


def run(args: argparse.Namespace) -> int:
    """Play, and write the table to stdout.

    Raises:
        ConfigError: a flag, key or value is wrong.
        EvidenceError: the trace or the bench result is malformed.
        WorldError: a file can't be read or written.
    """
    if args.seeds < 1 or args.jobs < 0:
        raise ConfigError("--seeds takes a number of at least 1, and --jobs one of at least 0")
    request = Request(
        scenario=args.scenario,
        settings=tuple(args.set),
        sweeps=tuple(args.sweep),
        compare=tuple(dict.fromkeys(args.compare)),
        delays=args.delays,
        trace=args.trace,
    )
    chosen = variants(request)
    if args.ledger is not None:
        _keep_ledger(chosen[0], args.seed, args.ledger)
    try:
        rows = play_all(chosen, range(args.seed, args.seed + args.seeds), jobs=args.jobs, tell=_progress())
    except KeyboardInterrupt:
        sys.stderr.write("\neverstep: stopped by Ctrl-C; nothing was written\n")
        return ExitCode.PREEMPTED
    if args.html is not None:
        _write(args.html, simulation_html(rows))
    if args.json:
        sys.stdout.write(json.dumps(simulation_json(rows), indent=1) + "\n")
    elif args.color == "always" or (args.color == "auto" and sys.stdout.isatty()):
        from rich.console import Console  # only a terminal pays for it

        from everstep.cli.simulate_rich import show_simulation

        show_simulation(Console(force_terminal=args.color == "always" or None, highlight=False, emoji=False), rows)
    else:
        sys.stdout.write("\n".join(simulation_lines(rows)) + "\n")
    return 0


def _progress() -> Callable[[int, int], None]:
    """A word on stderr for a person who waits longer than a moment."""
    if not sys.stderr.isatty():
        return lambda _done, _count: None
    began_s = time.monotonic()

    def tell(done: int, count: int) -> None:
        if done == count:
            sys.stderr.write("\r\x1b[K")
        elif time.monotonic() - began_s > _PATIENCE_S:
            sys.stderr.write(f"\r\x1b[Kplayed {done:,} of {count:,} runs")
        sys.stderr.flush()

    return tell


def _keep_ledger(variant: Variant, seed: int, folder: Path) -> None:
    if (folder / LEDGER_NAME).exists():
        raise ConfigError(f"--ledger {folder}: there is a ledger already; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorldError(f"--ledger {folder}: can't be made: {error.strerror}") from error
    with LedgerFile(folder) as ledger:
        play(variant.scenario, seed, _Unsynced(ledger))


class _Unsynced:
    """A ledger that is not synced at each decision: a simulation that is lost is played again."""

    def __init__(self, ledger: LedgerFile) -> None:
        self._ledger = ledger
        self.read = ledger.read

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        self._ledger.append(bodies, wall=wall, durable=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorldError(f"--html {path}: can't be written: {error.strerror}") from error
