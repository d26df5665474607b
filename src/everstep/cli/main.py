"""The `everstep` command: finds the subcommand, and turns its errors into one sentence and an exit code."""

import argparse
import importlib
import logging
import sys
import traceback
from typing import NoReturn

import everstep
from everstep.domain.errors import EverstepError, ExitCode

_EXAMPLES = "examples:\n  everstep demo\n  everstep run --nproc-per-node 8 train.py\n  everstep report everstep-runs/*"
_COMMANDS = ("run", "demo", "report", "checkpoints", "plan", "diagnose", "simulate")


class _Parser(argparse.ArgumentParser):
    """argparse ends with 2 on a wrong flag, which schedulers can't tell from a shell's own error."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"everstep: {message}; see {self.prog} --help\n")


def parser(commands: tuple[str, ...] = _COMMANDS) -> argparse.ArgumentParser:
    """The whole command line, or that of a few commands: importing each one's module takes most of the time."""
    top = _Parser(
        prog="everstep",
        description="Keeps large synchronous PyTorch training productive.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"everstep {everstep.__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="command", required=True, parser_class=_Parser)
    for name in commands:
        module = importlib.import_module(f"everstep.cli.{name}")
        module.add_parser(subparsers)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and give the exit code."""
    logging.basicConfig(level=logging.WARNING, format="everstep: %(message)s")
    first = (sys.argv[1:] if arguments is None else arguments)[:1]
    args = parser(tuple(name for name in _COMMANDS if first == [name]) or _COMMANDS).parse_args(arguments)
    try:
        code = importlib.import_module(f"everstep.cli.{args.command}").run(args)
    except EverstepError as error:
        sys.stderr.write(f"everstep: {error}\n")
        return int(error.exit_code)
    except Exception:  # outermost frame
        sys.stderr.write(traceback.format_exc())
        sys.stderr.write("everstep: this is a defect of everstep; please report it with the lines above\n")
        return int(ExitCode.INTERNAL)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
