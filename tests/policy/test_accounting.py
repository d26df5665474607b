"""The account of a run: five probes with known answers, the rules one by one, and no sequence that loses a second."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.domain.causes import Cause
from everstep.domain.commands import (
    Command,
    DismissSuspicion,
    FinishJob,
    HostShare,
    RecordVerdict,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    Event,
    HostLost,
    PhaseChanged,
    RunResumed,
    RunStarted,
    StallSuspected,
    StepsFinished,
    StopRequested,
    WorkersStopped,
)
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.accounting import Account, Accountant, Category, effective_share, total_parts
from everstep.policy.pace import Pace

A, B = HostId("a"), HostId("b")
C = Category
VERDICT = Verdict(
    trouble=Trouble.DEAD,
    ranks=(Rank(1),),
    hosts=(A,),
    reason="rank 1 died",
    cause=Cause(component="Faulty GPU", category="GPU"),
    signature="dead:1",
)


def run_started(at_s: float = 0.0) -> RunStarted:
    return RunStarted(at_s=at_s, run=RunId("r"), everstep="0", command=("x",), world_size=2, host_count=1)


def start(at_s: float, attempt: int = 1, hosts: Sequence[HostId] = (A,)) -> StartWorkers:
    return StartWorkers(
        at_s=at_s,
        attempt=Attempt(attempt),
        shares=tuple(HostShare(host=host, first_rank=Rank(2 * i), count=2) for i, host in enumerate(hosts)),
        world_size=2 * len(hosts),
        restart_count=attempt - 1,
        faults=(),
        rung=None,
        why="",
    )


def phase(at_s: float, to: Phase, attempt: int = 1, host: HostId = A) -> PhaseChanged:
    return PhaseChanged(at_s=at_s, attempt=Attempt(attempt), host=host, phase=to, step=0)


def steps(
    first: int, ends_s: Sequence[float], attempt: int = 1, host: HostId = A, late_s: float = 0.0
) -> StepsFinished:
    return StepsFinished(
        at_s=ends_s[-1] + late_s, attempt=Attempt(attempt), host=host, first_step=first, ended_at_s=tuple(ends_s)
    )


def verdict(
    since_s: float, detected_at_s: float, at_s: float, attempt: int = 1, *, planned: bool = False
) -> RecordVerdict:
    return RecordVerdict(
        at_s=at_s,
        attempt=Attempt(attempt),
        incident=IncidentId(f"a{attempt:04}-1"),
        verdict=VERDICT,
        since_s=since_s,
        detected_at_s=detected_at_s,
        step=0,
        planned=planned,
    )


def stop(at_s: float, attempt: int = 1, host: HostId = A) -> StopWorkers:
    return StopWorkers(at_s=at_s, attempt=Attempt(attempt), host=host, kill_ranks=(), grace_s=1.0)


def stopped(at_s: float, attempt: int = 1, host: HostId = A) -> WorkersStopped:
    return WorkersStopped(at_s=at_s, attempt=Attempt(attempt), host=host, killed=())


def finish(at_s: float) -> FinishJob:
    return FinishJob(at_s=at_s, exit_code=ExitCode.DONE, rung=None, summary="done")


def account(*bodies: Event | Command) -> Account:
    accountant = Accountant()
    for body in bodies:
        accountant.handle(body)
    return accountant.account()


def spent(found: Account) -> dict[str, float]:
    """The categories that got time, in seconds."""
    return {str(part.category): pytest.approx(part.duration_s) for part in found.parts if part.duration_ns}


def pace(begin_s: float, count: int, step_s: float = 10.0) -> list[float]:
    return [begin_s + step_s * (i + 1) for i in range(count)]


def trained_until(end_s: float, attempt: int = 1) -> list[Event | Command]:
    """An attempt from 0 that starts at once and takes 10 s steps, with the observer's marks."""
    return [
        run_started(),
        start(0.0, attempt),
        phase(0.0, Phase.TRAINING, attempt),
        steps(1, pace(0.0, int(end_s // 10)), attempt),
    ]


# The five probes of the only peer with an accounting model (reference/ecosystem.md 1.1), with their true answers.


def after_an_hour_down(resumed_at_step: int) -> Account:
    return account(
        *trained_until(1000.0),
        verdict(1000.0, 1000.0, 1000.0),
        stop(1000.0),
        stopped(1000.0),
        start(4600.0, 2),
        phase(4600.0, Phase.TRAINING, 2),
        steps(resumed_at_step, pace(4600.0, 100), 2),
        finish(5600.0),
    )


def test_probe_a_an_hour_down_right_after_a_checkpoint_is_waiting_and_not_a_long_step() -> None:
    found = after_an_hour_down(101)
    assert f"{found.effective_share:.1%}" == "35.7%"
    assert spent(found) == {"productive": 2000.0, "waiting": 3600.0}
    assert (found.attempt_count, found.step_count, found.replayed_step_count, found.last_step) == (2, 200, 0, 200)


def test_probe_b_a_step_done_again_is_replayed() -> None:
    found = after_an_hour_down(100)
    assert f"{found.effective_share:.1%}" == "35.5%"
    assert spent(found) == {"productive": 1990.0, "replayed": 10.0, "waiting": 3600.0}
    assert found.lost_s(IncidentId("a0001-1")) == pytest.approx(3610.0)


def test_probe_c_a_stall_of_half_an_hour_inside_a_step_is_slow() -> None:
    ends = [*pace(0.0, 50), 2300.0, *pace(2300.0, 49)]
    found = account(run_started(), start(0.0), phase(0.0, Phase.TRAINING), steps(1, ends), finish(2790.0))
    assert f"{found.effective_share:.1%}" == "35.8%"
    assert spent(found) == {"productive": 1000.0, "slow": 1790.0}


def test_probe_d_a_hang_splits_into_detection_and_restart() -> None:
    found = account(
        *trained_until(600.0),
        verdict(600.0, 2400.0, 2400.0),
        stop(2400.0),
        stopped(2410.0),
        start(2420.0, 2),
        phase(2690.0, Phase.RESTORING, 2),
        phase(2700.0, Phase.TRAINING, 2),
        steps(51, pace(2700.0, 100), 2),
        finish(3700.0),
    )
    assert f"{found.effective_share:.1%}" == "40.5%"
    assert spent(found) == {
        "productive": 1500.0,
        "replayed": 100.0,
        "detection": 1800.0,
        "teardown": 10.0,
        "waiting": 10.0,
        "starting": 270.0,
        "restoring": 10.0,
    }
    assert found.lost_s(IncidentId("a0001-1")) == pytest.approx(2200.0)


def test_probe_e_half_the_run_a_third_slower_is_not_all_productive() -> None:
    ends = pace(0.0, 100) + pace(1000.0, 100, 13.0)
    found = account(run_started(), start(0.0), phase(0.0, Phase.TRAINING), steps(1, ends), finish(2300.0))
    assert found.effective_share == pytest.approx(0.870, abs=0.002)
    assert found.spent_s(C.SLOW) == pytest.approx(300.0, abs=5.0)
    assert found.healthy_step_s == pytest.approx(10.0)


# The rules.


def test_every_phase_has_its_category() -> None:
    found = account(
        run_started(),
        start(1.0),
        phase(3.0, Phase.STARTING),
        phase(6.0, Phase.RESTORING),
        phase(10.0, Phase.WARMING_UP),
        steps(1, [17.0, 18.0]),
        phase(18.0, Phase.SAVING),
        phase(20.0, Phase.TRAINING),
        steps(3, [21.0]),
        phase(21.0, Phase.EVALUATING),
        phase(26.0, Phase.ENDING),
        finish(29.0),
    )
    assert spent(found) == {
        "waiting": 1.0,
        "starting": 5.0,
        "restoring": 4.0,
        "warming_up": 6.0,  # the first step took 7 s, of which 1 s is a healthy step's work
        "productive": 3.0,
        "checkpoint": 2.0,
        "evaluation": 5.0,
        "idle": 3.0,
    }
    assert found.has_ended


def test_a_plain_scripts_first_step_is_starting() -> None:
    found = account(
        run_started(),
        start(0.0),
        phase(1.0, Phase.STARTING),
        steps(1, [5.0, 6.0]),
        phase(5.0, Phase.TRAINING),
        finish(6.0),
    )
    assert spent(found) == {"starting": 5.0, "productive": 1.0}


def test_a_run_without_an_observer_shows_its_time_as_starting() -> None:
    found = account(run_started(), start(0.0), phase(1.0, Phase.UNOBSERVED), finish(6.0))
    assert spent(found) == {"starting": 6.0}
    assert found.step_count == 0


def test_a_save_in_the_middle_of_a_step_is_cut_out_of_it() -> None:
    found = account(
        *trained_until(100.0),
        phase(104.0, Phase.SAVING),
        phase(107.0, Phase.TRAINING),
        steps(11, [113.0]),
        finish(113.0),
    )
    assert spent(found) == {"productive": 110.0, "checkpoint": 3.0}


def test_a_step_that_ends_on_other_ranks_while_one_saves_keeps_its_time() -> None:
    found = account(
        *trained_until(100.0),
        phase(109.0, Phase.SAVING),
        steps(11, [110.0]),
        phase(112.0, Phase.TRAINING),
        steps(12, [122.0]),
        finish(122.0),
    )
    assert spent(found) == {"productive": 119.0, "checkpoint": 3.0}
    assert found.step_count == 12


def test_a_dismissed_suspicion_eats_no_time() -> None:
    suspicion = StallSuspected(
        at_s=150.0,
        attempt=Attempt(1),
        host=A,
        phase=Phase.TRAINING,
        since_s=100.0,
        deadline_s=40.0,
        learned_from="steps",
    )
    dismissal = DismissSuspicion(
        at_s=152.0, attempt=Attempt(1), host=A, incident=IncidentId("a0001-1"), reason="it moved", deadline_factor=2.0
    )
    found = account(*trained_until(100.0), suspicion, dismissal, steps(11, [160.0]), finish(160.0))
    assert spent(found) == {"productive": 110.0, "slow": 50.0}


def test_with_several_hosts_a_step_ends_when_the_last_one_reports_it() -> None:
    found = account(
        run_started(),
        start(0.0, hosts=(A, B)),
        phase(0.0, Phase.TRAINING, host=A),
        phase(0.0, Phase.TRAINING, host=B),
        steps(1, [1.0, 2.0, 3.0, 4.0], host=A),
        steps(1, [1.2, 2.2], host=B),
        verdict(2.2, 5.0, 5.0),
    )
    assert found.step_count == 2
    assert spent(found) == {"productive": 2.0, "warming_up": 0.2, "detection": 2.8}


def test_one_host_that_saves_speaks_for_the_job_and_late_steps_of_another_still_count() -> None:
    found = account(
        run_started(),
        start(0.0, hosts=(A, B)),
        phase(0.0, Phase.TRAINING, host=A),
        phase(0.0, Phase.TRAINING, host=B),
        steps(1, [1.0, 2.0, 3.0, 4.0], host=A),
        phase(4.0, Phase.SAVING, host=A),
        steps(1, [1.0, 2.0, 3.0, 4.0], host=B, late_s=2.0),
        phase(7.0, Phase.TRAINING, host=A),
        steps(5, [8.0], host=A),
        steps(5, [8.0], host=B),
        finish(8.0),
    )
    assert spent(found) == {"productive": 5.0, "checkpoint": 3.0}


def test_steps_that_come_late_after_a_verdict_are_productive_and_not_detection() -> None:
    hosts = (A, B)
    found = account(
        run_started(),
        start(0.0, hosts=hosts),
        *(phase(0.0, Phase.TRAINING, host=host) for host in hosts),
        steps(1, pace(0.0, 5, 1.0), host=A),
        verdict(0.0, 5.5, 5.6),
        stop(5.6, host=A),
        stop(5.6, host=B),
        steps(1, pace(0.0, 5, 1.0), host=B, late_s=0.8),
        stopped(6.0, host=A),
        HostLost(at_s=6.6, host=B, reason="gone"),
        start(8.6, 2),
    )
    assert spent(found) == {"productive": 5.0, "detection": 0.5, "diagnosis": 0.1, "teardown": 1.0, "waiting": 2.0}


def test_a_failure_while_saving_keeps_the_save_up_to_its_last_progress() -> None:
    found = account(
        *trained_until(100.0), phase(100.0, Phase.SAVING), verdict(104.0, 109.0, 110.0), stop(110.0), stopped(111.0)
    )
    assert spent(found) == {"productive": 100.0, "checkpoint": 4.0, "detection": 5.0, "diagnosis": 1.0, "teardown": 1.0}


def test_a_planned_interruption_is_maintenance_up_to_the_next_first_step() -> None:
    found = account(
        *trained_until(100.0),
        verdict(100.0, 103.0, 103.0, planned=True),
        stop(103.0),
        stopped(105.0),
        start(110.0, 2),
        phase(111.0, Phase.RESTORING, 2),
        phase(120.0, Phase.WARMING_UP, 2),
        steps(11, pace(120.0, 3), 2),
        verdict(150.0, 151.0, 151.0, 2),
        stop(151.0, 2),
        finish(152.0),
    )
    assert spent(found) == {"productive": 130.0, "maintenance": 20.0, "detection": 1.0, "teardown": 1.0}
    assert found.lost_s(IncidentId("a0001-1")) == pytest.approx(20.0)


def test_a_requested_stop_without_a_verdict_is_teardown() -> None:
    found = account(
        *trained_until(100.0), StopRequested(at_s=103.0, by="SIGTERM"), stop(104.0), stopped(106.0), finish(106.0)
    )
    assert spent(found) == {"productive": 100.0, "teardown": 6.0}


def test_the_time_without_a_coordinator_is_idle() -> None:
    found = account(
        *trained_until(100.0),
        RunResumed(at_s=160.0, gap_s=55.0, command=()),
        start(161.0, 2),
        phase(163.0, Phase.TRAINING, 2),
    )
    assert spent(found) == {"productive": 100.0, "idle": 60.0, "waiting": 1.0, "starting": 2.0}


def test_two_failures_in_a_row_cost_each_its_own_time() -> None:
    found = account(
        *trained_until(100.0),
        verdict(100.0, 101.0, 101.0),
        stop(101.0),
        stopped(102.0),
        start(103.0, 2),
        verdict(103.0, 110.0, 110.0, 2),
        stop(110.0, 2),
        stopped(111.0, 2),
        start(115.0, 3),
        phase(116.0, Phase.TRAINING, 3),
        steps(6, pace(116.0, 10), 3),
    )
    assert {loss.incident: loss.duration_s for loss in found.losses} == pytest.approx({"a0001-1": 3.0, "a0002-1": 63.0})
    assert found.replayed_step_count == 5


def test_news_of_an_old_attempt_is_ignored() -> None:
    found = account(
        *trained_until(100.0), start(101.0, 2), steps(11, [102.0], 1), stop(103.0, 1), verdict(100.0, 104.0, 104.0, 1)
    )
    assert found.step_count == 10
    assert found.spent_s(C.DETECTION) == 0


def test_a_run_that_is_still_going_has_an_account_at_any_time_and_asking_changes_nothing() -> None:
    accountant, asked = Accountant(), Accountant()
    for body in [
        *trained_until(100.0),
        phase(105.0, Phase.SAVING),
        phase(106.0, Phase.TRAINING),
        steps(11, [112.0]),
        finish(120.0),
    ]:
        accountant.handle(body)
        asked.handle(body)
        asked.account()
    assert accountant.account() == asked.account()
    going = account(*trained_until(100.0), StopRequested(at_s=107.0, by="x"))
    assert not going.has_ended
    assert spent(going) == {"productive": 107.0}


def test_nothing_counts_after_the_end() -> None:
    assert account(*trained_until(100.0), finish(100.0), stop(200.0)).elapsed_s == 100.0


def test_an_empty_ledger_has_an_empty_account() -> None:
    found = account()
    assert (found.elapsed_s, found.effective_share, found.healthy_step_s) == (0.0, 0.0, None)


def test_many_runs_are_weighted_by_their_time() -> None:
    parts = total_parts([account(*trained_until(100.0), finish(100.0)), account(run_started(), start(300.0))])
    assert effective_share(parts) == pytest.approx(0.25)


def test_natural_jitter_is_not_slow() -> None:
    pace = Pace()
    pace.add([1_000_000 + 997 * i % 100_000 for i in range(10_000)])
    split = pace.split()
    assert split.slow_ns == 0


# The invariant: every second is accounted for exactly once.

at = st.floats(min_value=0.0, max_value=1000.0)
attempts = st.integers(min_value=0, max_value=3)
hosts = st.sampled_from([A, B, HostId("stranger")])
bodies = st.one_of(
    st.builds(run_started, at),
    st.builds(start, at, attempts, st.sampled_from([(A,), (A, B)])),
    st.builds(phase, at, st.sampled_from(Phase), attempts, hosts),
    st.builds(
        steps,
        st.integers(0, 20),
        st.lists(at, min_size=1, max_size=30).map(sorted),
        attempts,
        hosts,
        st.floats(0.0, 5.0),
    ),
    st.builds(verdict, at, at, at, attempts, planned=st.booleans()),
    st.builds(stop, at, attempts, hosts),
    st.builds(stopped, at, attempts, hosts),
    st.builds(lambda at_s, host: HostLost(at_s=at_s, host=host, reason=""), at, hosts),
    st.builds(lambda at_s, gap_s: RunResumed(at_s=at_s, gap_s=gap_s, command=()), at, at),
    st.builds(finish, at),
)


def assert_every_second_counts_once(sequence: Sequence[Event | Command]) -> None:
    accountant = Accountant()
    begin_s = end_s = sequence[0].at_s
    has_ended = False
    for body in sequence:
        accountant.handle(body)
        if not has_ended or isinstance(body, RunResumed):
            end_s = max(end_s, body.at_s)
            has_ended = isinstance(body, FinishJob)
        found = accountant.account()
        assert all(part.duration_ns >= 0 for part in found.parts)
        assert all(loss.duration_ns >= 0 for loss in found.losses)
        assert sum(part.duration_ns for part in found.parts) == int(end_s * 1e9) - int(begin_s * 1e9)
        assert math.fsum(part.duration_s for part in found.parts) == pytest.approx(found.elapsed_s)
        assert sum(loss.duration_ns for loss in found.losses) <= sum(part.duration_ns for part in found.parts)


@given(st.lists(bodies, min_size=1, max_size=40))
def test_every_second_counts_once_in_any_order_of_entries(sequence: list[Event | Command]) -> None:
    assert_every_second_counts_once(sequence)


@given(st.lists(bodies, min_size=1, max_size=40))
def test_every_second_counts_once_in_the_order_of_the_clock(sequence: list[Event | Command]) -> None:
    assert_every_second_counts_once(sorted(sequence, key=lambda body: body.at_s))
