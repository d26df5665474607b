"""What a plan is made of: what the user said, checked, and what is assumed where nothing was said."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from everstep.domain.errors import ConfigError
from everstep.planning.failures import (
    CONFIDENCE,
    DAY_S,
    PRIOR,
    FailureRate,
    fit_rate,
    rate_of_gpu_days,
    rate_of_mtbf,
)
from everstep.planning.keys import KEY_BY_NAME, KEYS, RATE_KEYS, SPEED_KEYS

GPUS_PER_REPLICA = 8_192
"""Of FT-HSDP (notes on arXiv 2602.00277)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an input comes from.

    Attributes:
        source: for people, such as `--gpu-count` or "quoted, arXiv 2407.21783 section 3.3.4".
        is_assumed: nobody published, measured or said it.
    """

    source: str
    is_assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is known of a run. None means that nothing was said: `keys.KEYS` tells what is assumed then.

    Times end in `_s` and are in seconds, shares are from 0 to 1, and so on: the unit is the end of the name.
    `origins` says for some keys where their values come from; the others were given.

    Raises:
        ConfigError: a value is out of range, or two keys contradict each other; it names the key and what is allowed.
    """

    gpu_count: int
    gpus_per_host: int | None = None
    run_days: float | None = None
    failures_per_1000_host_days: float | None = None
    gpu_days_per_failure: float | None = None
    mtbf_s: float | None = None
    failure_count: int | None = None
    observed_host_days: float | None = None
    count_variance_ratio: float | None = None
    planned_per_day: float | None = None
    planned_stop_s: float | None = None
    checkpoint_pause_s: float | None = None
    checkpoint_interval_s: float | None = None
    detection_s: float | None = None
    restart_s: float | None = None
    restore_s: float | None = None
    target_share: float | None = None
    replica_count: int | None = None
    replica_stall_s: float | None = None
    replica_rejoin_s: float | None = None
    replacement_s: float | None = None
    replaced_share: float | None = None
    spare_host_count: int | None = None
    availability_share: float | None = None
    down_variance_ratio: float | None = None
    burst_hosts: float | None = None
    lemon_host_share: float | None = None
    lemon_failure_share: float | None = None
    parameter_count: float | None = None
    token_count: float | None = None
    flops_per_gpu: float | None = None
    mfu_share: float | None = None
    gpu_peak_flops: float | None = None
    bytes_per_parameter: float | None = None
    storage_bytes_per_s: float | None = None
    gpu_power_w: float | None = None
    it_power_per_gpu_w: float | None = None
    pue: float | None = None
    waiting_share: float | None = None
    idle_share: float | None = None
    ramp_limit_w_per_s: float | None = None
    name: str = "plan"
    confidence: float = CONFIDENCE
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        for key in KEYS:
            value = getattr(self, key.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{key.name} is {value!r}: {key.meaning}, a number, must be {key.allowed}")
            if not key.allows(value):
                raise ConfigError(f"{key.name} is {value:,.15g}: {key.meaning}, must be {key.allowed}")
        if not 0.5 <= self.confidence < 1.0:
            raise ConfigError(f"confidence is {self.confidence:g}: it must be from 0.5 to below 1, such as 0.95")
        self._check_alternatives()
        self._check_together()

    @property
    def host_count(self) -> int:
        return math.ceil(self.gpu_count / (self.gpus_per_host or int(assumed("gpus_per_host"))))

    def _check_alternatives(self) -> None:
        counted = ("failure_count", "observed_host_days")
        said = [name for name in RATE_KEYS[:3] if getattr(self, name) is not None]
        has_count, has_days = (getattr(self, name) is not None for name in counted)
        if has_count != has_days:
            missing, there = counted if has_days else counted[::-1]
            raise ConfigError(f"{missing} is missing: {there} says the failure rate only together with it")
        if self.count_variance_ratio is not None and not has_count:
            raise ConfigError("failure_count is missing: count_variance_ratio says only how far its range reaches")
        said += ["failure_count"] if has_count else []
        if len(said) > 1:
            raise ConfigError(f"{' and '.join(said)} all say the failure rate: give one of them")
        if all(getattr(self, name) is not None for name in SPEED_KEYS):
            raise ConfigError(f"{' and '.join(SPEED_KEYS)} both say how fast a GPU computes: give one of them")

    def _check_together(self) -> None:
        if self.checkpoint_interval_s is not None:
            run_days = self.run_days if self.run_days is not None else assumed("run_days")
            if self.checkpoint_interval_s > run_days * DAY_S:
                raise ConfigError(
                    f"checkpoint_interval_s is {self.checkpoint_interval_s:,.15g}: it must not be longer than the run, "
                    f"which is {run_days * DAY_S:,.15g} s long (run_days is {run_days:g})"
                )
        if self.spare_host_count is not None and self.spare_host_count > self.host_count:
            raise ConfigError(
                f"spare_host_count is {self.spare_host_count:,}: it must not be above the job's hosts, "
                f"which are {self.host_count:,} (gpu_count ÷ gpus_per_host)"
            )
        lemon_hosts = self.lemon_host_share if self.lemon_host_share is not None else assumed("lemon_host_share")
        lemon_failures = self.lemon_failure_share
        if lemon_failures is None:
            lemon_failures = _lemon_failure_share(lemon_hosts)
        if lemon_hosts == 0 < lemon_failures:
            raise ConfigError(f"lemon_failure_share is {lemon_failures:g}: it must be 0 when lemon_host_share is 0")
        if lemon_failures < lemon_hosts:
            raise ConfigError(
                f"lemon_failure_share is {lemon_failures:g}: it must not be below lemon_host_share, "
                f"which is {lemon_hosts:g}: lemons fail more than others"
            )
        if lemon_hosts >= 1.0:
            raise ConfigError("lemon_host_share is 1: it must be below 1, or no host is left that is none")


def _lemon_failure_share(lemon_host_share: float) -> float:
    """What is assumed for the failures of so many lemons."""
    return max(lemon_host_share, assumed("lemon_failure_share")) if lemon_host_share else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A plan with everything filled in; the optional rest has no value that could be assumed.

    Attributes:
        rate: the failure rate and its range.
        assumed: the keys whose values nobody said; `failures_per_1000_host_days` stands for the rate.
        origins: where each value comes from, by key.
    """

    gpu_count: int
    gpus_per_host: int
    host_count: int
    run_days: float
    rate: FailureRate
    count_variance_ratio: float | None
    planned_per_day: float
    planned_stop_s: float
    checkpoint_pause_s: float
    checkpoint_interval_s: float | None
    detection_s: float
    restart_s: float
    restore_s: float
    target_share: float
    replica_count: int
    replica_stall_s: float
    replica_rejoin_s: float
    replacement_s: float
    replaced_share: float
    spare_host_count: int | None
    availability_share: float
    down_variance_ratio: float
    burst_hosts: float
    lemon_host_share: float
    lemon_failure_share: float
    parameter_count: float | None
    token_count: float | None
    flops_per_gpu: float
    bytes_per_parameter: float
    storage_bytes_per_s: float
    gpu_power_w: float
    it_power_per_gpu_w: float
    pue: float
    waiting_share: float
    idle_share: float
    ramp_limit_w_per_s: float | None
    assumed: frozenset[str]
    origins: Mapping[str, Origin]

    @property
    def restart_total_s(self) -> float:
        """R of the formulas."""
        return self.detection_s + self.restart_s + self.restore_s


def assumed(name: str) -> float:
    """What is assumed for a key."""
    value = KEY_BY_NAME[name].assumed
    assert value is not None, name
    return value


_DERIVED = frozenset(
    "host_count rate assumed origins flops_per_gpu planned_stop_s replica_count count_variance_ratio".split()
)
_COPIED = tuple(f.name for f in fields(Inputs) if f.name not in _DERIVED)
_ASSUMED_ORIGINS = {key.name: Origin(source=key.why, is_assumed=True) for key in KEYS}
_GIVEN = Origin(source="given")


def resolve(plan: Plan) -> Inputs:
    """Fill in what was not said."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name in _COPIED:
        value = getattr(plan, name)
        if value is None and (value := KEY_BY_NAME[name].assumed) is not None:
            origins[name] = _ASSUMED_ORIGINS[name]
        elif value is not None:
            origins[name] = plan.origins.get(name, _GIVEN)
        elif name == "checkpoint_interval_s":
            origins[name] = Origin(source=KEY_BY_NAME[name].why)
        values[name] = value
    if plan.lemon_failure_share is None and plan.lemon_host_share is not None:
        values["lemon_failure_share"] = _lemon_failure_share(plan.lemon_host_share)
    _derive(plan, values, origins)
    rate = _rate(plan, values, origins)
    return Inputs(
        host_count=plan.host_count,
        rate=rate,
        assumed=frozenset(name for name, origin in origins.items() if origin.is_assumed),
        origins=origins,
        **values,
    )


def _derive(plan: Plan, values: dict[str, Any], origins: dict[str, Origin]) -> None:
    """Keys whose assumed values follow from others."""
    for name in ("planned_stop_s", "replica_count"):
        values[name] = getattr(plan, name)
        origins[name] = plan.origins.get(name, _GIVEN) if values[name] is not None else _ASSUMED_ORIGINS[name]
    if plan.planned_stop_s is None:
        parts = ("checkpoint_pause_s", "restart_s", "restore_s")
        values["planned_stop_s"] = sum(values[part] for part in parts)
    if plan.replica_count is None:
        values["replica_count"] = max(2, math.ceil(plan.gpu_count / GPUS_PER_REPLICA))
    if plan.mfu_share is not None:
        peak = plan.gpu_peak_flops if plan.gpu_peak_flops is not None else assumed("gpu_peak_flops")
        values["flops_per_gpu"] = plan.mfu_share * peak
        origins["flops_per_gpu"] = plan.origins.get("mfu_share", _GIVEN)
    elif plan.flops_per_gpu is not None:
        values["flops_per_gpu"] = plan.flops_per_gpu
        origins["flops_per_gpu"] = plan.origins.get("flops_per_gpu", _GIVEN)
    else:
        values["flops_per_gpu"] = assumed("flops_per_gpu")
        origins["flops_per_gpu"] = _ASSUMED_ORIGINS["flops_per_gpu"]


def _rate(plan: Plan, values: dict[str, Any], origins: dict[str, Origin]) -> FailureRate:
    """The failure rate, however it was said."""
    values["count_variance_ratio"] = None
    said = next((name for name in RATE_KEYS if getattr(plan, name) is not None), None)
    if said is None:
        origins["failures_per_1000_host_days"] = Origin(source=PRIOR.source, is_assumed=True)
        return PRIOR
    origin = plan.origins.get(said, _GIVEN)
    origins["failures_per_1000_host_days"] = origin
    if plan.failure_count is not None and plan.observed_host_days is not None:
        key = "count_variance_ratio"
        said_ratio = plan.count_variance_ratio
        origins[key] = _ASSUMED_ORIGINS[key] if said_ratio is None else plan.origins.get(key, _GIVEN)
        values[key] = variance_ratio = assumed(key) if said_ratio is None else said_ratio
        return fit_rate(
            failure_count=plan.failure_count,
            host_days=plan.observed_host_days,
            source=origin.source,
            confidence=plan.confidence,
            variance_ratio=variance_ratio,
        )
    if plan.gpu_days_per_failure is not None:
        gpus_per_host = plan.gpus_per_host or int(assumed("gpus_per_host"))
        rate = rate_of_gpu_days(plan.gpu_days_per_failure, gpus_per_host=gpus_per_host)
    elif plan.mtbf_s is not None:
        rate = rate_of_mtbf(plan.mtbf_s, host_count=plan.host_count)
    else:
        assert plan.failures_per_1000_host_days is not None
        rate = plan.failures_per_1000_host_days
    return FailureRate(per_1000_host_days=rate, low=rate, high=rate, confidence=None, source=origin.source)
