"""Shows runs while they go: a moving picture on a terminal, plain lines in a pipe. It decides no wording."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from everstep.domain.commands import Command
from everstep.domain.events import Event, StepsFinished
from everstep.views.live import LiveRun, Setback, sparkline

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Group, RenderableType

Listener = Callable[[Event | Command], None]
PLAIN_EVERY_S = 5.0
_FRAMES_PER_S = 4
_SPARK_CELLS = 48
_SETBACKS_SHOWN_MAX = 8


class LiveView(Protocol):
    """Shows one run at a time."""

    def show(self, title: str, *, until: int, fault_count: int) -> "AbstractContextManager[Listener]":
        """Show a run for the length of a `with` block; what it gives hears the ledger."""
        ...


def live_view(stream: TextIO) -> LiveView:
    """The view that suits the stream."""
    return RichView(stream) if stream.isatty() else PlainView(stream)


class PlainView:
    """One line for each fault and recovery, and one every few seconds of the run's clock."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def show(self, title: str, *, until: int, fault_count: int) -> Iterator[Listener]:
        """See `LiveView`."""
        run = LiveRun(until=until, fault_count=fault_count)
        said_at_s = 0.0

        def hear(body: Event | Command) -> None:
            nonlocal said_at_s
            for sentence in run.hear(body):
                self._say(f"{body.at_s:6.1f} s  {sentence}")
            if isinstance(body, StepsFinished) and body.at_s >= said_at_s + PLAIN_EVERY_S:
                said_at_s = body.at_s
                self._say(f"{body.at_s:6.1f} s  {run.summary()}")

        self._say(title)
        yield hear

    def _say(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()


class RichView:
    """A picture that is drawn anew a few times a second, so that its clock moves on while no news comes."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console: Console = Console(file=stream, highlight=False, emoji=False)

    @contextmanager
    def show(self, title: str, *, until: int, fault_count: int) -> Iterator[Listener]:
        """See `LiveView`."""
        from rich.live import Live

        run = LiveRun(until=until, fault_count=fault_count)
        picture = _Picture(title=title, run=run, lock=threading.Lock(), began_s=time.monotonic())

        def hear(body: Event | Command) -> None:
            with picture.lock:
                run.hear(body)

        with Live(picture, console=self._console, refresh_per_second=_FRAMES_PER_S, redirect_stderr=False):
            yield hear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """What Live draws, from its own thread."""

    title: str
    run: LiveRun
    lock: threading.Lock
    began_s: float

    def __rich__(self) -> "Group":
        from rich.console import Group

        with self.lock:
            return Group(*_rows(self.title, self.run, time.monotonic() - self.began_s))


def _rows(title: str, run: LiveRun, elapsed_s: float) -> "list[RenderableType]":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    over = run.state in ("done", "ended")
    elapsed_s = run.elapsed_s if over else elapsed_s
    head = Text.assemble((title, "bold"), (f"   {elapsed_s:.0f} s", "dim"))
    bar = Table.grid(padding=(0, 2))
    style = "green" if run.step >= run.until else "cyan"
    bar.add_row(
        ProgressBar(total=run.until, completed=run.step, width=_SPARK_CELLS, complete_style=style),
        Text(f"step {run.step} of {run.until}"),
        Text(f"attempt {run.attempt}: {run.state}", style=_state_style(run.state)),
    )
    rows: list[RenderableType] = [head, bar]
    if run.loss is not None:
        loss = Text.assemble((sparkline(run.losses, cells=_SPARK_CELLS).ljust(_SPARK_CELLS), "blue"))
        rows.append(loss + Text(f"  loss {run.loss:.3f}"))
    if run.fault_count:
        rows.append(
            Text(
                f"faults injected {run.injected_count} of {run.fault_count}   recovered {run.recovered_count}   "
                f"effective training time {run.effective_share():.0%}"
            )
        )
    rows += [_setback_row(setback) for setback in run.setbacks[-_SETBACKS_SHOWN_MAX:]]
    return [*rows, Text()]


def _state_style(state: str) -> str:
    if state in ("training", "saving", "done"):
        return "green"
    return "red" if "evidence" in state or state == "ended" else "yellow"


def _setback_row(setback: Setback) -> "RenderableType":
    from rich.text import Text

    is_over = setback.recovered_s is not None
    recovered = f"training again after {setback.recovered_s:.1f} s" if is_over else "recovering …"
    return Text.assemble(
        ("  ✔ " if is_over else "  ✘ ", "green" if is_over else "bold red"),
        f"step {setback.step}: {setback.what}",
        (f" → {setback.verdict}, found in {setback.found_s:.1f} s", "red"),
        (f" → {recovered}", "green" if is_over else "yellow"),
    )
