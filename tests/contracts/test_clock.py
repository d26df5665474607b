"""The `Clock` port, real and simulated."""

from collections.abc import Callable

import pytest

from everstep.adapters.clock import MonotonicClock
from everstep.ports import Clock
from everstep.sim.clock import SimClock


def simulated() -> tuple[Clock, Callable[[], object]]:
    clock = SimClock()
    return clock, lambda: clock.advance(0.001)


def real() -> tuple[Clock, Callable[[], object]]:
    return MonotonicClock(), lambda: None  # it needs nobody to move it


@pytest.fixture(params=[real, simulated])
def clock(request: pytest.FixtureRequest) -> tuple[Clock, Callable[[], object]]:
    return request.param()  # type: ignore[no-any-return]


def test_it_starts_near_zero_and_never_goes_back(clock: tuple[Clock, Callable[[], object]]) -> None:
    port, move = clock
    times = [port.now_s()]
    for _ in range(1000):
        move()
        times.append(port.now_s())
    assert 0.0 <= times[0] < 1.0
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_the_wall_time_is_a_text_for_people(clock: tuple[Clock, Callable[[], object]]) -> None:
    assert clock[0].wall()


def test_a_real_clock_goes_on_where_a_run_was_left_and_shares_its_zero() -> None:
    clock = MonotonicClock(start_at_s=1000.0)
    assert 1000.0 <= clock.now_s() < 1001.0
    assert clock.to_run_s(clock.zero_ns) == 0.0
    assert clock.to_run_s(clock.zero_ns + 2_500_000_000) == 2.5


def test_the_real_wall_time_is_utc_with_milliseconds() -> None:
    wall = MonotonicClock().wall()
    assert len(wall) == len("2026-11-30T05:44:33.123Z")
    assert wall.endswith("Z")
    assert wall[19] == "."


def test_a_simulated_clock_stands_still_until_it_is_moved() -> None:
    clock = SimClock()
    assert {clock.now_s() for _ in range(10)} == {0.0}
    clock.advance(2.5)
    assert clock.now_s() == 2.5
    with pytest.raises(AssertionError):
        clock.advance(-1.0)
