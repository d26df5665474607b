"""What the saver costs is what steps beside it take longer, and never more than its own time."""

import pytest

from everstep.policy.saver_cost import SaverCost


def measured(*, step_s: float, beside_s: float, took_s: float = 9.0, saves: int = 2) -> SaverCost:
    """Six quiet steps, then saves of three steps each with four quiet ones between."""
    cost, now_s = SaverCost(), 0.0
    cost.end_step(now_s, is_busy=False, saves=0, took_s=0.0)
    for number in range(saves + 1):
        for is_busy in [False] * 6 + [True] * 3:
            now_s += beside_s if is_busy else step_s
            cost.end_step(now_s, is_busy=is_busy, saves=number, took_s=took_s)
    return cost


def test_the_cost_of_a_save_is_the_extra_of_all_steps_beside_it() -> None:
    assert measured(step_s=1.0, beside_s=1.2).pause_s() == pytest.approx(0.6)


def test_the_cost_is_neither_below_nothing_nor_above_the_savers_own_time() -> None:
    assert measured(step_s=1.0, beside_s=0.5).pause_s() == 0.0
    assert measured(step_s=1.0, beside_s=5.0, took_s=0.7).pause_s() == pytest.approx(0.7)


def test_nothing_is_said_of_one_save() -> None:
    assert measured(step_s=1.0, beside_s=1.2, saves=1).pause_s() is None
