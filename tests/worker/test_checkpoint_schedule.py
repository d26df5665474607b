"""The schedule of saves follows what was measured, and a fixed interval keeps to its multiples."""

import pytest

from everstep.domain.errors import ConfigError
from everstep.worker import checkpoint_schedule
from everstep.worker.checkpoint_schedule import FIRST_SAVE_STEPS, SaveConfig, Schedule


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(checkpoint_schedule, "time", clock)
    return clock


def run(schedule: Schedule, clock: Clock, *, start: int, step_s: float, stall_s: float, until: int) -> list[int]:
    """The steps at which it saves."""
    saves = []
    for step in range(start + 1, until + 1):
        clock.now_s += step_s
        if schedule.due(step):
            clock.now_s += stall_s
            schedule.agree(step, schedule.decide(stall_s))
            saves.append(step)
    return saves


def test_the_first_save_is_early_and_the_next_are_half_a_minute_apart(clock: Clock) -> None:
    schedule = Schedule(SaveConfig(), step=0, interval_steps=None)
    assert run(schedule, clock, start=0, step_s=0.5, stall_s=0.1, until=200) == [FIRST_SAVE_STEPS, 70, 130, 190]


def test_a_slow_save_costs_a_fiftieth_of_the_time_at_most(clock: Clock) -> None:
    schedule = Schedule(SaveConfig(), step=0, interval_steps=None)
    assert run(schedule, clock, start=0, step_s=1.0, stall_s=4.0, until=450) == [10, 210, 410]


def test_a_resumed_run_begins_with_the_interval_that_was_measured_before(clock: Clock) -> None:
    schedule = Schedule(SaveConfig(), step=130, interval_steps=60)
    assert run(schedule, clock, start=130, step_s=0.5, stall_s=0.1, until=260) == [190, 250]


def test_a_fixed_interval_saves_at_its_multiples_after_a_resume_too(clock: Clock) -> None:
    schedule = Schedule(SaveConfig(every_steps=100), step=130, interval_steps=60)
    assert run(schedule, clock, start=130, step_s=0.5, stall_s=9.0, until=420) == [200, 300, 400]


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"every_s": 0.0}, {"keep": 0}, {"rehearse": "maybe"}])
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SaveConfig(**wrong)  # type: ignore[arg-type]
