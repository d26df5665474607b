"""What `everstep run` says on the terminal: one line for each thing that a person would want to know, on stderr."""

import sys
from collections.abc import Callable

from everstep.domain.commands import Command, DismissSuspicion, FinishJob, RecordVerdict, StartWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointDelayed,
    CheckpointFailed,
    CheckpointRefused,
    CheckpointRestored,
    CheckpointSaved,
    Event,
    FaultInjected,
    RunResumed,
    StallSuspected,
    WorkersStarted,
)

Say = Callable[[str, str], None]
"""Writes a sentence in a style: `plain`, `good`, `bad` or `quiet`."""


def sayer() -> Say:
    """Coloured on a terminal, plain in a pipe."""
    if not sys.stderr.isatty():

        def plain(text: str, style: str) -> None:
            sys.stderr.write(f"everstep: {text}\n")
            sys.stderr.flush()

        return plain
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    styles = {"good": "green", "bad": "bold red", "quiet": "dim", "plain": ""}

    def coloured(text: str, style: str) -> None:
        console.print(Text("everstep ", style="bold cyan") + Text(text, style=styles[style]))

    return coloured


class RunConsole:
    """Hears the ledger and says what matters.

    Args:
        say: how to say it.
        quiet: only what went wrong.
        report_hint: said before the end, so that the end itself comes last.
    """

    def __init__(self, say: Say, *, quiet: bool, report_hint: str) -> None:
        self._say = say
        self._quiet = quiet
        self._report_hint = report_hint
        self._is_behind = False

    def hear(self, body: Event | Command) -> None:
        match body:
            case RecordVerdict():
                self._verdict(body)
            case CheckpointRefused():
                self._say(f"checkpoint {body.path} is not used: {body.reason}", "bad")
            case CheckpointFailed():
                self._is_behind = True
                self._say(f"the save of step {body.step} failed and training goes on: {body.reason}", "bad")
            case CheckpointDelayed():
                self._is_behind = self._is_behind or body.attempt > 0
                self._say(body.sentence, "bad")
            case CheckpointSaved() if self._is_behind:
                self._is_behind = False
                self._say(f"checkpoints are durable again: step {body.step}, {body.path}", "good")
            case FinishJob():
                self._end(body)
            case _ if not self._quiet:
                self._progress(body)

    def _progress(self, body: Event | Command) -> None:
        match body:
            case RunResumed():
                self._say(f"continuing a run that was left {body.gap_s:.0f} s ago", "plain")
            case StartWorkers():
                why = "" if body.attempt == 1 else f"; {body.why}"
                self._say(f"attempt {body.attempt}: starting {body.world_size} workers{why}", "plain")
            case WorkersStarted():
                how = "warm" if body.warm else "cold"
                self._say(
                    f"attempt {body.attempt}: {len(body.pids)} workers started {how} in {body.spawn_s:.2f} s", "quiet"
                )
            case FaultInjected():
                self._say(f"injected {body.fault.kind} into rank {body.fault.rank} at step {body.step}", "quiet")
            case StallSuspected():
                silence_s = body.at_s - body.since_s
                self._say(f"no rank has moved for {silence_s:.1f} s ({body.learned_from}); taking evidence", "quiet")
            case DismissSuspicion():
                self._say(f"no hang (yet): {body.reason}", "quiet")
            case CheckpointRestored():
                self._say(f"resumed from step {body.step} ({body.path}) in {body.duration_s:.2f} s", "good")

    def _verdict(self, body: RecordVerdict) -> None:
        verdict = body.verdict
        where = f" [{verdict.where}]" if verdict.where and verdict.where not in verdict.reason else ""
        found_s = body.at_s - body.since_s
        self._say(
            f"{verdict.trouble.upper()}: {verdict.reason}{where} (found {found_s:.2f} s after the last progress)", "bad"
        )

    def _end(self, body: FinishJob) -> None:
        if not self._quiet:
            self._say(self._report_hint, "quiet")
        if body.exit_code is ExitCode.DONE:
            if not self._quiet:
                self._say(f"done: {body.summary}", "good")
            return
        if body.detail:
            sys.stderr.write(body.detail.rstrip("\n") + "\n")
        self._say(
            f"{body.exit_code.name.lower().replace('_', ' ')} (exit {int(body.exit_code)}): {body.summary}", "bad"
        )
