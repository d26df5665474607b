"""How long a silence is borne: not at all for what cannot be meant, longer each time for what may be a pause."""

import pytest

from everstep.domain.causes import Cause
from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.hang import HangFinding
from everstep.policy.patience import Patience


def finding(trouble: Trouble = Trouble.NEVER_ENTERED, *, ranks: tuple[int, ...] = (1,), **more: object) -> HangFinding:
    verdict = Verdict(
        trouble=trouble,
        ranks=tuple(map(Rank, ranks)),
        hosts=(),
        reason="r.",
        cause=Cause(component="c", category="c"),
        signature="s",
    )
    return HangFinding(verdict=verdict, **more)  # type: ignore[arg-type]


def patience() -> Patience:
    return Patience(unsure_s=15.0, excused_s=300.0, ending_s=1800.0)


def test_the_first_time_a_culprit_is_borne_not_at_all_and_then_longer_each_time() -> None:
    borne = [patience().with_finding(finding(), repeats=repeats) for repeats in range(6)]
    assert borne[0] == 0.0
    assert borne == sorted(borne)
    assert borne[-1] == borne[-2]


@pytest.mark.parametrize("trouble", [Trouble.DEAD, Trouble.STORE_LOST])
def test_what_cannot_be_meant_is_never_borne(trouble: Trouble) -> None:
    assert patience().with_finding(finding(trouble), repeats=5) == 0.0


def test_a_process_that_the_kernel_says_is_stopped_is_never_borne() -> None:
    assert patience().with_finding(finding(Trouble.FROZEN, stopped=True), repeats=5) == 0.0


def test_a_silence_without_a_culprit_or_with_an_excuse_has_its_own_time() -> None:
    assert patience().with_finding(finding(Trouble.UNKNOWN, ranks=()), repeats=0) == 15.0
    assert patience().with_finding(finding(excuse=Phase.SAVING), repeats=0) == 300.0
    assert patience().with_finding(finding(excuse=Phase.ENDING), repeats=0) == 1800.0


def test_a_pause_that_ended_in_a_step_is_allowed_twice_over_from_then_on() -> None:
    learned = patience()
    learned.bear("s", since_s=100.0)
    learned.saw_step(140.0)
    assert learned.with_finding(finding(), repeats=0) == 80.0
    learned.saw_step(900.0)  # a step without a silence before it teaches nothing
    assert learned.with_finding(finding(), repeats=0) == 80.0


def test_a_silence_that_ended_with_the_attempt_teaches_nothing() -> None:
    learned = patience()
    learned.bear("s", since_s=100.0)
    learned.forget_borne()
    learned.saw_step(140.0)
    assert learned.with_finding(finding(), repeats=0) == 0.0
