"""Wires the real coordinator and policy to a simulated cluster and plays one run; safe to call in a spawned process."""

import gc
from collections.abc import Callable, Sequence

from everstep.domain.codec import Entry
from everstep.domain.commands import Command
from everstep.domain.events import Event
from everstep.policy.recovery import Job
from everstep.ports import Ledger
from everstep.runtime.coordinator import Coordinator, CoordinatorPorts
from everstep.sim.cluster import Cluster
from everstep.sim.outcome import Outcome, OutcomeFold
from everstep.sim.scenario import Scenario


class _NoLedger:
    """For runs of which only the outcome matters."""

    def read(self) -> Sequence[Entry]:
        return ()

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        return


def play(scenario: Scenario, seed: int, ledger: Ledger | None = None) -> Outcome:
    """One run. Equal scenarios and seeds give equal outcomes and equal ledgers.

    Args:
        ledger: takes every entry; None keeps none.
    """
    fold = OutcomeFold(scenario, seed=seed)
    play_into(scenario, seed, ledger or _NoLedger(), fold.hear)
    return fold.outcome()


def play_into(scenario: Scenario, seed: int, ledger: Ledger, listen: Callable[[Event | Command], None]) -> None:
    """One run into a ledger. `listen` hears every entry after it was written."""
    cluster = Cluster(scenario, seed=seed)
    job = Job(scenario.recovery())

    def hear(body: Event | Command) -> None:
        cluster.hear(body)
        listen(body)

    coordinator = Coordinator(job, CoordinatorPorts(ledger=ledger, channel=cluster, clock=cluster.clock, listen=hear))
    was_enabled = gc.isenabled()
    gc.disable()  # a run makes millions of short-lived objects and few cycles
    try:
        cluster.play(coordinator.take, wants_ticks=lambda: job.wants_ticks)
    finally:
        if was_enabled:
            gc.enable()
