"""What a record of host faults says: time down, spread, worst hosts, and how far its count may be from the mean."""

import math
from pathlib import Path

import pytest

from everstep.adapters.fault_trace import read_fault_trace
from everstep.domain.errors import ConfigError
from everstep.planning.distributions import negative_binomial_quantile, poisson_quantile
from everstep.planning.failures import DAY_S
from everstep.planning.traces import HostFault, count_variance_ratio, down_quantile, down_time_s, summarize

STEPFUN = (Path(__file__).resolve().parents[2] / "../shared/data/node_faults_stepfun/fault_trace.json").resolve()


def fault(host: str, began: float, ended: float) -> HostFault:
    return HostFault(host=host, began_s=began * DAY_S, ended_s=ended * DAY_S, level="Hardware Failure", detail="GPU")


def test_a_host_with_two_open_faults_is_down_once() -> None:
    faults = [fault("a", 1, 4), fault("a", 2, 3), fault("a", 3.5, 6), fault("b", 5, 7)]
    assert down_time_s(faults, duration_s=10 * DAY_S) == {0: 4 * DAY_S, 1: 5 * DAY_S, 2: DAY_S}


def test_the_quantile_is_the_number_that_time_does_not_exceed() -> None:
    spent = {0: 90.0, 1: 9.0, 5: 1.0}
    assert [down_quantile(spent, p) for p in (0.5, 0.9, 0.99, 0.995, 1.0)] == [0, 0, 1, 5, 5]
    assert down_quantile({}, 0.5) == 0


def test_a_summary_adds_up() -> None:
    found = summarize(
        [fault("a", 1, 3), fault("a", 4, 5), fault("b", 1, 4)], host_count=20, duration_s=10 * DAY_S, source="x"
    )
    assert found.rate.per_1000_host_days == pytest.approx(3 * 1000 / 200)
    assert found.repair_s == pytest.approx(2 * DAY_S)
    assert found.down_mean == pytest.approx(0.6)
    assert (found.top_host_share, found.top_failure_share) == (0.05, pytest.approx(2 / 3))
    assert found.count_variance_ratio == 1.0


def test_bursts_show_in_the_count_of_fortnights_and_even_faults_do_not() -> None:
    even = [fault(f"h{day}", day, day + 1) for day in range(280)]
    assert count_variance_ratio(even, duration_s=280 * DAY_S) == 1.0
    burst = [fault(f"h{i}", 14 * (i // 28) * 2 + 3, 400) for i in range(280)]
    assert count_variance_ratio(burst, duration_s=280 * DAY_S) > 10
    assert count_variance_ratio(burst, duration_s=50 * DAY_S) == 1.0
    assert count_variance_ratio([], duration_s=280 * DAY_S) == 1.0


@pytest.mark.parametrize(
    ("faults", "hosts", "days", "words"),
    [
        ([], 5, 1.0, "holds no fault"),
        ([fault("a", 0, 0)], 5, 0.0, "at one moment"),
        ([fault("a", 0, 1), fault("b", 0, 1)], 1, 1.0, "2 hosts had faults, and 1 were watched"),
    ],
)
def test_what_cannot_be_fitted_says_why(faults: list[HostFault], hosts: int, days: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        summarize(faults, host_count=hosts, duration_s=days * DAY_S, source="x")


@pytest.mark.skipif(not STEPFUN.exists(), reason="StepFun's fault trace is not beside this checkout")
def test_stepfuns_record_has_its_published_figures_and_a_spread_that_poisson_has_not() -> None:
    found = summarize(read_fault_trace(STEPFUN), host_count=400, duration_s=348 * DAY_S, source="StepFun")
    assert found.fault_count == 584
    assert found.rate.per_1000_host_days == pytest.approx(4.195, abs=0.0005)
    assert found.repair_s / 3_600 == pytest.approx(132.8, abs=0.1)
    assert found.down_mean == pytest.approx(9.26, abs=0.005)
    assert found.down_p99 == 31
    assert found.top_failure_share == pytest.approx(0.245, abs=0.0005)
    assert poisson_quantile(found.down_mean, 0.99) == 17
    negative_binomial = negative_binomial_quantile(found.down_mean, found.down_variance_ratio, 0.99)
    assert negative_binomial == pytest.approx(31, abs=2)
    assert found.count_variance_ratio == pytest.approx(8.5, abs=0.1)
    half_width = (found.rate.high - found.rate.low) / 2 / found.rate.per_1000_host_days
    assert half_width == pytest.approx(1.96 * math.sqrt(8.5 / 584), rel=0.1)
