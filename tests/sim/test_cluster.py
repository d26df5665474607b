"""Invariants of the coarse world: random clusters, failures and settings, checked after every entry of the ledger.

`make sim` plays 200 seeds, `make test` 20 (EVERSTEP_SIM_SEEDS). A seed that ever failed is kept in EXAMPLES.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from everstep.cli.simulate_play import play, play_into
from everstep.domain.codec import encode_entry, is_command
from everstep.domain.commands import Command, FinishJob, RecordVerdict, ReplaceHost, StartWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointRestored,
    Event,
    FaultInjected,
    HostJoined,
    HostLost,
    StepsFinished,
    WorkersStarted,
    WorkersStopped,
)
from everstep.policy.accounting import Accountant
from everstep.policy.recovery import Job
from everstep.sim.delays import EVERSTEP, FT_HSDP, PUBLISHED, torchrun_delays
from everstep.sim.failures import FailureModel
from everstep.sim.ledger import MemoryLedger
from everstep.sim.scenario import Scenario

EXAMPLES: tuple[int, ...] = ()
SEEDS = (*EXAMPLES, *range(1000, 1000 + int(os.environ.get("EVERSTEP_SIM_SEEDS", "20"))))


def random_scenario(seed: int) -> Scenario:
    rng = Random(seed)
    agents = rng.choice([1, 2, 5])
    hosts = rng.choice([8, 40, 96])
    return Scenario(
        name="random",
        gpus=8 * hosts,
        spares=rng.choice([0, 1, 4]),
        agents=agents,
        days=rng.choice([1.0, 3.0]),
        checkpoint_interval_s=rng.choice([120.0, 600.0, 1800.0]),
        checkpoint_pause_s=rng.choice([0.0, 3.0, 60.0]),
        blocks_per_checkpoint=rng.choice([1, 4, 8]),
        restore_tb=rng.choice([0.0, 100.0]),
        heat_dip_share=rng.choice([0.0, 0.02]),
        lemon_failures=rng.choice([0, 1, 3]),
        late_news_share=0.5,
        failures=FailureModel(
            per_1000_host_days=rng.choice([20.0, 200.0, 20_000.0 / hosts]),
            planned_per_day=rng.choice([0.0, 2.0]),
            down_share=rng.random(),
            down_hours=rng.choice([0.5, 24.0]),
            lemon_share=0.1,
            lemon_factor=20.0,
            burst_share=0.2,
            rack_share=0.5,
            repeat_share=0.3,
            repeat_days=0.2,
            slow_per_1000_host_days=20.0,
            corruption_hours=rng.choice([0.0, 1.0]),
        ),
        delays=rng.choice([PUBLISHED, EVERSTEP, FT_HSDP, torchrun_delays(600.0)]),
    )


class Watch:
    """Hears every entry and checks what must hold after each."""

    def __init__(self, host_count: int) -> None:
        self.bodies: list[Event | Command] = []
        self._accountant = Accountant()
        self._host_count = host_count
        self._latest_s = 0.0
        self._attempt = 0
        self._running: set[str] = set()
        self._last_is_stale = False
        self._used: set[str] | None = None
        self._present: set[str] = set()

    def hear(self, body: Event | Command) -> None:
        self.bodies.append(body)
        self._accountant.handle(body)
        self._latest_s = max(self._latest_s, body.at_s)
        self._every_second_is_counted_once()
        self._nothing_is_decided_on_stale_news(body)
        self._no_two_attempts_run_at_once(body)
        self._hosts_in_use_are_there(body)

    def _every_second_is_counted_once(self) -> None:
        parts = self._accountant.account().parts
        assert sum(part.duration_ns for part in parts) == int(self._latest_s * 1e9)
        assert all(part.duration_ns >= 0 for part in parts)

    def _nothing_is_decided_on_stale_news(self, body: Event | Command) -> None:
        if is_command(body):
            assert not self._last_is_stale, f"{body} was decided on news of an old attempt"
        else:
            self._last_is_stale = getattr(body, "attempt", self._attempt) != self._attempt

    def _no_two_attempts_run_at_once(self, body: Event | Command) -> None:
        match body:
            case StartWorkers():
                assert not self._running, f"attempt {body.attempt} was ordered while {self._running} still ran"
                assert body.attempt == self._attempt + 1
                assert body.world_size == 8 * self._host_count
                self._attempt = body.attempt
                self._running = {share.host for share in body.shares}
            case WorkersStarted():
                assert body.attempt == self._attempt
            case WorkersStopped() if body.attempt == self._attempt:
                self._running.discard(body.host)

    def _hosts_in_use_are_there(self, body: Event | Command) -> None:
        match body:
            case HostJoined():
                self._present |= set(body.members)
            case HostLost():
                self._present.discard(body.host)
            case ReplaceHost():
                assert self._used is not None
                assert body.host in self._used
                self._used.discard(body.host)
                assert body.spare not in self._used
                self._used.add(body.spare)
            case StartWorkers():
                if self._used is None:
                    self._used = set(sorted(self._present)[: self._host_count])
                assert self._used <= self._present
                assert len(self._used) == self._host_count


@pytest.fixture(scope="module", params=SEEDS)
def played(request: pytest.FixtureRequest) -> tuple[Scenario, Watch]:
    scenario = random_scenario(request.param)
    watch = Watch(scenario.host_count)
    print(f"seed {request.param}: {scenario}")  # shown when a check fails
    play_into(scenario, request.param, MemoryLedger(), watch.hear)
    return scenario, watch


def test_what_must_hold_after_every_entry_holds_up_to_the_end(played: tuple[Scenario, Watch]) -> None:
    scenario, watch = played
    end = watch.bodies[-1]
    assert isinstance(end, FinishJob)
    if end.exit_code is ExitCode.PREEMPTED:
        assert end.at_s == pytest.approx(scenario.duration_s, abs=400)


def test_replaying_the_ledger_gives_the_same_commands(played: tuple[Scenario, Watch]) -> None:
    scenario, watch = played
    job = Job(scenario.recovery())
    replayed = [command for body in watch.bodies if not is_command(body) for command in job.handle(body)]  # type: ignore[arg-type]
    assert replayed == [body for body in watch.bodies if is_command(body)]


def test_a_resumed_attempt_repeats_nothing_that_was_saved_and_skips_nothing(played: tuple[Scenario, Watch]) -> None:
    _, watch = played
    restored = last = attempt = 0
    for body in watch.bodies:
        match body:
            case StartWorkers():
                attempt, last, restored = body.attempt, 0, 0
            case CheckpointRestored():
                restored = last = body.step
            case StepsFinished() if body.attempt == attempt:
                if body.first_step > last:
                    assert body.first_step == last + 1, f"attempt {attempt} skipped from {last} (from {restored})"
                    last = body.last_step


def test_every_fault_of_a_running_attempt_is_blamed_on_its_own_rank(played: tuple[Scenario, Watch]) -> None:
    _, watch = played
    injected: dict[int, int] = {}
    for body in watch.bodies:
        match body:
            case FaultInjected():
                assert body.attempt not in injected
                injected[body.attempt] = body.fault.rank
            case RecordVerdict() if not body.planned and body.verdict.ranks:
                assert body.verdict.ranks == (injected[body.attempt],), body.verdict.reason


HASH = """
import hashlib
from tests.sim.test_cluster import ledger_digest
print(ledger_digest(1003))
"""


def ledger_digest(seed: int) -> str:
    ledger = MemoryLedger()
    play_into(random_scenario(seed), seed, ledger, lambda _body: None)
    return hashlib.blake2b(b"".join(map(encode_entry, ledger.entries))).hexdigest()


def test_the_same_seed_gives_the_same_ledger_byte_for_byte_whatever_the_hash_seed() -> None:
    here = ledger_digest(1003)
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        other = subprocess.run(
            [sys.executable, "-c", HASH], env=environment, capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == here
    assert ledger_digest(1004) != here


def test_the_same_faults_hit_whatever_the_delays() -> None:
    scenario = random_scenario(1)
    outcomes = [play(replace(scenario, delays=delays, late_news_share=0.0), 1) for delays in (PUBLISHED, EVERSTEP)]
    assert outcomes[0].unexpected_count == pytest.approx(outcomes[1].unexpected_count, rel=0.2)
