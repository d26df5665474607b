"""Invariants that hold for every seed: random jobs on one to four hosts with random faults."""

import math
import random

import pytest
from tests.sim.playing import Played, play_job, replayed_commands

from everstep.domain.causes import FaultKind
from everstep.domain.codec import is_command
from everstep.domain.commands import RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import EvidenceCollected, FaultInjected, StepsFinished, WorkersStopped
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.policy.accounting import Accountant
from everstep.sim.job import SimConfig
from everstep.sim.training import TrainingConfig

SEEDS = range(60)
STEPS = 160


def random_config(seed: int) -> SimConfig:
    rng = random.Random(seed)
    hosts, ranks = rng.choice([(1, 2), (1, 4), (2, 1), (2, 3), (3, 2), (4, 4)])
    world_size = hosts * ranks
    kinds = [rng.choice(list(FaultKind)) for _ in range(rng.randint(0, 4))]
    faults = tuple(
        PlannedFault(
            number=number,
            kind=kind,
            rank=Rank(rng.randrange(world_size)),
            step=25 + 35 * number if rng.random() < 0.5 else None,
            after_s=None,
        )
        for number, kind in enumerate(kinds)
    )
    timed = tuple(
        fault
        if fault.step is not None
        else PlannedFault(number=fault.number, kind=fault.kind, rank=fault.rank, after_s=2.0 + 3.0 * fault.number)
        for fault in faults
    )
    gloo = rng.random() < 0.5
    return SimConfig(
        training=TrainingConfig(steps=STEPS, gloo=gloo), host_count=hosts, ranks_per_host=ranks, faults=timed
    )


@pytest.fixture(scope="module", params=SEEDS)
def job(request: pytest.FixtureRequest) -> tuple[SimConfig, Played]:
    config = random_config(request.param)
    return config, play_job(config, seed=request.param)


def test_the_job_ends_well_with_every_step_done(job: tuple[SimConfig, Played]) -> None:
    _, played = job
    assert played.end is not None
    assert played.end.exit_code is ExitCode.DONE, played.end.summary
    assert max(steps.last_step for steps in played.of(StepsFinished)) == STEPS


def test_each_fault_is_blamed_on_its_own_rank_and_nobody_else(job: tuple[SimConfig, Played]) -> None:
    _, played = job
    verdicts = played.of(RecordVerdict)
    faults = played.of(FaultInjected)
    assert len(verdicts) == len(faults)
    for verdict, injected in zip(verdicts, faults, strict=True):
        assert verdict.verdict.ranks == (injected.fault.rank,), verdict.verdict.reason


def test_no_attempt_starts_before_the_last_one_has_stopped_everywhere(job: tuple[SimConfig, Played]) -> None:
    config, played = job
    stopped = config.host_count
    for body in played.of(StartWorkers, WorkersStopped):
        if isinstance(body, WorkersStopped):
            stopped += 1
        else:
            assert stopped == config.host_count
            stopped = 0


def test_nothing_is_stopped_for_a_fault_before_every_host_gave_evidence(job: tuple[SimConfig, Played]) -> None:
    config, played = job
    seen: set[str] = set()
    for body in played.of(EvidenceCollected, StartWorkers, RecordVerdict):
        match body:
            case StartWorkers():
                seen.clear()
            case EvidenceCollected():
                seen.add(body.host)
            case RecordVerdict():
                assert len(seen) == config.host_count


def test_a_rank_that_waited_is_never_blamed(job: tuple[SimConfig, Played]) -> None:
    _, played = job
    waiting: set[Rank] = set()
    for body in played.of(EvidenceCollected, RecordVerdict):
        if isinstance(body, RecordVerdict):
            assert not waiting & set(body.verdict.ranks)
            waiting.clear()
        else:
            waiting |= {
                s.rank
                for s in body.summaries
                if s.phase is Phase.TRAINING and any(g.enqueued > g.completed for g in s.groups)
            }


def test_replaying_the_ledger_gives_the_same_commands(job: tuple[SimConfig, Played]) -> None:
    config, played = job
    recorded = [body for body in played.bodies if is_command(body)]
    assert replayed_commands(config, played.bodies) == recorded


def test_every_second_is_accounted_for_exactly_once(job: tuple[SimConfig, Played]) -> None:
    _, played = job
    accountant = Accountant()
    for body in played.bodies:
        accountant.handle(body)
    account = accountant.account()
    assert played.end is not None
    assert math.isclose(account.elapsed_s, played.end.at_s, rel_tol=1e-9)
    assert math.isclose(sum(part.duration_ns for part in account.parts) / 1e9, account.elapsed_s, rel_tol=1e-9)


def test_every_stop_belongs_to_the_present_attempt(job: tuple[SimConfig, Played]) -> None:
    _, played = job
    attempt = 0
    for body in played.of(StartWorkers, StopWorkers):
        if isinstance(body, StartWorkers):
            assert body.attempt == attempt + 1
            attempt = body.attempt
        else:
            assert body.attempt == attempt


def test_the_same_seed_gives_the_same_ledger() -> None:
    config = random_config(7)
    assert play_job(config, seed=7).bodies == play_job(config, seed=7).bodies
