"""The few distributions that planning needs, in plain Python: gamma, Poisson, binomial, negative binomial, bursts.

It knows no hosts and no failures: only counts, means and probabilities. Quantiles start at a normal guess and walk, so
they cost a few standard deviations of terms and not the whole mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

_TERMS_MAX = 100_000
_EPSILON = 1e-15
_TINY = 1e-300
_NORMAL = NormalDist()
_LARGE = 1e6
"""From this mean or shape on, an expansion around the normal is good to a millionth, and sums are slow and are not."""


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
    z = _NORMAL.inv_cdf(probability)
    third = 1.0 - 1.0 / (9.0 * shape) + z / (3.0 * math.sqrt(shape))
    high = max(shape * third**3, 1e-12)
    if shape >= _LARGE:
        return high
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
    log_mean = math.log(mean)

    def log_mass(k: int) -> float:
        return k * log_mean - mean - math.lgamma(k + 1.0)

    return _quantile(_Walk(a=0.0, b=mean, log_mass=log_mass), mean, mean, probability)


def binomial_quantile(trials: int, chance: float, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ probability among `trials`, each with `chance`."""
    if chance <= 0 or trials == 0:
        return 0
    if chance >= 1:
        return trials
    odds = chance / (1.0 - chance)

    def log_mass(k: int) -> float:
        if k > trials:
            return -math.inf
        ways = math.lgamma(trials + 1.0) - math.lgamma(k + 1.0) - math.lgamma(trials - k + 1.0)
        return ways + k * math.log(chance) + (trials - k) * math.log1p(-chance)

    mean = trials * chance
    walk = _Walk(a=-odds, b=(trials + 1.0) * odds, log_mass=log_mass)
    return min(trials, _quantile(walk, mean, mean * (1.0 - chance), probability))


def negative_binomial_quantile(mean: float, variance_ratio: float, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ probability; variance = `variance_ratio` × mean. A ratio ≤ 1 is Poisson.

    It is what a Poisson count becomes when its mean itself varies like a gamma variable.
    """
    if variance_ratio <= 1.0 + 1e-9:
        return poisson_quantile(mean, probability)
    if mean <= 0:
        return 0
    return _quantile(_negative_binomial_walk(mean, variance_ratio), mean, mean * variance_ratio, probability)


def negative_binomial_cdf(count: int, mean: float, variance_ratio: float) -> float:
    """P(X ≤ count); variance = `variance_ratio` × mean, and a ratio ≤ 1 is Poisson."""
    if count < 0:
        return 0.0
    if mean <= 0:
        return 1.0
    if variance_ratio <= 1.0 + 1e-9:
        return poisson_cdf(count, mean)
    walk = _negative_binomial_walk(mean, variance_ratio)
    mass = math.exp(walk.log_mass(count))
    if count >= mean:
        return 1.0 - _upper_tail(mass, count, walk)
    return _lower_sum(mass, count, walk)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """A distribution of Panjer's class: P(X = k) ÷ P(X = k − 1) is a + b/k.

    Attributes:
        log_mass: the logarithm of P(X = k), to start a walk from anywhere.
    """

    a: float
    b: float
    log_mass: Callable[[int], float]


def _negative_binomial_walk(mean: float, variance_ratio: float) -> _Walk:
    size, fail = mean / (variance_ratio - 1.0), 1.0 - 1.0 / variance_ratio

    def log_mass(k: int) -> float:
        ways = math.lgamma(k + size) - math.lgamma(size) - math.lgamma(k + 1.0)
        return ways + size * math.log1p(-fail) + k * math.log(fail)

    return _Walk(a=fail, b=(size - 1.0) * fail, log_mass=log_mass)


def _quantile(walk: _Walk, mean: float, variance: float, probability: float) -> int:
    """Walk from a normal guess to the smallest k whose upper tail is at most 1 − probability."""
    allowed = (1.0 - probability) * (1.0 + 1e-12)
    z = _NORMAL.inv_cdf(min(max(probability, 1e-12), 1.0 - 1e-12))
    if mean >= _LARGE:  # Cornish and Fisher's expansion; the skewness of all of Panjer's class is (2 v/m − 1)/√v
        return math.ceil(mean + z * math.sqrt(variance) + (2.0 * variance / mean - 1.0) * (z * z - 1.0) / 6.0)
    k = max(0, int(mean + z * math.sqrt(variance)))
    mass = math.exp(walk.log_mass(k))
    if mass == 0.0 and k > mean:  # far out, where the guess is no use
        k = int(mean)
        mass = math.exp(walk.log_mass(k))
    tail = _upper_tail(mass, k, walk) if k >= mean else 1.0 - _lower_sum(mass, k, walk)
    while tail > allowed:
        k += 1
        mass *= walk.a + walk.b / k
        tail -= mass
    while k > 0 and tail + mass <= allowed:
        tail += mass
        mass /= walk.a + walk.b / k
        k -= 1
    return k


def _upper_tail(mass: float, k: int, walk: _Walk) -> float:
    """P(X > k) from P(X = k), summed until the terms no longer matter."""
    a, b = walk.a, walk.b
    tail, term = 0.0, mass
    for i in range(k + 1, k + _TERMS_MAX):
        ratio = a + b / i
        term *= ratio
        tail += term
        if term < 1e-16 + 1e-12 * tail and ratio < 1.0:
            break
    return tail


def _lower_sum(mass: float, k: int, walk: _Walk) -> float:
    """P(X ≤ k) from P(X = k), for k below the mean."""
    a, b = walk.a, walk.b
    total = mass
    while k > 0 and mass > total * 1e-13:
        mass /= a + b / k
        k -= 1
        total += mass
    return total
