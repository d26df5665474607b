"""A simulation in colour: the plain lines themselves, so that a terminal and a pipe say the same."""

import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from everstep.cli.simulate_text import HEAD, NOTE, simulation_lines
from everstep.sim.montecarlo import Summary

_STYLES = {"d": "red", "r": "magenta", "s": "cyan", "c": "blue", "w": "bright_black", "·": "yellow"}
_BAR = re.compile(r"  ([drscw·]+) \d+\.\d %$")
_ORIGINS = {"measured": "green", "published": "cyan", "rule": "blue", "assumed": "yellow", "given": "magenta"}


def show_simulation(console: Console, rows: Sequence[Summary]) -> None:
    """The whole output."""
    for line in simulation_lines(rows):
        console.print(_styled(line), soft_wrap=True)


def _styled(line: str) -> Text:
    text = Text(line)
    if line.startswith(("Simulated:", HEAD[0], "cause ", "Lost time", "Where the delays")):
        text.stylize("bold")
    if line == NOTE:
        text.stylize("dim")
    if match := _BAR.search(line):
        for place in range(match.start(1), match.end(1)):
            text.stylize(_STYLES[line[place]], place, place + 1)
    for origin, style in _ORIGINS.items():
        if match := re.search(rf" s  {origin}  ", line):
            text.stylize(style, match.start(), match.end())
    return text
