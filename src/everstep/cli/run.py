"""`everstep run`: the drop-in for torchrun."""

import argparse
import contextlib
import sys

from everstep.cli.console import RunConsole, sayer
from everstep.cli.launch import run_job
from everstep.cli.run_arguments import add_parser, plan_run
from everstep.domain.commands import Command
from everstep.domain.events import Event

__all__ = ["add_parser", "run"]


def run(args: argparse.Namespace) -> int:
    """Run the job and give its exit code (see `domain.errors.ExitCode`)."""
    plan = plan_run(args)
    say = sayer()
    hint = f"see `everstep report {plan.run_dir}` for where the time went"
    console = RunConsole(say, quiet=plan.quiet, report_hint=hint)
    heard = 0

    def listen(body: Event | Command) -> None:
        nonlocal heard
        heard += 1
        console.hear(body)

    if not plan.quiet:
        say(f"ledger, logs and evidence go to {plan.run_dir}", "quiet")
        for notice in plan.notices:
            say(notice, "quiet")
    end = run_job(plan, listen=listen, tell=lambda text: None if plan.quiet else say(text, "quiet"))
    if not heard:
        say(f"{plan.run_dir} holds a run that is done already ({end.summary}); give another --run-dir", "plain")
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    return int(end.exit_code)
