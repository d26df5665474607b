"""Plays variants over seeds on all cores, and puts each variant's outcomes together."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from everstep.cli.simulate_play import play
from everstep.planning.efficiency import Recovery, exact_share
from everstep.sim.montecarlo import Summary, summarise
from everstep.sim.outcome import Outcome
from everstep.sim.scenario import Scenario

_NICE = 5
_SPAWN_WORTH_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table."""

    label: str
    scenario: Scenario


def play_all(variants: Sequence[Variant], seeds: range, *, jobs: int = 0) -> tuple[Summary, ...]:
    """Every variant over the same seeds, so that they differ by nothing but their settings.

    Args:
        jobs: processes; 0 for one on each core.
    """
    tasks = [(variant.scenario, seed) for variant in variants for seed in seeds]
    outcomes = list(_outcomes(tasks, jobs or os.cpu_count() or 1))
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
    with ProcessPoolExecutor(
        max_workers=min(jobs, len(tasks)), mp_context=get_context("spawn"), initializer=_be_nice
    ) as pool:
        yield from pool.map(_play, tasks, chunksize=max(1, len(tasks) // (8 * jobs)))


def _be_nice() -> None:
    os.nice(_NICE)


def _play(task: tuple[Scenario, int]) -> Outcome:
    return play(*task)
