"""The benchmark's judgement of its repetitions, on invented rows."""

import ast

from bench.false_alarms import QUICK, Plan
from bench.hangs import outcome_of as hang_outcome
from bench.hangs import stalling_line
from bench.jobs import HERE
from bench.recovery import outcome_of as recovery_outcome


def test_a_failed_recovery_is_counted_and_leaves_the_median_to_the_others() -> None:
    parts = dict.fromkeys(("detect", "teardown", "spawn", "import", "init", "restore", "first_step"), 0.1)
    rows = [
        {"launcher": "everstep", "total_s": 1.0, "parts": parts},
        {"launcher": "everstep", "error": "no step"},
        {"launcher": "torchrun", "total_s": 9.0, "parts": {**parts, "detect": None}},
    ]
    time_bar, failures, ratio = recovery_outcome(rows).bars
    assert (time_bar.value, failures.value, ratio.value) == (1.0, 1, 9.0)
    assert not failures.is_met
    assert "1 failed" in time_bar.spread


def test_without_a_recovery_there_is_no_ratio() -> None:
    rows = [{"launcher": "everstep", "total_s": 1.0}, {"launcher": "torchrun", "error": "never"}]
    assert recovery_outcome(rows).bars[2].value is None


def test_a_hang_bar_is_as_good_as_its_worst_repetition() -> None:
    rows = [{"verdict_s": 1.7, "again_s": 2.0, "is_right": True}, {"verdict_s": 2.6, "is_right": False, "error": "x"}]
    named, verdict, again = hang_outcome("freeze", rows, unasked=0).bars
    assert (named.value, verdict.value, again.value) == (1, 2.6, 2.0)
    assert [bar.is_met for bar in (named, verdict, again)] == [False, False, True]


def test_the_stalling_lines_of_the_workload_are_in_its_stalling_functions() -> None:
    source = (HERE / "workload.py").read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for kind, name in (("gil", "stall_with_the_lock"), ("sleep", "stall_asleep")):
        node = functions[name]
        assert node.lineno < stalling_line(source, kind) <= (node.end_lineno or 0)


def test_a_healthy_job_comes_near_its_duration_and_has_at_least_one_cycle() -> None:
    assert abs(Plan().length_s(Plan().cycles(600.0)) - 600.0) <= Plan().cycle_s / 2
    assert QUICK.cycles(1.0) == 1
    assert QUICK.length_s(1) <= 60.0
