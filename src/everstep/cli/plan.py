"""`everstep plan`: how often a run will fail, what will be left of its time, and what it needs; it chooses the form."""

import argparse
import os
import sys
from pathlib import Path

from everstep.cli.plan_inputs import base_layers, combine, fit_layers, flag_layer, nearest
from everstep.domain.errors import ConfigError, WorldError
from everstep.planning.keys import KEYS
from everstep.planning.plan import evaluate
from everstep.planning.presets import PRESETS
from everstep.planning.quantities import quantity, unit_of
from everstep.views.plan_text import compare_json, compare_lines, plan_json, plan_lines

_DESCRIPTION = """\
Say how often a run will fail, what will be left of its time, and what it needs: checkpoint interval, spare hosts, days,
energy, power. Every figure stands beside its formula and source, and a letter marks what was assumed.

A flag beats a fit, a fit beats the file, the file beats the preset. A bare number has the unit at the end of its key;
texts such as '5 min', '2 TB/s', '405B' or '95 %' are taken as well."""
_EPILOG = f"""\
presets: {", ".join(PRESETS)}

examples:
  everstep plan llama3-405b                                    16,384 GPUs for 54 days
  everstep plan llama3-405b --checkpoint-pause-s 1 --restart-s 60
  everstep plan --gpu-count 1024 --gpu-days-per-failure 3748
  everstep plan mine.toml --html plan.html                     with plots, in one file
  everstep plan --compare today.toml tomorrow.toml
  everstep plan --gpu-count 2048 --fit-sacct sacct.txt         the failure rate from your own cluster
  everstep plan llama3-405b --json | jq .figures.effective_share.value
"""
_ALIASES = {"gpu_count": "--gpus"}
_GROUPS = {
    "scale": "scale",
    "failures": "failures (the rate in one way; without any: a prior with its published range)",
    "recovery": "checkpoints and recovery",
    "spares": "spare hosts",
    "model": "model and storage",
    "power": "power",
}

_Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def add_parser(subparsers: "_Subparsers[argparse.ArgumentParser]") -> None:
    """Add the `plan` command."""
    parser = subparsers.add_parser(
        "plan",
        help="say how often a run will fail, what is left of its time, and what it needs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("base", nargs="?", metavar="PRESET|FILE.toml", help="where to start from")
    parser.add_argument("--compare", nargs=2, metavar=("A.toml", "B.toml"), help="two files or presets side by side")
    form = parser.add_argument_group("form")
    form.add_argument("--json", action="store_true", help="one JSON document with everything")
    form.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page with plots")
    form.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal")
    form.add_argument("--name", help="the plan's title")
    fits = parser.add_argument_group("fits: the failure rate from your own records, with its confidence interval")
    fits.add_argument(
        "--fit-ledger",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="ledgers of everstep run; also the measured delays",
    )
    fits.add_argument("--fit-sacct", type=Path, metavar="FILE", help="output of Slurm's sacct -P")
    fits.add_argument("--fit-trace", type=Path, metavar="FILE", help="host faults as JSON, as StepFun published them")
    fits.add_argument("--trace-host-count", type=_trace_hosts, metavar="N", help="all hosts of the trace")
    fits.add_argument("--trace-days", type=_days, metavar="N", help="how long it watched (default: to its last entry)")
    fits.add_argument("--confidence", type=_confidence, metavar="SHARE", help="of the interval (default: 0.95)")
    groups = {group: parser.add_argument_group(title) for group, title in _GROUPS.items()}
    for key in KEYS:
        names = [*([_ALIASES[key.name]] if key.name in _ALIASES else []), f"--{key.name.replace('_', '-')}"]
        told = f"{key.meaning}; {unit_of(key.name)[2]}".replace("%", "%%")
        if key.assumed is not None:
            told += f" (assumed: {key.assumed:g})"
        groups[key.group].add_argument(*names, dest=key.name, metavar="N", help=told)
    _suggest_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate the plan and write it to stdout.

    Raises:
        ConfigError: a flag, key or value is wrong, or a file can't be read.
        EvidenceError: a record to fit is not what it should be.
        WorldError: the page can't be written.
    """
    try:
        if args.compare:
            _compare(args)
        else:
            _plan(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _plan(args: argparse.Namespace) -> None:
    layers = [*base_layers(args.base), *fit_layers(args), flag_layer(args)]
    notes = tuple(note for layer in layers for note in layer.notes)
    report = evaluate(combine(layers))
    if args.html:
        from everstep.views.plan_html import plan_html

        _write_page(args.html, plan_html(report, notes))
        notes = (*notes, f"the plots are in {args.html}")
    if args.json:
        sys.stdout.write(plan_json(report, notes))
    elif _is_coloured(args):
        from everstep.cli.plan_rich import show_plan

        show_plan(report, notes, is_forced=args.color == "always")
    else:
        sys.stdout.write("\n".join(plan_lines(report, notes)) + "\n")


def _compare(args: argparse.Namespace) -> None:
    if args.base or args.html or args.fit_ledger or args.fit_sacct or args.fit_trace:
        raise ConfigError("--compare takes two files or presets, and flags that hold for both: leave out the rest")
    flags = flag_layer(args)
    first, second = (evaluate(combine([*base_layers(given), flags])) for given in args.compare)
    if args.json:
        sys.stdout.write(compare_json(first, second))
    elif _is_coloured(args):
        from everstep.cli.plan_rich import show_comparison

        show_comparison(first, second, is_forced=args.color == "always")
    else:
        sys.stdout.write("\n".join(compare_lines(first, second)) + "\n")


def _is_coloured(args: argparse.Namespace) -> bool:
    return args.color == "always" or (args.color == "auto" and sys.stdout.isatty())


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise WorldError(f"--html {path}: {error.strerror}; give a file that can be written") from error


def _confidence(text: str) -> float:
    try:
        value = quantity("confidence_share", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 0.5 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text}: it must be from 0.5 to below 1, such as 0.95")
    return value


def _days(text: str) -> float:
    try:
        value = quantity("trace_days", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: it must be above 0")
    return value


def _trace_hosts(text: str) -> int:
    try:
        value = quantity("trace_host_count", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number of hosts, 1 or more")
    return int(value)


def _suggest_flags(parser: argparse.ArgumentParser) -> None:
    """Let an unknown flag end with the flag that was most likely meant, such as `--restart-s` for `--restart`."""
    known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    parse = parser.parse_known_args

    def parse_or_suggest(
        args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, rest = parse(args, namespace)
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("--") and (near := nearest(flag, known)):
                parser.error(f"unknown flag {flag}: did you mean {near}?")
        return found, rest

    parser.parse_known_args = parse_or_suggest  # type: ignore[method-assign, assignment]
