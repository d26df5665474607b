"""The llama3 preset against what was published, and the recorded trace against the policy's spares."""

import json
import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from everstep.cli.simulate_batch import exact_of
from everstep.cli.simulate_play import play
from everstep.domain.causes import LLAMA3, LLAMA3_PLANNED_COUNT, LLAMA3_UNEXPECTED_COUNT, FaultKind
from everstep.domain.errors import ConfigError, EvidenceError
from everstep.planning import evaluate, preset_plan
from everstep.policy.accounting import Category
from everstep.sim import presets
from everstep.sim.delays import EVERSTEP, Origin, with_measured
from everstep.sim.failures import draw_faults
from everstep.sim.power import heat_factor
from everstep.sim.scenario import SILENT_OF_LLAMA3, changed
from everstep.sim.symptoms import is_silent
from everstep.sim.trace import parse_trace

TRACE = Path(__file__).parents[2] / "../shared/data/node_faults_stepfun/fault_trace.json"
DRAWS = 100


def draws() -> list[Counter[str]]:
    """The causes of many runs' faults on the hosts in use, planned ones apart."""
    one = presets.LLAMA3
    found = []
    for seed in range(DRAWS):
        faults = draw_faults(one.failures, host_count=one.host_count, duration_s=one.duration_s, rng=Random(seed))
        counts = Counter(fault.cause.component for fault in faults if not fault.planned)
        counts["planned"] = sum(fault.planned for fault in faults)
        found.append(counts)
    return found


def test_the_drawn_failures_are_llama_3s_within_sampling_error() -> None:
    runs = draws()
    unexpected = [run.total() - run["planned"] for run in runs]
    assert abs(statistics.mean(unexpected) - LLAMA3_UNEXPECTED_COUNT) < 3 * math.sqrt(LLAMA3_UNEXPECTED_COUNT / DRAWS)
    assert max(abs(count - LLAMA3_UNEXPECTED_COUNT) for count in unexpected) < 4 * math.sqrt(LLAMA3_UNEXPECTED_COUNT)
    planned = statistics.mean(run["planned"] for run in runs)
    assert abs(planned - LLAMA3_PLANNED_COUNT) < 3 * math.sqrt(LLAMA3_PLANNED_COUNT / DRAWS)
    chi2 = 0.0
    for row in LLAMA3:
        expected = DRAWS * row.count
        chi2 += (sum(run[row.cause.component] for run in runs) - expected) ** 2 / expected
    assert chi2 < 41  # 17 degrees of freedom: the 99.9th percentile is 40.8


def test_plan_and_simulator_differ_by_their_restarts_alone_as_docs_planning_says() -> None:
    one, plan = presets.LLAMA3, preset_plan("llama3-405b")
    assert abs(one.restart_mean_s - (187 + 135 + 55)) < 1
    with_its_times = evaluate(replace(plan, detection_s=187, restart_s=135, restore_s=55)).value("effective_share")
    assert round(with_its_times, 3) == 0.924
    assert 0 < with_its_times - exact_of(one) < 0.006  # the work that planned interruptions lose in the simulator


def test_the_share_of_silences_is_that_of_the_table() -> None:
    silent = sum(row.count for row in LLAMA3 if is_silent(row.fault))
    assert silent / LLAMA3_UNEXPECTED_COUNT == SILENT_OF_LLAMA3
    assert not is_silent(FaultKind.MAINTENANCE)


def test_a_whole_run_of_llama_3_agrees_with_the_exact_formula_within_a_point() -> None:
    outcome = play(presets.LLAMA3, 0)
    assert abs(outcome.unexpected_count - LLAMA3_UNEXPECTED_COUNT) < 3 * math.sqrt(LLAMA3_UNEXPECTED_COUNT)
    assert outcome.effective_share == pytest.approx(exact_of(presets.LLAMA3), abs=0.01)
    assert outcome.effective_share > 0.90
    assert outcome.named_count == outcome.unexpected_count
    assert not outcome.ended_early
    assert outcome.elapsed_s == pytest.approx(54 * 86_400, abs=120)
    assert math.isclose(sum(part.duration_s for part in outcome.parts), outcome.elapsed_s, rel_tol=1e-9)


def small(**values: float) -> presets.Scenario:
    return changed(presets.LLAMA3, {"gpus": 1024, "agents": 2, "days": 4, "per_1000_host_days": 200} | values)


def test_everstep_makes_more_of_the_same_failures_than_timeouts_do() -> None:
    shares = [
        play(scenario, 0).effective_share
        for scenario in (
            presets.with_everstep(small()),
            small(),
            presets.with_torchrun(small(), 600.0),
            presets.with_torchrun(small(), 1800.0),
        )
    ]
    assert shares == sorted(shares, reverse=True)


def test_a_slow_host_costs_slow_time_and_silent_corruption_more_replayed_work() -> None:
    plain = play(small(), 1)
    slow = play(small(slow_per_1000_host_days=10, slow_minutes=300), 1)
    assert plain.spent_s(Category.SLOW) < 60 < slow.spent_s(Category.SLOW)
    corrupted = replace(small(), failures=replace(small().failures, corruption_hours=24.0))
    assert any(
        play(corrupted, seed).spent_s(Category.REPLAYED) > 2 * play(small(), seed).spent_s(Category.REPLAYED)
        for seed in range(6)
    )


def test_it_is_slowest_at_the_hottest_hour_and_not_at_night() -> None:
    assert heat_factor(14 * 3600, 0.02) == pytest.approx(1 / 0.98)
    assert heat_factor(86_400 + 2 * 3600, 0.02) == 1.0


def test_a_bench_result_replaces_only_what_does_not_grow_with_the_job() -> None:
    parts = {"detect": 0.2, "teardown": 0.5, "spawn": 1.0, "import": 0.25, "init": 9.0, "restore": 9.0}
    made = with_measured(EVERSTEP, [{"launcher": "everstep", "parts": parts}, {"launcher": "torchrun", "parts": parts}])
    assert (made.detect_death.mean_s, made.teardown.mean_s, made.spawn.mean_s) == (0.2, 0.5, 1.25)
    assert made.spawn.origin is Origin.MEASURED
    assert (made.group_init, made.restore) == (EVERSTEP.group_init, EVERSTEP.restore)
    with pytest.raises(ConfigError, match="no recovery of everstep's"):
        with_measured(EVERSTEP, [])


# --- a recorded trace


def event(node: str, days: float, kind: str) -> dict[str, object]:
    return {"node_id": node, "event_time": days, "event_type": kind, "fault_type": {"Level": "Other", "Class": "X"}}


def test_a_trace_pairs_starts_with_ends_even_when_they_overlap_or_never_end() -> None:
    trace = parse_trace(
        [
            event("a", 1, "fault_start"),
            event("a", 1, "fault_end"),
            event("b", 2, "fault_start"),
            event("b", 3, "fault_start"),
            event("b", 4, "fault_end"),
            event("b", 6, "fault_end"),
            event("c", 7, "fault_start"),
            event("a", 8, "fault_start"),
            event("a", 10, "fault_end"),
        ]
    )
    assert [(f.hosts[0], f.at_s / 86_400, f.down_s / 86_400) for f in trace.faults] == [
        (0, 1, 0),
        (1, 2, 2),
        (1, 3, 3),
        (2, 7, 3),
        (0, 8, 2),
    ]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "empty or no JSON list"),
        ({}, "empty or no JSON list"),
        ([7], "event 1 of the fault trace is no object"),
        ([event("a", 1, "fault_start"), event("a", -1, "fault_end")], "event 2 .* days, from 0"),
        ([event("a", 1, "broken")], "event_type is 'broken'"),
        ([{"node_id": 3, "event_time": 1}], "expected a node_id"),
    ],
)
def test_a_malformed_trace_is_refused_with_a_sentence(document: object, said: str) -> None:
    with pytest.raises(EvidenceError, match=said):
        parse_trace(document)


@pytest.mark.skipif(not TRACE.exists(), reason="StepFun's trace is not shipped")
def test_spares_sized_by_what_was_down_keep_a_job_available_where_poisson_fails() -> None:
    trace = parse_trace(json.loads(TRACE.read_text()))
    assert len(trace.faults) == 584
    down = trace.down_at_once()
    assert statistics.mean(down) == pytest.approx(9.26, abs=0.01)
    scenario = replace(presets.stepfun(trace), checkpoint_interval_s=7200.0)
    assert scenario.spares == 31
    assert play(scenario, 0).available_share >= 0.99
    too_few = replace(presets.stepfun(trace, spares=17), checkpoint_interval_s=7200.0)
    assert play(too_few, 0).available_share < 0.9
