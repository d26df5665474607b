"""How often a job of many hosts fails: rates in their units, the projection to a job's size, and fits from counts.

Failures are taken as Poisson here, with one rate for all hosts; `planning.spares` knows bursts and lemon hosts. The
unit of a rate is failures per 1000 host-days, where a host-day is one host inside a job for a day.
"""

from dataclasses import dataclass
from functools import lru_cache

from everstep.domain.causes import LLAMA3, LLAMA3_DAYS, LLAMA3_GPU_COUNT, LLAMA3_UNEXPECTED_COUNT
from everstep.domain.errors import ConfigError
from everstep.planning.distributions import gamma_quantile

DAY_S = 86_400.0
HOUR_S = 3_600.0
GPUS_PER_HOST = 8
CONFIDENCE = 0.95
NEEDS_A_HOST = frozenset({"GPU", "Host", "Network"})
"""The categories of Llama 3's table after which the job needs another host; the rest runs on the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Both ends of a range."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """Failures per 1000 host-days.

    Attributes:
        low: lower end of `confidence`; for a prior, the lowest published rate; the rate itself when it was given bare.
        confidence: of the interval; None when it is a range of publications, or when there is none.
        source: where it comes from, for people.
    """

    per_1000_host_days: float
    low: float
    high: float
    confidence: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRate:
    """A rate that somebody published, in this package's unit."""

    name: str
    per_1000_host_days: float
    source: str


LLAMA3_HOST_DAYS = LLAMA3_GPU_COUNT / GPUS_PER_HOST * LLAMA3_DAYS
LLAMA3_RATE = LLAMA3_UNEXPECTED_COUNT * 1000.0 / LLAMA3_HOST_DAYS
"""3.789: 419 unexpected interruptions of 2,048 hosts in 54 days."""
LLAMA3_REPLACED_SHARE = sum(row.count for row in LLAMA3 if row.cause.category in NEEDS_A_HOST) / LLAMA3_UNEXPECTED_COUNT
"""0.773: GPU, host and network failures among all unexpected ones; 2.93 per 1000 host-days."""

PUBLISHED_RATES = (
    PublishedRate(
        name="CoreWeave",
        per_1000_host_days=GPUS_PER_HOST * 1000.0 / 3748.25,
        source="3,748.25 GPU-days per failure, right-censored fit (CoreWeave 2025)",
    ),
    PublishedRate(name="RSC-2", per_1000_host_days=2.34, source="arXiv 2410.21680, jobs above 128 GPUs"),
    PublishedRate(name="Llama 3", per_1000_host_days=LLAMA3_RATE, source="arXiv 2407.21783, Table 5, from its counts"),
    PublishedRate(
        name="StepFun", per_1000_host_days=584 * 1000.0 / (400 * 348), source="InfiniteHBD trace, arXiv 2502.03885"
    ),
    PublishedRate(name="RSC-1", per_1000_host_days=6.50, source="arXiv 2410.21680, jobs above 128 GPUs"),
)
PRIOR = FailureRate(
    per_1000_host_days=LLAMA3_RATE,
    low=min(rate.per_1000_host_days for rate in PUBLISHED_RATES),
    high=max(rate.per_1000_host_days for rate in PUBLISHED_RATES),
    confidence=None,
    source="prior: Llama 3's rate, and the range of five fleets (CoreWeave, RSC-2, Llama 3, StepFun, RSC-1)",
)


def mtbf_s(*, failures_per_1000_host_days: float, host_count: float) -> float:
    """Mean time between failures of a job: 1 ÷ (hosts × rate). `inf` for a rate of 0.

    Source: arXiv 2410.21680 (MTTF = 1/(N r)); M[min] = 1440·1000 / (r · GPUs/8) is the same in other units.
    """
    per_s = failures_per_s(failures_per_1000_host_days=failures_per_1000_host_days, host_count=host_count)
    return 1.0 / per_s if per_s > 0 else float("inf")


def failures_per_s(*, failures_per_1000_host_days: float, host_count: float) -> float:
    """The Poisson rate of the whole job."""
    return failures_per_1000_host_days / 1000.0 / DAY_S * host_count


def rate_of_gpu_days(gpu_days_per_failure: float, *, gpus_per_host: int = GPUS_PER_HOST) -> float:
    """Failures per 1000 host-days, from GPU-days per failure."""
    return gpus_per_host * 1000.0 / gpu_days_per_failure


def rate_of_mtbf(mtbf_s: float, *, host_count: float) -> float:
    """Failures per 1000 host-days, from the mean time between failures of a job on `host_count` hosts."""
    return DAY_S * 1000.0 / (mtbf_s * host_count)


@lru_cache(maxsize=4096)
def count_interval(count: int, confidence: float = CONFIDENCE, variance_ratio: float = 1.0) -> Interval:
    """The exact interval for the mean of a Poisson variable of which `count` was seen (Garwood 1936).

    Half of chi-square's quantiles with 2k and 2k + 2 degrees of freedom, that is, gamma's with k and k + 1. When counts
    vary more than Poisson, k failures tell no more than k ÷ `variance_ratio` independent ones (quasi-Poisson).
    """
    beyond = (1.0 - confidence) / 2.0
    independent = count / variance_ratio
    low = gamma_quantile(independent, beyond) * variance_ratio if count else 0.0
    return Interval(low=low, high=gamma_quantile(independent + 1.0, 1.0 - beyond) * variance_ratio)


def fit_rate(
    *,
    failure_count: int,
    host_days: float,
    source: str,
    confidence: float = CONFIDENCE,
    variance_ratio: float = 1.0,
) -> FailureRate:
    """The rate that was seen, with its exact Poisson interval, widened when failures come in bursts.

    With no failure at all the point is that of half a failure (Jeffreys), so that no plan says "never".

    Args:
        variance_ratio: variance ÷ mean of failures in equal periods, 1 or more; 1 for independent failures.

    Raises:
        ConfigError: a negative count, or no host-days.
    """
    if failure_count < 0:
        raise ConfigError(f"failure_count is {failure_count}: it must be 0 or more")
    if not 0 < host_days < float("inf"):
        raise ConfigError(
            f"host_days is {host_days:g}: a rate needs hosts that worked for a time, so it must be above 0"
        )
    interval = count_interval(failure_count, confidence, variance_ratio)
    return FailureRate(
        per_1000_host_days=max(failure_count, 0.5) * 1000.0 / host_days,
        low=interval.low * 1000.0 / host_days,
        high=interval.high * 1000.0 / host_days,
        confidence=confidence,
        source=source,
    )
