"""How a plan's figures move with one input: points for plots; it draws nothing."""

from dataclasses import dataclass

from everstep.planning.efficiency import Recovery, best_share, exact_share, linear_share, replica_share
from everstep.planning.failures import DAY_S, mtbf_s
from everstep.planning.inputs import GPUS_PER_REPLICA, Inputs
from everstep.planning.spares import Lemons, hosts_down_mean, pool_availability

STEPS = 96
"""Points of a curve."""
GPUS_LOW, GPUS_HIGH = 256, 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a plot: `points` are (x, y) with x ascending."""

    name: str
    points: tuple[tuple[float, float], ...]


def share_over_gpus(inputs: Inputs) -> tuple[Curve, ...]:
    """Effective training time against the job's GPUs, at this plan's failure rate per host and its recovery times.

    The interval is the best one at each size; the replica curve has one replica for every 8,192 GPUs.
    """
    low = min(GPUS_LOW, inputs.gpu_count)
    high = max(GPUS_HIGH, inputs.gpu_count * 2)
    sizes = _logarithmic(low, high)
    kept = _kept(inputs)
    rates = {"exact": inputs.rate.per_1000_host_days}
    if inputs.rate.low < inputs.rate.high and inputs.rate.low > 0:
        rates |= {"at the lowest failure rate": inputs.rate.low, "at the highest": inputs.rate.high}
    curves = [
        Curve(name=name, points=tuple((gpus, best_share(_at(inputs, gpus, rate)) * kept) for gpus in sizes))
        for name, rate in rates.items()
    ]
    replicas = [
        (
            gpus,
            kept
            * replica_share(
                stall_s=inputs.replica_stall_s,
                rejoin_s=inputs.replica_rejoin_s,
                replica_count=max(2, round(gpus / GPUS_PER_REPLICA)),
                mtbf_s=_at(inputs, gpus, inputs.rate.per_1000_host_days).mtbf_s,
            ),
        )
        for gpus in sizes
    ]
    return (*curves, Curve(name="with replicas that recover alone", points=tuple(replicas)))


def share_over_interval(inputs: Inputs, *, best_interval_s: float) -> tuple[Curve, ...]:
    """Effective training time against the checkpoint interval in seconds: the exact model and Meta's linear form."""
    recovery = _at(inputs, inputs.gpu_count, inputs.rate.per_1000_host_days)
    chosen_s = inputs.checkpoint_interval_s if inputs.checkpoint_interval_s is not None else best_interval_s
    intervals = _logarithmic(min(best_interval_s / 20.0, chosen_s), max(best_interval_s * 20.0, chosen_s))
    kept = _kept(inputs)
    return (
        Curve(name="exact", points=tuple((t, exact_share(interval_s=t, recovery=recovery) * kept) for t in intervals)),
        Curve(
            name="linear form",
            points=tuple((t, linear_share(interval_s=t, recovery=recovery) * kept) for t in intervals),
        ),
    )


def availability_over_spares(inputs: Inputs, *, spare_count: int) -> tuple[Curve, ...]:
    """The share of time in which so many spares suffice: Poisson, this plan's spread, and with lemons excluded."""
    mean = hosts_down_mean(
        host_count=inputs.host_count,
        failures_per_1000_host_days=inputs.rate.per_1000_host_days * inputs.replaced_share,
        replacement_s=inputs.replacement_s,
    )
    lemons = Lemons(host_share=inputs.lemon_host_share, failure_share=inputs.lemon_failure_share)
    last = max(8, spare_count + spare_count // 2, inputs.spare_host_count or 0)
    counts = sorted({round(i * last / STEPS) for i in range(STEPS + 1)})

    def curve(name: str, down_mean: float, ratio: float) -> Curve:
        points = (
            (float(n), pool_availability(spare_count=n, down_mean=down_mean, variance_ratio=ratio)) for n in counts
        )
        return Curve(name=name, points=tuple(points))

    return (
        curve("Poisson", mean, 1.0),
        curve("with this plan's spread", mean, inputs.down_variance_ratio),
        curve("… and lemons excluded", mean * lemons.rate_factor, inputs.down_variance_ratio),
    )


def _at(inputs: Inputs, gpu_count: float, rate: float) -> Recovery:
    hosts = inputs.host_count * gpu_count / inputs.gpu_count
    return Recovery(
        mtbf_s=mtbf_s(failures_per_1000_host_days=rate, host_count=hosts),
        pause_s=inputs.checkpoint_pause_s,
        restart_s=inputs.restart_total_s,
    )


def _kept(inputs: Inputs) -> float:
    return max(0.0, 1.0 - inputs.planned_per_day * inputs.planned_stop_s / DAY_S)


def _logarithmic(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (i / STEPS) for i in range(STEPS + 1)]
