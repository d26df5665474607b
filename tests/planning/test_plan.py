"""A plan's checks, what it assumes, and how its figures hang together."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.domain.errors import ConfigError
from everstep.planning import PRESETS, Origin, Plan, PlanReport, evaluate, preset_plan
from everstep.planning.catalogue import CATALOGUE
from everstep.planning.contradictions import CONTRADICTIONS
from everstep.planning.curves import availability_over_spares, share_over_gpus, share_over_interval
from everstep.planning.keys import KEY_BY_NAME, KEYS
from everstep.planning.scaling_laws import CHINCHILLA, loss, optimum, over_training
from everstep.planning.spares import Lemons, lemon_spares, poisson_spares

FULL = preset_plan("llama3-405b")


def test_the_keys_are_exactly_the_inputs_of_a_plan() -> None:
    others = {"name", "confidence", "origins"}
    assert {field.name for field in fields(Plan)} - others == set(KEY_BY_NAME)
    assert all(key.meaning for key in KEYS)
    assert all(key.why for key in KEYS if key.assumed is not None)


def test_every_figure_has_a_formula_a_unit_and_inputs_that_exist() -> None:
    for entry in CATALOGUE.values():
        assert entry.formula, entry.key
        assert entry.title, entry.key
        assert entry.inputs <= set(KEY_BY_NAME), entry.key


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_every_figure_that_its_inputs_allow(name: str) -> None:
    report = evaluate(preset_plan(name))
    missing = set(CATALOGUE) - set(report.by_key)
    allowed = {"ramp_s", "buffer_j", "pool_availability_share", "pool_effective_share", "interruption_interval_s"}
    if report.inputs.parameter_count is None:
        allowed |= {e.key for e in CATALOGUE.values() if e.inputs & {"parameter_count", "token_count"}}
    if report.inputs.checkpoint_interval_s is None:
        allowed.add("best_interval_gain_share")
    assert missing <= allowed
    assert all(math.isfinite(figure.value) for figure in report.figures)


def test_a_plan_with_everything_said_assumes_nothing() -> None:
    apart = {"gpu_peak_flops", "count_variance_ratio"}
    said = {key.name: key.assumed for key in KEYS if key.assumed is not None and key.name not in apart}
    plan = Plan(
        **{
            **said,
            "gpu_count": 1_024,
            "gpus_per_host": 8,
            "failures_per_1000_host_days": 3.0,
            "checkpoint_interval_s": 600.0,
            "planned_stop_s": 60.0,
            "replica_count": 2,
            "spare_host_count": 4,
            "parameter_count": 7e9,
            "token_count": 1e12,
            "ramp_limit_w_per_s": 1e6,
        }
    )
    report = evaluate(plan)
    assert not report.assumptions
    assert not any(figure.assumed for figure in report.figures)
    assert set(report.by_key) == set(CATALOGUE) - {"interruption_interval_s"}


def test_a_figure_names_only_the_assumed_inputs_that_it_rests_on() -> None:
    report = evaluate(Plan(gpu_count=1_024, failures_per_1000_host_days=3.0))
    assert report.figure("mtbf_s").assumed == {"gpus_per_host"}
    assert report.figure("exact_interval_s").assumed == {"gpus_per_host", "checkpoint_pause_s"}
    assert report.figure("gpu_w").assumed == {"gpu_power_w"}
    assert report.figure("mtbf_s").source
    assert (report.figure("mtbf_s").unit, report.figure("mtbf_s").formula) == ("s", "M = 1 ÷ (hosts × r)")


NUMBERS = {
    "gpus_per_host": 8,
    "run_days": 20.0,
    "failures_per_1000_host_days": 5.0,
    "planned_per_day": 1.0,
    "planned_stop_s": 100.0,
    "checkpoint_pause_s": 20.0,
    "checkpoint_interval_s": 900.0,
    "detection_s": 30.0,
    "restart_s": 100.0,
    "restore_s": 50.0,
    "target_share": 0.9,
    "replica_count": 3,
    "replica_stall_s": 50.0,
    "replica_rejoin_s": 100.0,
    "replacement_s": 50_000.0,
    "replaced_share": 0.9,
    "spare_host_count": 3,
    "availability_share": 0.95,
    "down_variance_ratio": 3.0,
    "burst_hosts": 3.0,
    "lemon_host_share": 0.1,
    "lemon_failure_share": 0.4,
    "parameter_count": 7e9,
    "token_count": 1e12,
    "flops_per_gpu": 3e14,
    "bytes_per_parameter": 12.0,
    "storage_bytes_per_s": 1e11,
    "gpu_power_w": 500.0,
    "it_power_per_gpu_w": 900.0,
    "pue": 1.1,
    "waiting_share": 0.3,
    "idle_share": 0.2,
    "ramp_limit_w_per_s": 1e5,
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_figure_moves_only_with_the_inputs_that_it_names(key: str) -> None:
    """Nudges one key of a large job: a figure whose catalogue entry does not name that key must stay."""
    before = evaluate(Plan(gpu_count=40_000, **NUMBERS)).by_key
    value = NUMBERS[key]
    nudged = value + 1 if isinstance(value, int) else value * 2 if value * 2 <= 1 or value >= 1 else value * 0.9
    after = evaluate(Plan(gpu_count=40_000, **{**NUMBERS, key: nudged})).by_key
    moved = {name for name in before if before[name].value != after[name].value}
    assert moved, key
    unnamed = {name for name in moved if key not in CATALOGUE[name].inputs}
    assert not unnamed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpu_count": 0}, ("gpu_count is 0", "whole number", "1 or more")),
        ({"gpu_count": -8}, ("gpu_count is -8",)),
        ({"gpu_count": 8.5}, ("gpu_count is 8.5", "whole number")),
        ({"gpu_count": True}, ("gpu_count is True", "number")),
        ({"gpu_count": "8"}, ("gpu_count is '8'", "number")),
        ({"failures_per_1000_host_days": -1.0}, ("failures_per_1000_host_days is -1", "above 0")),
        ({"failures_per_1000_host_days": 0.0}, ("failures_per_1000_host_days is 0", "above 0")),
        ({"mtbf_s": math.nan}, ("mtbf_s is nan", "above 0")),
        ({"mtbf_s": math.inf}, ("mtbf_s is inf", "above 0")),
        ({"checkpoint_interval_s": 3e6}, ("checkpoint_interval_s", "not be longer than the run", "run_days is 30")),
        ({"checkpoint_interval_s": 90_000, "run_days": 1}, ("checkpoint_interval_s", "86,400 s")),
        ({"spare_host_count": 129}, ("spare_host_count is 129", "128")),
        ({"spare_host_count": -1}, ("spare_host_count is -1", "0 or more")),
        ({"target_share": 95}, ("target_share is 95", "at most 1", "'90 %'")),
        ({"failure_count": 3}, ("observed_host_days is missing", "failure_count")),
        ({"observed_host_days": 3.0}, ("failure_count is missing", "observed_host_days")),
        ({"count_variance_ratio": 3.0}, ("failure_count is missing", "count_variance_ratio")),
        ({"mtbf_s": 60.0, "gpu_days_per_failure": 3.0}, ("gpu_days_per_failure and mtbf_s", "one of them")),
        ({"mfu_share": 0.4, "flops_per_gpu": 4e14}, ("flops_per_gpu and mfu_share", "one of them")),
        ({"lemon_host_share": 0.2, "lemon_failure_share": 0.1}, ("lemon_failure_share", "lemon_host_share")),
        ({"lemon_host_share": 0.0, "lemon_failure_share": 0.1}, ("lemon_failure_share is 0.1", "must be 0")),
        ({"lemon_host_share": 1.0, "lemon_failure_share": 1.0}, ("lemon_host_share is 1", "below 1")),
        ({"confidence": 1.0}, ("confidence is 1", "0.95")),
        ({"pue": 0.5}, ("pue is 0.5", "1 or more")),
    ],
)
def test_an_impossible_value_is_one_sentence_with_the_key_and_what_is_allowed(
    values: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**{"gpu_count": 1_024, **values})  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_rate_may_be_said_in_four_ways_that_agree() -> None:
    ways = [
        Plan(gpu_count=1_024, failures_per_1000_host_days=4.0),
        Plan(gpu_count=1_024, gpu_days_per_failure=2_000.0),
        Plan(gpu_count=1_024, mtbf_s=86_400_000 / (4.0 * 128)),
        Plan(gpu_count=1_024, failure_count=40, observed_host_days=10_000.0),
    ]
    between = [evaluate(plan).value("mtbf_s") for plan in ways]
    assert between == pytest.approx([between[0]] * 4)


def test_a_counted_rate_has_its_exact_interval_and_moves_every_figure_with_it() -> None:
    report = evaluate(Plan(gpu_count=1_024, failure_count=10, observed_host_days=1_000.0))
    rate = report.figure("failures_per_1000_host_days")
    assert (rate.low, rate.high) == (pytest.approx(4.795, abs=0.001), pytest.approx(18.390, abs=0.001))
    share, between = report.figure("effective_share"), report.figure("mtbf_s")
    assert share.low is not None
    assert share.high is not None
    assert share.low < share.value < share.high
    low = evaluate(Plan(gpu_count=1_024, failures_per_1000_host_days=rate.high or 0.0))
    assert share.low == pytest.approx(low.value("effective_share"))
    assert between.low == pytest.approx(low.value("mtbf_s"))
    assert report.confidence == 0.95


def test_failures_in_bursts_widen_the_range_and_leave_the_rate() -> None:
    plan = Plan(gpu_count=1_024, failure_count=40, observed_host_days=1_000.0)
    alone, bursts = (evaluate(replace(plan, count_variance_ratio=ratio)) for ratio in (1.0, 4.0))
    for key in ("mtbf_s", "effective_share", "replica_effective_share", "spare_count", "failures_per_day"):
        one, two = alone.figure(key), bursts.figure(key)
        assert one.value == two.value
        assert (two.low or 0) < (one.low or 0) < (one.high or 0) < (two.high or 0), key
    rate = bursts.figure("failures_per_1000_host_days")
    assert (rate.low, rate.high) == (pytest.approx(4 * 4.7954, abs=1e-3), pytest.approx(4 * 18.3904, abs=1e-3))
    assert "count_variance_ratio" in evaluate(plan).figure("mtbf_s").assumed
    assert "count_variance_ratio" not in bursts.figure("mtbf_s").assumed


def test_the_days_to_train_have_the_range_of_the_effective_time() -> None:
    report = evaluate(FULL)
    days, share = report.figure("training_days"), report.figure("effective_share")
    assert days.low == pytest.approx(days.value * share.value / (share.high or 0))
    assert days.high == pytest.approx(days.value * share.value / (share.low or 0))


def test_no_failure_seen_is_not_never() -> None:
    report = evaluate(Plan(gpu_count=8, failure_count=0, observed_host_days=1_000.0))
    between = report.figure("mtbf_s")
    assert math.isfinite(between.value)
    assert between.high == math.inf
    assert report.value("failures_per_1000_host_days") == pytest.approx(0.5)


def test_a_wider_confidence_widens_the_range() -> None:
    narrow, wide = (
        evaluate(replace(FULL, confidence=confidence)).figure("effective_share") for confidence in (0.8, 0.99)
    )
    assert (wide.low or 0) < (narrow.low or 0) < (narrow.high or 0) < (wide.high or 0)


def test_planned_interruptions_cost_their_time_and_no_more() -> None:
    plan = Plan(gpu_count=16_384, planned_stop_s=864.0, failures_per_1000_host_days=3.79)
    without, daily = evaluate(plan), evaluate(replace(plan, planned_per_day=1.0))
    assert daily.value("effective_share") == pytest.approx(without.value("effective_share") * 0.99)
    assert daily.value("restart_limit_90_s") <= without.value("restart_limit_90_s")
    endless = evaluate(replace(plan, planned_per_day=100.0, parameter_count=1e9, token_count=1e9))
    assert endless.value("effective_share") == 0.0
    assert "training_days" not in endless.by_key


def test_mfu_is_a_share_of_the_peak() -> None:
    report = evaluate(Plan(gpu_count=8, mfu_share=0.5, gpu_peak_flops=1e15, parameter_count=1e9, token_count=1e9))
    assert report.inputs.flops_per_gpu == 5e14
    assert evaluate(Plan(gpu_count=8, mfu_share=0.5)).inputs.flops_per_gpu == pytest.approx(494.7e12)


def test_a_missed_interval_costs_and_the_best_lever_may_be_to_move_it() -> None:
    report = evaluate(Plan(gpu_count=16_384, checkpoint_interval_s=4 * 3_600.0, checkpoint_pause_s=10.0))
    assert report.value("interval_cost_share") > 0.2
    assert report.value("best_interval_gain_share") == pytest.approx(report.value("interval_cost_share"))
    assert evaluate(Plan(gpu_count=16_384)).value("interval_cost_share") == 0.0


def test_spares_at_hand_give_an_availability_and_waiting_costs() -> None:
    report = evaluate(Plan(gpu_count=16_384, spare_host_count=5))
    assert 0.0 < report.value("pool_availability_share") < 0.99
    assert report.value("pool_effective_share") == pytest.approx(
        report.value("pool_availability_share") * report.value("effective_share")
    )
    needed = int(report.value("spare_count"))
    enough = evaluate(Plan(gpu_count=16_384, spare_host_count=needed))
    assert enough.value("pool_availability_share") >= 0.99
    assert evaluate(Plan(gpu_count=16_384, spare_host_count=needed - 1)).value("pool_availability_share") < 0.99


def test_excluding_lemons_needs_fewer_spares_and_two_classes_alone_do_not_spread() -> None:
    report = evaluate(FULL)
    assert report.value("excluded_spare_count") < report.value("spare_count")
    lemons = Lemons(host_share=0.05, failure_share=0.5)
    spares = lemon_spares(
        host_count=2_048,
        failures_per_1000_host_days=3.0,
        replacement_s=86_400.0,
        lemons=lemons,
        availability=0.99,
    )
    assert abs(spares - poisson_spares(down_mean=2_048 * 0.003, availability=0.99)) <= 1
    assert lemons.rate_factor == pytest.approx(0.5 / 0.95)


def test_without_lemons_there_is_nothing_to_exclude() -> None:
    report = evaluate(replace(FULL, lemon_host_share=0.0))
    assert report.inputs.lemon_failure_share == 0.0
    assert report.value("excluded_spare_count") == report.value("spare_count")


@given(
    st.integers(1, 60),
    st.floats(0.1, 40.0),
    st.floats(0.0, 2e6),
    st.floats(0.01, 0.5),
    st.floats(0.0, 1.0),
    st.sampled_from([0.5, 0.9, 0.999]),
)
def test_spares_for_two_kinds_of_host_are_those_of_a_plain_sum(
    hosts: int, rate: float, away_s: float, share: float, more: float, wanted: float
) -> None:
    lemons = Lemons(host_share=share, failure_share=share + more * (1 - share))
    found = lemon_spares(
        host_count=hosts,
        failures_per_1000_host_days=rate,
        replacement_s=away_s,
        lemons=lemons,
        availability=wanted,
    )
    count = round(hosts * share)
    masses = [1.0]
    for trials, factor in ((count, lemons.lemon_factor), (hosts - count, lemons.rate_factor)):
        away = rate * factor / 1000 / 86_400 * away_s
        p = away / (1 + away)
        kind = [math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]
        masses = [
            sum(masses[i] * kind[n - i] for i in range(len(masses)) if 0 <= n - i < len(kind))
            for n in range(len(masses) + trials)
        ]
    assert sum(masses[: found + 1]) >= wanted - 1e-9
    assert sum(masses[:found]) < wanted + 1e-9


def test_a_smaller_model_trained_longer_reaches_the_same_loss() -> None:
    best = optimum(CHINCHILLA, flops=1e24)
    small = over_training(CHINCHILLA, flops=1e24)
    assert small is not None
    assert loss(CHINCHILLA, small.model) == pytest.approx(loss(CHINCHILLA, best))
    assert small.extra_compute_share > 0
    assert over_training(CHINCHILLA, flops=1e24, size_share=0.01) is None


def test_a_ramp_limit_says_how_long_the_larger_swing_must_take() -> None:
    report = evaluate(Plan(gpu_count=10_000, gpu_power_w=1_000.0, idle_share=0.1, ramp_limit_w_per_s=1e6))
    assert report.value("end_swing_w") == pytest.approx(9e6)
    assert report.value("ramp_s") == pytest.approx(9.0)
    assert report.value("buffer_j") == pytest.approx(9e6 * 9.0 / 2)


def test_contradictions_follow_the_sources_of_the_inputs() -> None:
    def claims(report: PlanReport) -> str:
        return " ".join(found.claim for found in report.contradictions)

    assert "30.1 %" in claims(evaluate(FULL))
    assert "30.1 %" not in claims(evaluate(Plan(gpu_count=8, failures_per_1000_host_days=1, replaced_share=1)))
    assert "47.7 days" in claims(evaluate(preset_plan("rsc-16k")))
    assert "Poisson" in claims(evaluate(Plan(gpu_count=8)))
    assert all(found.claim and found.check and found.used for found in CONTRADICTIONS)


def test_origins_of_a_preset_are_told_and_its_guesses_are_assumed() -> None:
    report = evaluate(FULL)
    assert "2407.21783" in report.inputs.origins["gpu_count"].source
    assert "checkpoint_pause_s" in report.assumptions
    assert "token_count" not in report.assumptions
    plan = Plan(gpu_count=8, restart_s=5.0, origins={"restart_s": Origin(source="a guess", is_assumed=True)})
    assert evaluate(plan).figure("restart_total_s").assumed == {"detection_s", "restart_s", "restore_s"}


def test_the_curves_pass_through_the_plans_own_figures() -> None:
    report = evaluate(replace(FULL, spare_host_count=20))
    inputs, best_s = report.inputs, report.value("exact_interval_s")
    exact = share_over_interval(inputs, best_interval_s=best_s)[0]
    nearest = min(exact.points, key=lambda point: abs(point[0] - best_s))
    assert nearest[1] == pytest.approx(report.value("best_effective_share"), abs=1e-6)
    assert max(share for _, share in exact.points) <= report.value("best_effective_share") + 1e-12
    for curve in share_over_gpus(inputs):
        assert [share for _, share in curve.points][-1] < curve.points[0][1]
    spares = availability_over_spares(inputs, spare_count=27)
    assert dict(spares[1].points)[20.0] == pytest.approx(report.value("pool_availability_share"))
    assert dict(spares[0].points)[20.0] > dict(spares[1].points)[20.0]


@given(
    st.integers(1, 2_000_000),
    st.floats(0.01, 100.0),
    st.floats(0.01, 3_600.0),
    st.floats(0.0, 7_200.0),
    st.floats(0.5, 0.9999),
)
def test_every_plan_gives_sane_figures(gpus: int, rate: float, pause_s: float, restart_s: float, wanted: float) -> None:
    report = evaluate(
        Plan(
            gpu_count=gpus,
            failures_per_1000_host_days=rate,
            checkpoint_pause_s=pause_s,
            restart_s=restart_s,
            availability_share=wanted,
        )
    )
    for figure in report.figures:
        assert not math.isnan(figure.value), figure.key
        if figure.unit == "share":
            assert -1e-12 <= figure.value <= 1.0, figure.key
        if figure.low is not None and figure.high is not None:
            assert figure.low <= figure.high, figure.key
    assert report.value("effective_share") <= report.value("best_effective_share") + 1e-12
    assert report.value("loss_budget_99_s") < report.value("loss_budget_90_s")
    assert report.value("spare_count") >= report.value("hosts_down_mean") - 1 or wanted < 0.7
