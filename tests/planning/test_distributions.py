"""Gamma, Poisson, binomial, negative binomial and bursts against tables, identities and sums."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.planning.distributions import (
    binomial_quantile,
    burst_quantile,
    gamma_cdf,
    gamma_quantile,
    negative_binomial_cdf,
    negative_binomial_quantile,
    poisson_cdf,
    poisson_quantile,
)
from everstep.planning.failures import count_interval


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (0, 0.0, 3.6889),
        (1, 0.0253, 5.5716),
        (2, 0.2422, 7.2247),
        (5, 1.6235, 11.6683),
        (10, 4.7954, 18.3904),
        (20, 12.2165, 30.8884),
        (50, 37.1110, 65.9188),
        (100, 81.3640, 121.6271),
    ],
)
def test_the_exact_poisson_intervals_are_garwoods(count: int, low: float, high: float) -> None:
    interval = count_interval(count, 0.95)
    assert interval.low == pytest.approx(low, abs=1e-3)
    assert interval.high == pytest.approx(high, abs=1e-3)


@pytest.mark.parametrize(
    ("degrees", "probability", "quantile"),
    [(1, 0.95, 3.841459), (2, 0.99, 9.210340), (10, 0.05, 3.940299), (30, 0.975, 46.979242), (100, 0.5, 99.334129)],
)
def test_gammas_quantiles_are_half_of_chi_squares(degrees: int, probability: float, quantile: float) -> None:
    assert 2 * gamma_quantile(degrees / 2, probability) == pytest.approx(quantile, abs=2e-6)
    assert gamma_cdf(degrees / 2, quantile / 2) == pytest.approx(probability, abs=1e-6)


@given(st.floats(0.01, 2_000.0), st.floats(0.0, 4_000.0))
def test_gamma_is_a_distribution_and_falls_with_its_shape(shape: float, x: float) -> None:
    value = gamma_cdf(shape, x)
    assert -1e-12 <= value <= 1 + 1e-12
    assert gamma_cdf(shape + 1, x) <= value + 1e-12


def test_gamma_agrees_with_mpmath_where_it_is_installed() -> None:
    mpmath = pytest.importorskip("mpmath")
    for shape in (0.5, 1.0, 7.5, 120.0, 2_000.0):
        for factor in (0.3, 0.9, 1.0, 1.1, 2.0):
            wanted = float(mpmath.gammainc(shape, 0, shape * factor, regularized=True))
            assert gamma_cdf(shape, shape * factor) == pytest.approx(wanted, abs=1e-11)


def poisson_masses(mean: float, last: int) -> list[float]:
    return [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(last + 1)]


@settings(deadline=None)
@given(st.floats(0.001, 400.0), st.floats(0.001, 0.9999))
def test_a_poisson_quantile_is_the_smallest_that_suffices(mean: float, probability: float) -> None:
    k = poisson_quantile(mean, probability)
    sums = [sum(poisson_masses(mean, last)) for last in (k - 1, k)]
    assert sums[1] >= probability - 1e-9
    assert sums[0] <= probability + 1e-9
    assert poisson_cdf(k, mean) == pytest.approx(sums[1], abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 400), st.floats(0.001, 0.999), st.floats(0.01, 0.999))
def test_a_binomial_quantile_is_the_smallest_that_suffices(trials: int, chance: float, probability: float) -> None:
    k = binomial_quantile(trials, chance, probability)
    masses = [math.comb(trials, i) * chance**i * (1 - chance) ** (trials - i) for i in range(trials + 1)]
    assert sum(masses[: k + 1]) >= probability - 1e-9
    assert sum(masses[:k]) <= probability + 1e-9


@settings(deadline=None)
@given(st.floats(0.01, 300.0), st.floats(1.01, 20.0), st.floats(0.05, 0.999))
def test_a_negative_binomial_quantile_agrees_with_its_own_distribution(
    mean: float, ratio: float, probability: float
) -> None:
    k = negative_binomial_quantile(mean, ratio, probability)
    assert negative_binomial_cdf(k, mean, ratio) >= probability - 1e-9
    assert negative_binomial_cdf(k - 1, mean, ratio) <= probability + 1e-9


@pytest.mark.parametrize(("mean", "ratio"), [(0.5, 1.5), (9.26, 5.79), (200.0, 3.0)])
def test_the_negative_binomial_has_its_mean_and_variance(mean: float, ratio: float) -> None:
    masses = [negative_binomial_cdf(k, mean, ratio) - negative_binomial_cdf(k - 1, mean, ratio) for k in range(1_500)]
    found = sum(k * mass for k, mass in enumerate(masses))
    assert sum(masses) == pytest.approx(1.0, abs=1e-9)
    assert found == pytest.approx(mean, rel=1e-6)
    assert sum((k - found) ** 2 * mass for k, mass in enumerate(masses)) == pytest.approx(ratio * mean, rel=1e-6)


@settings(deadline=None)
@given(st.floats(0.01, 200.0), st.floats(1.0, 10.0), st.floats(0.9, 0.999))
def test_bursts_need_at_least_about_as_many_spares_as_poisson(mean: float, burst: float, probability: float) -> None:
    assert burst_quantile(mean, burst, probability) >= poisson_quantile(mean, probability) - burst
    assert burst_quantile(mean, 1.0, probability) == poisson_quantile(mean, probability)


def test_a_burst_quantile_agrees_with_a_played_sum() -> None:
    from random import Random

    rng, mean, burst = Random(7), 12.0, 3.0
    counts = []
    for _ in range(40_000):
        total, left = 0, rng.expovariate(1.0)
        while left < mean / burst:
            size = 1
            while rng.random() > 1 / burst:
                size += 1
            total, left = total + size, left + rng.expovariate(1.0)
        counts.append(total)
    counts.sort()
    assert burst_quantile(mean, burst, 0.99) == pytest.approx(counts[int(0.99 * len(counts))], abs=1)
    assert sum(counts) / len(counts) == pytest.approx(mean, rel=0.02)


def test_nothing_down_needs_nothing_and_everything_down_needs_all() -> None:
    assert poisson_quantile(0.0, 0.99) == negative_binomial_quantile(0.0, 2.0, 0.99) == burst_quantile(0, 2, 0.9) == 0
    assert binomial_quantile(10, 0.0, 0.99) == 0
    assert binomial_quantile(10, 1.0, 0.5) == 10
    assert negative_binomial_cdf(-1, 3.0, 2.0) == poisson_cdf(-1, 3.0) == 0.0
    assert negative_binomial_cdf(5, 0.0, 2.0) == 1.0
    assert gamma_cdf(1.0, 0.0) == gamma_quantile(1.0, 0.0) == 0.0
    assert burst_quantile(5_000.0, 3.0, 0.99) == negative_binomial_quantile(5_000.0, 5.0, 0.99)


def test_huge_counts_are_quick_and_join_the_small_ones() -> None:
    for ratio in (1.0, 5.0):
        for probability in (0.025, 0.99):
            below, above = (negative_binomial_quantile(mean, ratio, probability) for mean in (999_999.0, 1_000_000.0))
            assert above - below == pytest.approx(1, abs=3)
    assert poisson_quantile(1e15, 0.5) == pytest.approx(1e15)
    assert binomial_quantile(10**9, 0.5, 0.99) == pytest.approx(5e8 + 2.3263 * math.sqrt(2.5e8), abs=2)
    few, many = count_interval(999_999), count_interval(1_000_001)
    assert many.low - few.low == pytest.approx(2, abs=0.05)
    assert many.high - few.high == pytest.approx(2, abs=0.05)
