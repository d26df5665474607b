"""How many spare hosts a job needs: Poisson as everybody counts, and what bursts and lemon hosts make of it.

It knows how many hosts are down at once, not which; the policy that excludes them is `policy.spares`. Steady state:
failures arrive at one rate and each host is away for the replacement time. A pool is large enough when at most so many
hosts are down at once with the wanted probability.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from everstep.planning.distributions import (
    binomial_quantile,
    burst_quantile,
    negative_binomial_cdf,
    negative_binomial_quantile,
    poisson_quantile,
)
from everstep.planning.failures import failures_per_s

STEPFUN_VARIANCE_RATIO = 5.79
"""Variance ÷ mean of hosts down at once in StepFun's record (400 hosts, 348 days; mean 9.26, P99 31, Poisson 17)."""
STEPFUN_TOP_HOST_SHARE = 0.05
STEPFUN_TOP_FAILURE_SHARE = 0.245
"""The 5 % of StepFun's hosts with the most faults had this share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemons:
    """A few bad hosts with much of the failures.

    Attributes:
        host_share: of all hosts.
        failure_share: of all failures, at least `host_share`.
    """

    host_share: float
    failure_share: float

    @property
    def rate_factor(self) -> float:
        """The failure rate of the other hosts ÷ that of all: what is left once every lemon is replaced by an average
        good host."""
        return (1.0 - self.failure_share) / (1.0 - self.host_share)

    @property
    def lemon_factor(self) -> float:
        """The failure rate of a lemon ÷ that of all hosts."""
        return self.failure_share / self.host_share if self.host_share else 1.0


def hosts_down_mean(*, host_count: float, failures_per_1000_host_days: float, replacement_s: float) -> float:
    """Hosts down at once on average: N r T (Little's law). The spares' own failures are not in it."""
    rate = failures_per_s(failures_per_1000_host_days=failures_per_1000_host_days, host_count=host_count)
    return rate * replacement_s


def poisson_spares(*, down_mean: float, availability: float) -> int:
    """The usual rule: the quantile of Poisson(N r T). Optimistic: hosts fail in bursts, and some fail repeatedly."""
    return poisson_quantile(down_mean, availability)


def binomial_spares(*, host_count: int, down_mean: float, availability: float) -> int:
    """ByteRobust's rule (arXiv 2509.16293): the quantile of a binomial over the hosts, each down with N r T / N."""
    return binomial_quantile(host_count, min(1.0, down_mean / host_count), availability)


def overdispersed_spares(*, down_mean: float, variance_ratio: float, availability: float) -> int:
    """The quantile of a negative binomial: Poisson whose mean itself wanders, with variance = ratio × mean."""
    return negative_binomial_quantile(down_mean, variance_ratio, availability)


def burst_spares(*, down_mean: float, burst_hosts: float, availability: float) -> int:
    """The quantile when failures come as bursts of a geometric number of hosts (a switch, a rack, a power feed)."""
    return burst_quantile(down_mean, burst_hosts, availability)


def pool_availability(*, spare_count: int, down_mean: float, variance_ratio: float) -> float:
    """The share of time in which at most `spare_count` hosts are down, under the negative binomial."""
    return negative_binomial_cdf(spare_count, down_mean, variance_ratio)


def lemon_spares(
    *, host_count: int, failures_per_1000_host_days: float, replacement_s: float, lemons: Lemons, availability: float
) -> int:
    """The quantile for two kinds of host that fail independently: two binomials, a host down with rT/(1 + rT).

    Lemons alone don't spread the number of hosts down at once: their sum varies no more than Poisson. What they cost is
    the higher mean until they are excluded (`Lemons.rate_factor`), and a chain of restarts on the same host.
    """
    lemon_count = round(host_count * lemons.host_share)
    rate = failures_per_1000_host_days
    bad = _away_chance(rate * lemons.lemon_factor, replacement_s)
    good = _away_chance(rate * lemons.rate_factor, replacement_s)
    first, masses = _binomial_masses(lemon_count, bad)
    other, others = _binomial_masses(host_count - lemon_count, good)
    totals = [*accumulate(others), *[1.0] * len(masses)]
    least = first + other

    def covers(spares: int) -> bool:
        """Whether P(lemons down + others down ≤ spares) is enough."""
        left = spares - least
        behind = totals[max(0, left - len(masses) + 1) : left + 1]
        total: float = sum(map(mul, masses, reversed(behind)))
        return total >= availability

    return bisect_left(range(least, least + len(totals)), True, key=covers) + least


def _away_chance(failures_per_1000_host_days: float, replacement_s: float) -> float:
    away = hosts_down_mean(
        host_count=1.0, failures_per_1000_host_days=failures_per_1000_host_days, replacement_s=replacement_s
    )
    return away / (1.0 + away)


def _binomial_masses(trials: int, chance: float) -> tuple[int, list[float]]:
    """The first k that matters, and P(X = k) from there on until the rest no longer does."""
    if trials == 0 or chance <= 0.0:
        return 0, [1.0]
    mean = trials * chance
    reach = 7.0 * math.sqrt(mean) + 12.0
    first, last = max(0, int(mean - reach)), min(trials, int(mean + reach))
    yes, no = math.log(chance), math.log1p(-chance)
    ways = math.lgamma(trials + 1.0) - math.lgamma(first + 1.0) - math.lgamma(trials - first + 1.0)
    mass, odds = math.exp(ways + first * yes + (trials - first) * no), chance / (1.0 - chance)
    masses = [mass]
    for k in range(first + 1, last + 1):
        mass *= (trials - k + 1) / k * odds
        masses.append(mass)
    return first, masses
