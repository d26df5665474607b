"""Whether another attempt is worth it: repeats climb the ladder, progress forgives, budgets and storms end the job."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.domain.causes import Cause
from everstep.domain.commands import Rung
from everstep.domain.errors import ExitCode
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.restarts import Decision, RestartBudget, RestartConfig

HANGS = (Trouble.FROZEN, Trouble.NEVER_ENTERED, Trouble.INSIDE_OP, Trouble.UNKNOWN)


def failure(trouble: Trouble = Trouble.DEAD, signature: str = "x") -> Verdict:
    return Verdict(
        trouble=trouble, ranks=(), hosts=(), reason="r.", cause=Cause(component="c", category="c"), signature=signature
    )


def decide(budget: RestartBudget, verdict: Verdict | None = None, **how: Any) -> Decision:
    return budget.decide(verdict or failure(), **({"planned": False, "at_s": 0.0} | how))


def test_a_first_failure_restarts_everything_at_once() -> None:
    budget = RestartBudget(RestartConfig())
    decision = decide(budget)
    assert (decision.rung, decision.delay_s, decision.exit_code) == (Rung.RESTART_ALL, 0.0, None)
    assert decision.why.startswith("restart 1: ")
    assert budget.restart_count == 1


def test_restarts_without_progress_wait_longer_and_longer_and_then_as_long_as_the_last() -> None:
    budget = RestartBudget(RestartConfig(backoff_s=(0.0, 1.0, 5.0)))
    assert [decide(budget, failure(signature=str(n))).delay_s for n in range(5)] == [0.0, 1.0, 5.0, 5.0, 5.0]


def test_progress_makes_the_next_restart_come_at_once_again() -> None:
    budget = RestartBudget(RestartConfig(backoff_s=(0.0, 5.0)))
    decide(budget)
    budget.saw_step(10)
    assert decide(budget).delay_s == 0.0
    budget.saw_step(10)
    assert decide(budget).delay_s == 5.0  # step 10 was reached before


@pytest.mark.parametrize(
    ("trouble", "limit", "code", "rung"),
    [
        (Trouble.SCRIPT_ERROR, 2, ExitCode.SCRIPT_BUG, Rung.ASK_A_PERSON),
        (Trouble.DISK_FULL, 2, ExitCode.RETRY_HERE, Rung.GIVE_BACK),
        (Trouble.DEAD, 4, ExitCode.RETRY_ELSEWHERE, Rung.GIVE_BACK),
        (Trouble.LOST_CONNECTION, 4, ExitCode.RETRY_HERE, Rung.GIVE_BACK),
        (Trouble.STORE_LOST, 4, ExitCode.RETRY_HERE, Rung.GIVE_BACK),
        (Trouble.START_FAILED, 4, ExitCode.RETRY_HERE, Rung.GIVE_BACK),
        *((trouble, 4, ExitCode.HANG_UNRESOLVED, Rung.ASK_A_PERSON) for trouble in HANGS),
    ],
)
def test_the_same_failure_ends_the_job_after_its_limit_with_its_own_exit_code(
    trouble: Trouble, limit: int, code: ExitCode, rung: Rung
) -> None:
    budget = RestartBudget(RestartConfig())
    for _ in range(limit - 1):
        assert decide(budget, failure(trouble)).exit_code is None
    decision = decide(budget, failure(trouble))
    assert (decision.exit_code, decision.rung) == (code, rung)
    assert decision.why == f"the same failure came {limit} times without a new step in between"


def test_different_failures_are_counted_apart() -> None:
    budget = RestartBudget(RestartConfig())
    decisions = [decide(budget, failure(Trouble.SCRIPT_ERROR, signature=f"{n % 9}")) for n in range(10)]
    assert [decision.exit_code for decision in decisions] == [None] * 9 + [ExitCode.SCRIPT_BUG]


def test_an_end_that_was_ordered_is_no_repeat_of_anything() -> None:
    budget = RestartBudget(RestartConfig())
    assert {decide(budget, planned=True).exit_code for _ in range(10)} == {None}


def test_an_attempt_that_did_many_steps_was_worth_it_unless_it_failed_as_before_at_the_same_count() -> None:
    config = RestartConfig(identical_failures_max=2, fruitful_steps=20)
    elsewhere, same_place = RestartBudget(config), RestartBudget(config)
    assert [decide(elsewhere, steps=steps).exit_code for steps in (50, 90, 130)] == [None] * 3
    assert decide(same_place, steps=50).exit_code is None
    assert decide(same_place, steps=51).exit_code is ExitCode.RETRY_ELSEWHERE


def test_a_worthwhile_attempt_that_failed_otherwise_forgives_what_was_before() -> None:
    budget = RestartBudget(RestartConfig(identical_failures_max=2, fruitful_steps=20))
    for signature in "abababab":
        assert decide(budget, failure(signature=signature), steps=50).exit_code is None
    assert budget.repeats(failure(signature="a"), steps=50) == 0
    assert budget.repeats(failure(signature="b"), steps=50) == 1
    assert budget.repeats(failure(signature="b"), steps=90) == 0


def test_a_limit_of_restarts_counts_all_of_them_whatever_the_progress() -> None:
    budget = RestartBudget(RestartConfig(restart_count_max=2))
    for step in (10, 20):
        assert decide(budget).exit_code is None
        budget.saw_step(step)
    decision = decide(budget)
    assert (decision.exit_code, decision.why) == (ExitCode.BUDGET_SPENT, "--max-restarts 2 is used up")


def test_without_any_restart_a_script_error_is_the_scripts_bug() -> None:
    config = RestartConfig(restart_count_max=0)
    assert decide(RestartBudget(config), failure(Trouble.SCRIPT_ERROR)).exit_code is ExitCode.SCRIPT_BUG
    assert decide(RestartBudget(config), failure(Trouble.FROZEN)).exit_code is ExitCode.BUDGET_SPENT


def test_the_storm_breaker_opens_at_its_count_and_forgets_what_is_older_than_its_window() -> None:
    config = RestartConfig(storm_count_max=3, storm_window_s=100.0, identical_failures_max=99)
    budget = RestartBudget(config)
    assert [decide(budget, at_s=float(at_s)).exit_code for at_s in (0, 10, 20)] == [None] * 3
    assert decide(budget, at_s=99.0).exit_code is ExitCode.BUDGET_SPENT
    assert decide(budget, at_s=101.0).exit_code is None
    assert decide(budget, at_s=102.0).why == "3 restarts within 100 s are a storm"


@given(
    failures=st.lists(
        st.tuples(st.sampled_from(Trouble), st.sampled_from("abc"), st.booleans(), st.integers(0, 40)), max_size=40
    ),
    limit=st.none() | st.integers(0, 5),
)
def test_a_decision_either_goes_on_or_ends_and_never_exceeds_the_limit(
    failures: list[tuple[Trouble, str, bool, int]], limit: int | None
) -> None:
    budget = RestartBudget(RestartConfig(restart_count_max=limit))
    for number, (trouble, signature, planned, step) in enumerate(failures):
        decision = budget.decide(failure(trouble, signature), planned=planned, at_s=float(number))
        assert (decision.exit_code is None) == (decision.rung is Rung.RESTART_ALL)
        assert decision.exit_code not in (ExitCode.DONE, ExitCode.INTERNAL, ExitCode.USAGE)
        assert limit is None or budget.restart_count <= limit
        budget.saw_step(step)
