"""A plan's report: every figure with its range, unit, formula and source, and the inputs of it that were assumed.

It ties the arithmetic of this package together; the words are in `catalogue`, the inputs in `inputs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from everstep.planning.catalogue import CATALOGUE, TARGETS, Entry
from everstep.planning.checkpoint_cost import checkpoint_cost
from everstep.planning.contradictions import Contradiction, contradictions
from everstep.planning.distributions import poisson_quantile
from everstep.planning.efficiency import (
    Recovery,
    daly_interval_s,
    exact_interval_s,
    exact_share,
    expected_lost_work_s,
    levers,
    linear_share,
    loss_budget_s,
    replica_share,
    restart_limits_s,
    young_interval_s,
)
from everstep.planning.failures import DAY_S, HOUR_S, mtbf_s
from everstep.planning.inputs import Inputs, Origin, Plan, resolve
from everstep.planning.power import FLOOR_ENERGY_SHARE, PowerModel, buffer_j, draw, energy_j, ramp_s
from everstep.planning.scaling_laws import (
    CHINCHILLA,
    EPOCH,
    llama3_optimum,
    optimum,
    over_training,
    training_flops,
    training_s,
)
from everstep.planning.spares import (
    Lemons,
    binomial_spares,
    burst_spares,
    hosts_down_mean,
    lemon_spares,
    overdispersed_spares,
    poisson_spares,
    pool_availability,
)

_LEVER_KEYS = {
    "failure rate": "failure_rate_gain_share",
    "restart": "restart_gain_share",
    "checkpoint pause": "checkpoint_pause_gain_share",
    "best interval": "best_interval_gain_share",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a report.

    Attributes:
        low, high: its range when the failure rate has one; None when it does not depend on it, or has none.
        assumed: the keys of the plan that it rests on and that nobody said.
    """

    entry: Entry
    value: float
    low: float | None
    high: float | None
    assumed: frozenset[str]

    @property
    def key(self) -> str:
        return self.entry.key

    @property
    def unit(self) -> str:
        return self.entry.unit

    @property
    def formula(self) -> str:
        return self.entry.formula

    @property
    def source(self) -> str:
        return self.entry.source


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that follows from a plan.

    Attributes:
        figures: in the order of the catalogue; those whose inputs are missing (no model, no ramp limit) are left out.
        confidence: of the ranges; None when the rate's range is that of publications, or when there is none.
    """

    name: str
    inputs: Inputs
    figures: tuple[Figure, ...]
    confidence: float | None

    def figure(self, key: str) -> Figure:
        """The figure with this key.

        Raises:
            KeyError: this plan has none.
        """
        for figure in self.figures:
            if figure.entry.key == key:
                return figure
        raise KeyError(key)

    def value(self, key: str) -> float:
        """The value of `figure(key)`, in its unit."""
        return self.figure(key).value

    @property
    def by_key(self) -> Mapping[str, Figure]:
        return {figure.entry.key: figure for figure in self.figures}

    @property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """Published figures that bear on this plan and disagree."""
        return contradictions(frozenset(origin.source for origin in self.inputs.origins.values()))

    @property
    def assumptions(self) -> Mapping[str, Origin]:
        """Keys whose values nobody said, and why they are what they are."""
        return {name: origin for name, origin in self.inputs.origins.items() if origin.is_assumed}


class _Sheet:
    """Figures as they are found."""

    def __init__(self, assumed: frozenset[str]) -> None:
        self._assumed = _assumed_by_figure(assumed)
        self.figures: dict[str, Figure] = {}

    def add(self, key: str, value: float, low: float | None = None, high: float | None = None) -> None:
        if low is None or high is None or high <= low:
            low = high = None
        self.figures[key] = Figure(entry=CATALOGUE[key], value=value, low=low, high=high, assumed=self._assumed[key])


@lru_cache(maxsize=64)
def _assumed_by_figure(assumed: frozenset[str]) -> dict[str, frozenset[str]]:
    """For each figure, which of its inputs are among these."""
    return {key: entry.inputs & assumed for key, entry in CATALOGUE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Efficiency:
    """Effective training time as a function of the failure rate; everything else stays."""

    inputs: Inputs

    @property
    def kept_share(self) -> float:
        """What planned interruptions leave."""
        return max(0.0, 1.0 - self.inputs.planned_per_day * self.inputs.planned_stop_s / DAY_S)

    def recovery(self, rate: float) -> Recovery:
        return Recovery(
            mtbf_s=mtbf_s(failures_per_1000_host_days=rate, host_count=self.inputs.host_count),
            pause_s=self.inputs.checkpoint_pause_s,
            restart_s=self.inputs.restart_total_s,
        )

    def share(self, rate: float) -> float:
        """At the plan's interval, or at the best one for this rate."""
        recovery = self.recovery(rate)
        interval_s = self.inputs.checkpoint_interval_s
        if interval_s is None:
            interval_s = exact_interval_s(pause_s=recovery.pause_s, mtbf_s=recovery.mtbf_s)
        return exact_share(interval_s=interval_s, recovery=recovery) * self.kept_share

    def replica_share(self, rate: float) -> float:
        """With replicas that recover alone."""
        inputs = self.inputs
        share = replica_share(
            stall_s=inputs.replica_stall_s,
            rejoin_s=inputs.replica_rejoin_s,
            replica_count=inputs.replica_count,
            mtbf_s=mtbf_s(failures_per_1000_host_days=rate, host_count=inputs.host_count),
        )
        return share * self.kept_share


def evaluate(plan: Plan) -> PlanReport:
    """Everything that follows from a plan."""
    inputs = resolve(plan)
    sheet = _Sheet(inputs.assumed)
    efficiency = _Efficiency(inputs=inputs)
    recovery = efficiency.recovery(inputs.rate.per_1000_host_days)
    best_s = exact_interval_s(pause_s=recovery.pause_s, mtbf_s=recovery.mtbf_s)
    interval_s = inputs.checkpoint_interval_s if inputs.checkpoint_interval_s is not None else best_s
    _failures(sheet, inputs, recovery)
    _intervals(sheet, efficiency, recovery, best_s, interval_s)
    _effective(sheet, efficiency, recovery, best_s, interval_s)
    _budget(sheet, efficiency, recovery)
    _spares(sheet, inputs)
    _training(sheet, inputs)
    _checkpoints(sheet, inputs, interval_s)
    _power(sheet, inputs)
    return PlanReport(
        name=plan.name,
        inputs=inputs,
        figures=tuple(sheet.figures[key] for key in CATALOGUE if key in sheet.figures),
        confidence=inputs.rate.confidence,
    )


def _failures(sheet: _Sheet, inputs: Inputs, recovery: Recovery) -> None:
    rate, hosts = inputs.rate, inputs.host_count
    sheet.add("host_count", hosts)
    sheet.add("failures_per_1000_host_days", rate.per_1000_host_days, rate.low, rate.high)
    per_gpu = 1000.0 * inputs.gpus_per_host
    rarest = per_gpu / rate.low if rate.low > 0 else float("inf")
    sheet.add("gpu_days_per_failure", per_gpu / rate.per_1000_host_days, per_gpu / rate.high, rarest)
    longest_s = mtbf_s(failures_per_1000_host_days=rate.low, host_count=hosts)
    shortest_s = mtbf_s(failures_per_1000_host_days=rate.high, host_count=hosts)
    sheet.add("mtbf_s", recovery.mtbf_s, shortest_s, longest_s)
    sheet.add("failures_per_day", DAY_S / recovery.mtbf_s, DAY_S / longest_s, DAY_S / shortest_s)
    run_s = inputs.run_days * DAY_S
    sheet.add(
        "failures_in_run",
        run_s / recovery.mtbf_s,
        poisson_quantile(run_s / longest_s, 0.025),
        poisson_quantile(run_s / shortest_s, 0.975),
    )
    if inputs.planned_per_day > 0:
        sheet.add("interruption_interval_s", _interruption_interval_s(inputs, recovery))


def _interruption_interval_s(inputs: Inputs, recovery: Recovery) -> float:
    return 1.0 / (1.0 / recovery.mtbf_s + inputs.planned_per_day / DAY_S)


def _intervals(sheet: _Sheet, efficiency: _Efficiency, recovery: Recovery, best_s: float, interval_s: float) -> None:
    pause_s, between_s = recovery.pause_s, recovery.mtbf_s
    sheet.add("young_interval_s", young_interval_s(pause_s=pause_s, mtbf_s=between_s))
    sheet.add("daly_interval_s", daly_interval_s(pause_s=pause_s, mtbf_s=between_s))
    sheet.add("exact_interval_s", best_s)
    sheet.add("interval_s", interval_s)
    kept = efficiency.kept_share
    best = exact_share(interval_s=best_s, recovery=recovery)
    for key, tried_s in (
        ("interval_cost_share", interval_s),
        ("half_interval_cost_share", best_s / 2.0),
        ("double_interval_cost_share", best_s * 2.0),
    ):
        missed = best if tried_s == best_s else exact_share(interval_s=tried_s, recovery=recovery)
        sheet.add(key, max(0.0, best - missed) * kept)


def _effective(sheet: _Sheet, efficiency: _Efficiency, recovery: Recovery, best_s: float, interval_s: float) -> None:
    inputs, kept, rate = efficiency.inputs, efficiency.kept_share, efficiency.inputs.rate
    sheet.add("restart_total_s", recovery.restart_s)
    sheet.add("lost_work_s", expected_lost_work_s(interval_s=interval_s))
    share = efficiency.share(rate.per_1000_host_days)
    replicas = efficiency.replica_share(rate.per_1000_host_days)
    if rate.low < rate.high:
        sheet.add("effective_share", share, efficiency.share(rate.high), efficiency.share(rate.low))
        low, high = efficiency.replica_share(rate.high), efficiency.replica_share(rate.low)
        sheet.add("replica_effective_share", replicas, low, high)
    else:
        sheet.add("effective_share", share)
        sheet.add("replica_effective_share", replicas)
    sheet.add("best_effective_share", exact_share(interval_s=best_s, recovery=recovery) * kept)
    sheet.add("linear_effective_share", linear_share(interval_s=interval_s, recovery=recovery) * kept)
    sheet.add("planned_share", 1.0 - kept)
    sheet.add("loss_per_interruption_s", (1.0 - share) * _interruption_interval_s(inputs, recovery))
    sheet.add("lost_gpu_hours", (1.0 - share) * inputs.gpu_count * inputs.run_days * DAY_S / HOUR_S)


def _budget(sheet: _Sheet, efficiency: _Efficiency, recovery: Recovery) -> None:
    inputs, kept = efficiency.inputs, efficiency.kept_share
    for target in TARGETS:
        sheet.add(f"loss_budget_{target * 100:.0f}_s", loss_budget_s(mtbf_s=recovery.mtbf_s, target_share=target))
    if kept > 0:
        limits_s = restart_limits_s(recovery=recovery, target_shares=[target / kept for target in TARGETS])
        for target, limit_s in zip(TARGETS, limits_s, strict=True):
            sheet.add(f"restart_limit_{target * 100:.0f}_s", max(0.0, limit_s))
    between_s = _interruption_interval_s(inputs, recovery)
    sheet.add("interruption_budget_s", loss_budget_s(mtbf_s=between_s, target_share=inputs.target_share))
    share = sheet.figures["effective_share"].value
    sheet.add("target_gap_share", max(0.0, inputs.target_share - share))
    for lever in levers(recovery, interval_s=inputs.checkpoint_interval_s):
        sheet.add(_LEVER_KEYS[lever.name], lever.gain * kept)


def _spares(sheet: _Sheet, inputs: Inputs) -> None:
    wanted, ratio, hosts = inputs.availability_share, inputs.down_variance_ratio, inputs.host_count
    rate = inputs.rate.per_1000_host_days * inputs.replaced_share
    lemons = Lemons(host_share=inputs.lemon_host_share, failure_share=inputs.lemon_failure_share)
    mean = hosts_down_mean(host_count=hosts, failures_per_1000_host_days=rate, replacement_s=inputs.replacement_s)
    sheet.add("hosts_down_mean", mean)
    sheet.add("poisson_spare_count", poisson_spares(down_mean=mean, availability=wanted))
    sheet.add("binomial_spare_count", binomial_spares(host_count=hosts, down_mean=mean, availability=wanted))
    two_class = lemon_spares(
        host_count=hosts,
        failures_per_1000_host_days=rate,
        replacement_s=inputs.replacement_s,
        lemons=lemons,
        availability=wanted,
    )
    sheet.add("two_class_spare_count", two_class)
    bursts = burst_spares(down_mean=mean, burst_hosts=inputs.burst_hosts, availability=wanted)
    sheet.add("burst_spare_count", bursts)
    needed = overdispersed_spares(down_mean=mean, variance_ratio=ratio, availability=wanted)
    if inputs.rate.low < inputs.rate.high:
        low, high = (
            overdispersed_spares(
                down_mean=mean * end / inputs.rate.per_1000_host_days, variance_ratio=ratio, availability=wanted
            )
            for end in (inputs.rate.low, inputs.rate.high)
        )
        sheet.add("spare_count", needed, low, high)
    else:
        sheet.add("spare_count", needed)
    excluded = overdispersed_spares(down_mean=mean * lemons.rate_factor, variance_ratio=ratio, availability=wanted)
    sheet.add("excluded_spare_count", excluded)
    if inputs.spare_host_count is not None:
        share = pool_availability(spare_count=inputs.spare_host_count, down_mean=mean, variance_ratio=ratio)
        sheet.add("pool_availability_share", share)
        sheet.add("pool_effective_share", share * sheet.figures["effective_share"].value)


def _training(sheet: _Sheet, inputs: Inputs) -> None:
    parameters, tokens = inputs.parameter_count, inputs.token_count
    if parameters is None or tokens is None:
        return
    flops = training_flops(parameters=parameters, tokens=tokens)
    sheet.add("training_flops", flops)
    effective = sheet.figures["effective_share"]
    if effective.value > 0:
        busy_s = training_s(
            flops=flops, gpu_count=inputs.gpu_count, flops_per_gpu=inputs.flops_per_gpu, effective_share=1.0
        )
        power_w = inputs.it_power_per_gpu_w * inputs.gpu_count * inputs.pue
        for key, at_full in (
            ("training_days", busy_s / DAY_S),
            ("training_gpu_hours", inputs.gpu_count * busy_s / HOUR_S),
            ("training_energy_j", energy_j(power_w=power_w, duration_s=busy_s)),
        ):
            low = at_full / effective.high if effective.high else None
            high = at_full / effective.low if effective.low else None
            sheet.add(key, at_full / effective.value, low, high)
    sheet.add("tokens_per_parameter", tokens / parameters)
    for name, best in (
        ("chinchilla", optimum(CHINCHILLA, flops=flops)),
        ("epoch", optimum(EPOCH, flops=flops)),
        ("llama3", llama3_optimum(flops=flops)),
    ):
        sheet.add(f"{name}_parameter_count", best.parameters)
        sheet.add(f"{name}_token_count", best.tokens)
    small = over_training(CHINCHILLA, flops=flops)
    if small is not None:
        sheet.add("small_parameter_count", small.model.parameters)
        sheet.add("small_token_count", small.model.tokens)
        sheet.add("small_extra_share", small.extra_compute_share)
        sheet.add("small_break_even_token_count", small.break_even_tokens)


def _checkpoints(sheet: _Sheet, inputs: Inputs, interval_s: float) -> None:
    if inputs.parameter_count is None:
        return
    cost = checkpoint_cost(
        parameters=inputs.parameter_count,
        bytes_per_parameter=inputs.bytes_per_parameter,
        gpu_count=inputs.gpu_count,
        gpus_per_host=inputs.gpus_per_host,
        storage_bytes_per_s=inputs.storage_bytes_per_s,
        interval_s=interval_s,
    )
    sheet.add("checkpoint_bytes", cost.total_bytes)
    sheet.add("checkpoint_gpu_bytes", cost.gpu_bytes)
    sheet.add("checkpoint_host_bytes", cost.host_memory_bytes)
    sheet.add("checkpoint_write_s", cost.write_s)
    sheet.add("checkpoint_bandwidth_bytes_per_s", cost.bandwidth_bytes_per_s)


def _power(sheet: _Sheet, inputs: Inputs) -> None:
    model = PowerModel(
        gpu_w=inputs.gpu_power_w,
        it_w_per_gpu=inputs.it_power_per_gpu_w,
        pue=inputs.pue,
        waiting_share=inputs.waiting_share,
        idle_share=inputs.idle_share,
    )
    power = draw(model, gpu_count=inputs.gpu_count)
    run_s = inputs.run_days * DAY_S
    sheet.add("gpu_w", power.gpu_w)
    sheet.add("it_w", power.it_w)
    sheet.add("facility_w", power.facility_w)
    sheet.add("run_energy_j", energy_j(power_w=power.facility_w, duration_s=run_s))
    sheet.add("stall_swing_w", power.stall_swing_w)
    sheet.add("end_swing_w", power.end_swing_w)
    if inputs.ramp_limit_w_per_s is not None:
        swing_w = max(power.stall_swing_w, power.end_swing_w)
        sheet.add("ramp_s", ramp_s(swing_w=swing_w, limit_w_per_s=inputs.ramp_limit_w_per_s))
        sheet.add("buffer_j", buffer_j(swing_w=swing_w, limit_w_per_s=inputs.ramp_limit_w_per_s))
    sheet.add("floor_energy_j", energy_j(power_w=power.gpu_w, duration_s=run_s) * FLOOR_ENERGY_SHARE)
