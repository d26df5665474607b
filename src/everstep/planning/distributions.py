"""The few distributions that planning needs, in plain Python: gamma, Poisson, binomial, negative binomial, bursts.

It knows no hosts and no failures: only counts, means and probabilities. Quantiles start at a normal guess and walk, so
they cost a few standard deviations of terms and not the whole mean.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

_TERMS_MAX = 100_000
_EPSILON = 1e-15
_TINY = 1e-300


def gamma_cdf(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function P(shape, x), to about 1e-13.

    Series below `shape + 1`, Lentz's continued fraction above (Numerical Recipes, 3rd edition, section 6.2).
    """
    if x <= 0:
        return 0.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        return scale * _gamma_series(shape, x)
    return 1.0 - scale * _gamma_fraction(shape, x)


def _gamma_series(shape: float, x: float) -> float:
    term = total = 1.0 / shape
    for i in range(1, _TERMS_MAX):
        term *= x / (shape + i)
        total += term
        if term < total * _EPSILON:
            break
    return total


def _gamma_fraction(shape: float, x: float) -> float:
    b = x + 1.0 - shape
    c, d = 1.0 / _TINY, 1.0 / b
    h = d
    for i in range(1, _TERMS_MAX):
        a = -i * (i - shape)
        b += 2.0
        d = a * d + b
        c = b + a / c
        d = 1.0 / (d if abs(d) > _TINY else _TINY)
        c = c if abs(c) > _TINY else _TINY
        h *= d * c
        if abs(d * c - 1.0) < _EPSILON:
            break
    return h


def gamma_quantile(shape: float, probability: float) -> float:
    """x with P(shape, x) = probability, by bisection from Wilson and Hilferty's guess; for a scale of 1."""
    if probability <= 0:
        return 0.0
    z = NormalDist().inv_cdf(probability)
    third = 1.0 - 1.0 / (9.0 * shape) + z / (3.0 * math.sqrt(shape))
    high = max(shape * third**3, 1e-12)
    low = high
    while gamma_cdf(shape, high) < probability:
        low, high = high, high * 2.0
    while gamma_cdf(shape, low) > probability:
        low, high = low / 2.0, low
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in {low, high}:
            break
        if gamma_cdf(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def poisson_cdf(count: int, mean: float) -> float:
    """P(X ≤ count) for a Poisson mean."""
    if count < 0:
        return 0.0
    return 1.0 - gamma_cdf(count + 1.0, mean)


def poisson_quantile(mean: float, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ probability."""
    if mean <= 0:
        return 0

    def step(k: int) -> float:
        return mean / k

    def log_mass(k: int) -> float:
        return k * math.log(mean) - mean - math.lgamma(k + 1.0)

    return _quantile(log_mass, step, mean, mean, probability)


def binomial_quantile(trials: int, chance: float, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ probability among `trials`, each with `chance`."""
    if chance <= 0 or trials == 0:
        return 0
    if chance >= 1:
        return trials
    odds = chance / (1.0 - chance)

    def step(k: int) -> float:
        return (trials - k + 1) / k * odds

    def log_mass(k: int) -> float:
        if k > trials:
            return -math.inf
        ways = math.lgamma(trials + 1.0) - math.lgamma(k + 1.0) - math.lgamma(trials - k + 1.0)
        return ways + k * math.log(chance) + (trials - k) * math.log1p(-chance)

    mean = trials * chance
    return min(trials, _quantile(log_mass, step, mean, mean * (1.0 - chance), probability))


def negative_binomial_quantile(mean: float, variance_ratio: float, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ probability; variance = `variance_ratio` × mean. A ratio ≤ 1 is Poisson.

    It is what a Poisson count becomes when its mean itself varies like a gamma variable.
    """
    if variance_ratio <= 1.0 + 1e-9:
        return poisson_quantile(mean, probability)
    if mean <= 0:
        return 0
    size = mean / (variance_ratio - 1.0)
    fail = 1.0 - 1.0 / variance_ratio

    def step(k: int) -> float:
        return (k + size - 1.0) / k * fail

    def log_mass(k: int) -> float:
        ways = math.lgamma(k + size) - math.lgamma(size) - math.lgamma(k + 1.0)
        return ways + size * math.log1p(-fail) + k * math.log(fail)

    return _quantile(log_mass, step, mean, mean * variance_ratio, probability)


def negative_binomial_cdf(count: int, mean: float, variance_ratio: float) -> float:
    """P(X ≤ count); variance = `variance_ratio` × mean, and a ratio ≤ 1 is Poisson."""
    if count < 0:
        return 0.0
    if mean <= 0:
        return 1.0
    if variance_ratio <= 1.0 + 1e-9:
        return poisson_cdf(count, mean)
    size, fail = mean / (variance_ratio - 1.0), 1.0 - 1.0 / variance_ratio
    ways = math.lgamma(count + size) - math.lgamma(size) - math.lgamma(count + 1.0)
    mass = math.exp(ways + size * math.log1p(-fail) + count * math.log(fail))
    if count >= mean:
        return 1.0 - _upper_tail(mass, count, lambda k: (k + size - 1.0) / k * fail)
    total, k = mass, count
    while k > 0 and mass > total * 1e-15:
        mass *= k / ((k + size - 1.0) * fail)
        k -= 1
        total += mass
    return total


def burst_quantile(mean: float, burst_mean: float, probability: float) -> int:
    """The same for bursts: Poisson many, each of a geometric number of hosts with mean `burst_mean` ≥ 1 (Pólya–Aeppli).

    `mean` counts hosts, not bursts; the variance is (2·burst_mean − 1) × mean. Panjer's recursion.
    """
    if burst_mean <= 1.0 + 1e-9:
        return poisson_quantile(mean, probability)
    if mean <= 0:
        return 0
    rho = 1.0 - 1.0 / burst_mean
    bursts = mean / burst_mean
    if bursts > 700.0:  # exp(-bursts) would underflow, and a negative binomial of the same variance agrees
        return negative_binomial_quantile(mean, 2.0 * burst_mean - 1.0, probability)
    before, mass = 0.0, math.exp(-bursts)
    total, k = mass, 0
    while total < probability and k < _TERMS_MAX:
        k += 1
        after = ((bursts * (1.0 - rho) + 2.0 * rho * (k - 1)) * mass - rho * rho * (k - 2) * before) / k
        before, mass = mass, max(after, 0.0)
        total += mass
    return k


def _quantile(
    log_mass: Callable[[int], float],
    step: Callable[[int], float],
    mean: float,
    variance: float,
    probability: float,
) -> int:
    """Walk from a normal guess to the smallest k whose upper tail is at most 1 − probability.

    Args:
        log_mass: the logarithm of P(X = k).
        step: P(X = k) ÷ P(X = k − 1) for k ≥ 1.
    """
    allowed = (1.0 - probability) * (1.0 + 1e-12)
    k = max(0, int(mean + NormalDist().inv_cdf(min(max(probability, 1e-12), 1.0 - 1e-12)) * math.sqrt(variance)))
    mass = math.exp(log_mass(k))
    if mass == 0.0 and k > mean:  # far out, where the guess is no use
        k = int(mean)
        mass = math.exp(log_mass(k))
    tail = _upper_tail(mass, k, step)
    while tail > allowed:
        k += 1
        mass *= step(k)
        tail -= mass
    while k > 0 and tail + mass <= allowed:
        tail += mass
        mass /= step(k)
        k -= 1
    return k


def _upper_tail(mass: float, k: int, step: Callable[[int], float]) -> float:
    """P(X > k) from P(X = k), summed until the terms no longer matter."""
    tail, term = 0.0, mass
    for i in range(k + 1, k + _TERMS_MAX):
        ratio = step(i)
        term *= ratio
        tail += term
        if ratio < 1.0 and term < tail * 1e-13 + 1e-18:
            break
    return tail
