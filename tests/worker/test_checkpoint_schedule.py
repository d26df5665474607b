"""The schedule of saves follows what was measured, and a fixed interval keeps to its multiples."""

import pytest

from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.errors import ConfigError
from everstep.worker.notes import Notes
from everstep.worker.observer import Observer
from everstep.worker.saving import schedule as checkpoint_schedule
from everstep.worker.saving.schedule import FIRST_SAVE_STEPS, SaveConfig, Schedule


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


def schedule_of(
    config: SaveConfig, *, step: int = 0, interval_steps: int | None = None, mtbf_s: float = 1e7
) -> Schedule:
    return Schedule(config, step=step, interval_steps=interval_steps, mtbf_s=lambda: mtbf_s)


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


def test_the_first_save_is_early_and_the_next_are_far_apart_in_a_job_that_never_fails(clock: Clock) -> None:
    schedule = schedule_of(SaveConfig())
    assert run(schedule, clock, start=0, step_s=0.5, stall_s=0.1, until=3000) == [FIRST_SAVE_STEPS, 1210, 2410]


def test_a_job_that_fails_often_saves_often_and_never_more_so_than_allowed(clock: Clock) -> None:
    schedule = schedule_of(SaveConfig(), mtbf_s=600.0)
    assert run(schedule, clock, start=0, step_s=0.5, stall_s=0.1, until=200) == [FIRST_SAVE_STEPS, 70, 130, 190]


def test_a_slow_save_moves_them_apart_as_the_exact_optimum_says(clock: Clock) -> None:
    schedule = schedule_of(SaveConfig(), mtbf_s=10_000.0)
    saves = run(schedule, clock, start=0, step_s=1.0, stall_s=4.0, until=700)
    assert saves == [10, 290, 570]  # √(2 · 4 s · 10,000 s) = 283 s, less some of the pause itself


def test_a_resumed_run_begins_with_the_interval_that_was_measured_before(clock: Clock) -> None:
    schedule = schedule_of(SaveConfig(), step=130, interval_steps=60, mtbf_s=600.0)
    assert run(schedule, clock, start=130, step_s=0.5, stall_s=0.1, until=260) == [190, 250]


def test_a_fixed_interval_saves_at_its_multiples_after_a_resume_too(clock: Clock) -> None:
    schedule = schedule_of(SaveConfig(every_steps=100), step=130, interval_steps=60)
    assert run(schedule, clock, start=130, step_s=0.5, stall_s=9.0, until=420) == [200, 300, 400]


def test_the_time_between_failures_comes_from_attempts_and_the_runs_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "now_s", lambda _: 900.0)
    paths = WorkerPaths(run="r", attempt=4, rank=0)
    assert checkpoint_schedule.job_mtbf_s(Observer(paths), 8) == 300.0
    assert checkpoint_schedule.job_mtbf_s(Observer(None), 8) > 1e7  # one host at Llama 3's rate: 264 days


@pytest.mark.parametrize(
    "wrong", [{"every_steps": 0}, {"every_s": 0.0}, {"within_s": 0.0}, {"keep": 0}, {"rehearse": "maybe"}]
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SaveConfig(**wrong)  # type: ignore[arg-type]
