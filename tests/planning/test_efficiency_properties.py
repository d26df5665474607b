"""What must hold of effective training time for every plan, whatever its numbers."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.planning.efficiency import (
    Recovery,
    best_share,
    daly_first_order_interval_s,
    daly_interval_s,
    exact_interval_s,
    exact_share,
    levers,
    linear_share,
    loss_budget_s,
    replica_share,
    restart_limits_s,
    young_interval_s,
)

between = st.floats(60.0, 1e7)
pauses = st.floats(1e-3, 3e4)
restarts = st.floats(0.0, 3e4)
intervals = st.floats(0.1, 1e6)


@given(between, pauses, restarts, intervals)
def test_effective_time_is_a_share(mtbf_s: float, pause_s: float, restart_s: float, interval_s: float) -> None:
    recovery = Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=restart_s)
    assert 0.0 <= exact_share(interval_s=interval_s, recovery=recovery) <= 1.0
    assert 0.0 <= linear_share(interval_s=interval_s, recovery=recovery) <= 1.0
    assert exact_share(interval_s=interval_s, recovery=recovery) <= interval_s / (interval_s + pause_s) + 1e-12


@given(between, pauses, restarts, intervals, st.floats(1.0, 10.0))
def test_effective_time_never_grows_with_a_longer_restart_pause_or_more_failures(
    mtbf_s: float, pause_s: float, restart_s: float, interval_s: float, factor: float
) -> None:
    share = exact_share(interval_s=interval_s, recovery=Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=restart_s))
    for worse in (
        Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=restart_s * factor + 1),
        Recovery(mtbf_s=mtbf_s, pause_s=pause_s * factor, restart_s=restart_s),
        Recovery(mtbf_s=mtbf_s / factor, pause_s=pause_s, restart_s=restart_s),
    ):
        assert exact_share(interval_s=interval_s, recovery=worse) <= share * (1 + 1e-12)
        assert best_share(worse) <= best_share(Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=restart_s)) + 1e-12


@given(between, pauses, restarts, intervals)
def test_no_interval_beats_the_exact_one(mtbf_s: float, pause_s: float, restart_s: float, interval_s: float) -> None:
    recovery = Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=restart_s)
    best_s = exact_interval_s(pause_s=pause_s, mtbf_s=mtbf_s)
    best = exact_share(interval_s=best_s, recovery=recovery)
    for other_s in (interval_s, best_s * 0.99, best_s * 1.01, young_interval_s(pause_s=pause_s, mtbf_s=mtbf_s)):
        assert exact_share(interval_s=other_s, recovery=recovery) <= best * (1 + 1e-12)


@given(between, st.floats(1e-6, 1e-3))
def test_young_and_daly_agree_with_the_exact_interval_for_short_pauses(mtbf_s: float, ratio: float) -> None:
    pause_s = mtbf_s * ratio
    exact_s = exact_interval_s(pause_s=pause_s, mtbf_s=mtbf_s)
    assert young_interval_s(pause_s=pause_s, mtbf_s=mtbf_s) == pytest.approx(exact_s, rel=math.sqrt(ratio))
    assert daly_interval_s(pause_s=pause_s, mtbf_s=mtbf_s) == pytest.approx(exact_s, rel=ratio + 1e-9)
    first_s = daly_first_order_interval_s(pause_s=pause_s, mtbf_s=mtbf_s)
    assert first_s == pytest.approx(exact_s, rel=math.sqrt(ratio))


@given(between, pauses, st.floats(0.01, 0.999))
def test_a_restart_at_its_limit_gives_the_target_exactly(mtbf_s: float, pause_s: float, target: float) -> None:
    free = Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=0.0)
    assume(best_share(free) > 0)
    (limit_s,) = restart_limits_s(recovery=free, target_shares=[target])
    assume(limit_s > 0)
    at_limit = Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=limit_s)
    assert best_share(at_limit) == pytest.approx(target, rel=1e-9)


@given(between, pauses, restarts, st.none() | intervals)
def test_a_lever_never_costs_and_they_come_best_first(
    mtbf_s: float, pause_s: float, restart_s: float, interval_s: float | None
) -> None:
    recovery = Recovery(mtbf_s=mtbf_s, pause_s=pause_s, restart_s=restart_s)
    gains = [lever.gain for lever in levers(recovery, interval_s=interval_s)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] >= -1e-12
    assert len(gains) == (3 if interval_s is None else 4)


@given(between, st.floats(0.0, 600.0), st.floats(0.0, 600.0), st.integers(1, 100))
def test_more_replicas_never_cost(mtbf_s: float, stall_s: float, rejoin_s: float, count: int) -> None:
    shares = [
        replica_share(stall_s=stall_s, rejoin_s=rejoin_s, replica_count=k, mtbf_s=mtbf_s) for k in (count, count + 1)
    ]
    assert 0.0 <= shares[0] <= shares[1] <= 1.0
    assert loss_budget_s(mtbf_s=mtbf_s, target_share=1.0) == 0.0


def test_without_failures_only_the_pauses_cost() -> None:
    never = Recovery(mtbf_s=math.inf, pause_s=10.0, restart_s=600.0)
    assert exact_share(interval_s=90.0, recovery=never) == pytest.approx(0.9)
    assert best_share(never) == 1.0
    assert math.isinf(daly_interval_s(pause_s=10.0, mtbf_s=math.inf))


def test_lossless_checkpoints_leave_the_restarts() -> None:
    recovery = Recovery(mtbf_s=600.0, pause_s=0.0, restart_s=60.0)
    assert best_share(recovery) == pytest.approx(math.exp(-0.1))
    assert young_interval_s(pause_s=0.0, mtbf_s=600.0) == daly_interval_s(pause_s=0.0, mtbf_s=600.0) == 0.0


def test_a_hopeless_job_gets_nothing_done_and_nothing_overflows() -> None:
    hopeless = Recovery(mtbf_s=1.0, pause_s=10.0, restart_s=1e6)
    assert exact_share(interval_s=1e9, recovery=hopeless) == 0.0
    assert best_share(hopeless) == 0.0
    assert daly_interval_s(pause_s=10.0, mtbf_s=1.0) == 1.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_exact_model_is_what_a_played_job_gets(seed: int) -> None:
    """Plays the model's own world: failures at any moment, restarts that fail too, work counted at checkpoints."""
    from random import Random

    rng = Random(seed)
    recovery = Recovery(mtbf_s=2_000.0, pause_s=30.0, restart_s=300.0)
    interval_s, goal = 400.0, 3_000
    elapsed_s, done = 0.0, 0
    left_s = rng.expovariate(1 / recovery.mtbf_s)
    needed_s = interval_s + recovery.pause_s
    while done < goal:
        if left_s >= needed_s:
            elapsed_s, left_s, done = elapsed_s + needed_s, left_s - needed_s, done + 1
            needed_s = interval_s + recovery.pause_s
        else:
            elapsed_s += left_s
            left_s = rng.expovariate(1 / recovery.mtbf_s)
            needed_s = recovery.restart_s + interval_s + recovery.pause_s
    played = done * interval_s / elapsed_s
    assert played == pytest.approx(exact_share(interval_s=interval_s, recovery=recovery), rel=0.03)
