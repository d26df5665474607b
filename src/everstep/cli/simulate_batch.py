"""Plays variants over seeds on all cores, and puts each variant's outcomes together."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import TimeoutError, active_children, get_context
from multiprocessing.pool import IMapIterator

from everstep.cli.simulate_play import play
from everstep.domain.errors import WorldError
from everstep.planning.efficiency import Recovery, exact_share
from everstep.sim.montecarlo import Summary, summarise
from everstep.sim.outcome import Outcome
from everstep.sim.scenario import Scenario

_NICE = 5
_LOOK_S = 2.0
_SPAWN_WORTH_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table."""

    label: str
    scenario: Scenario


def play_all(
    variants: Sequence[Variant],
    seeds: range,
    *,
    jobs: int = 0,
    tell: Callable[[int, int], None] = lambda _done, _count: None,
) -> tuple[Summary, ...]:
    """Every variant over the same seeds, so that they differ by nothing but their settings.

    Args:
        jobs: processes; 0 for one on each core.
        tell: hears after each run how many of how many are done.
    """
    tasks = [(variant.scenario, seed) for variant in variants for seed in seeds]
    outcomes = []
    for outcome in _outcomes(tasks, jobs or os.cpu_count() or 1):
        outcomes.append(outcome)
        tell(len(outcomes), len(tasks))
    count = len(seeds)
    return tuple(
        summarise(
            variant.label,
            variant.scenario,
            outcomes[number * count : (number + 1) * count],
            exact_share=exact_of(variant.scenario),
        )
        for number, variant in enumerate(variants)
    )


def exact_of(scenario: Scenario) -> float:
    """The exact formula for the scenario's own means; it knows no spares, no heat and no late detection."""
    recovery = Recovery(mtbf_s=scenario.mtbf_s, pause_s=scenario.checkpoint_pause_s, restart_s=scenario.restart_mean_s)
    return exact_share(interval_s=scenario.checkpoint_interval_s, recovery=recovery)


def _outcomes(tasks: Sequence[tuple[Scenario, int]], jobs: int) -> Iterator[Outcome]:
    if jobs == 1 or len(tasks) < _SPAWN_WORTH_RUNS:
        yield from map(_play, tasks)
        return
    with get_context("spawn").Pool(min(jobs, len(tasks)), initializer=_begin_process) as pool:
        begun = {process.pid for process in active_children()}
        results = pool.imap(_play, tasks)
        for _ in tasks:
            yield _next(results, begun)
        # leaving the block ends the processes, whatever they do


def _next(results: "IMapIterator[Outcome]", begun: set[int | None]) -> Outcome:
    """The next result. The pool replaces a process that dies, and would wait for its result for ever.

    Raises:
        WorldError: a process has died.
    """
    while True:
        try:
            return results.next(timeout=_LOOK_S)
        except TimeoutError:
            if begun - {process.pid for process in active_children()}:
                raise WorldError(
                    "a process of the simulation was ended from outside, perhaps for want of memory: try --jobs 1"
                ) from None


def _begin_process() -> None:
    """Leave the cores to others first, and Ctrl-C to the process that was started by hand."""
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _play(task: tuple[Scenario, int]) -> Outcome:
    return play(*task)
