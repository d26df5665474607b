"""torchfrtrace's flags on `everstep diagnose`, for those who change one word: meant as there, or told in a sentence."""

import argparse
from collections.abc import Iterator

from everstep.domain.errors import ConfigError

_WITHOUT_MEANING = {
    "allow_incomplete_ranks": "--allow-incomplete-ranks (missing ranks are always fine, and are evidence)",
    "verbose": "--verbose (--json has everything)",
    "mismatch_cap": "--mismatch_cap (nothing stops at a number of mismatches)",
}


def add_torchfrtrace_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of torch 2.13's torchfrtrace, in its own spelling."""
    group = parser.add_argument_group("torchfrtrace's flags")
    add = group.add_argument
    add("-p", "--prefix", default="", help="read only files with this in their names; the rank follows it")
    add("-j", "--just_print_entries", action="store_true", help="print what was recorded, one line each, and judge not")
    add("--selected-ranks", nargs="+", type=int, metavar="RANK", help="with -j: only these ranks")
    add("--pg-filters", nargs="+", metavar="GROUP", help="with -j: only groups of these names or descriptions")
    add("--print_stack_trace", action="store_true", help="with -j: where each was called from")
    add("--allow-incomplete-ranks", action="store_true", help="accepted; missing ranks are always fine")
    add("-v", "--verbose", action="store_true", help="accepted")
    add("--mismatch_cap", type=int, default=None, metavar="N", help="accepted; there is no cap")
    add("-o", "--output", default=None, help=argparse.SUPPRESS)
    add("--transform-ft", action="store_true", help=argparse.SUPPRESS)
    add("--group-world-size", default=None, help=argparse.SUPPRESS)


def notices(args: argparse.Namespace) -> Iterator[str]:
    """Sentences about flags that are accepted and change nothing.

    Raises:
        ConfigError: a flag asks for something that only torchfrtrace does.
    """
    if args.output is not None:
        raise ConfigError("-o writes torchfrtrace's own pickle; use --json > FILE for a script, --html FILE for a page")
    if args.transform_ft or args.group_world_size is not None:
        raise ConfigError("--transform-ft is not supported: give the folder of one torchft replica group at a time")
    if not args.just_print_entries and (args.selected_ranks or args.pg_filters):
        raise ConfigError("--selected-ranks and --pg-filters choose what -j prints; a verdict always takes all ranks")
    given = [text for name, text in _WITHOUT_MEANING.items() if getattr(args, name)]
    if given:
        yield f"without meaning here: {', '.join(given)}"
