"""The scenarios that have a name, with where their figures come from."""

from dataclasses import replace
from random import Random

from everstep.domain.causes import LLAMA3_DAYS, LLAMA3_GPU_COUNT, LLAMA3_PLANNED_COUNT, LLAMA3_UNEXPECTED_COUNT
from everstep.policy.spares import spares_for
from everstep.sim.delays import EVERSTEP, FT_HSDP, PUBLISHED, Delays, torchrun_delays
from everstep.sim.failures import FailureModel
from everstep.sim.scenario import Scenario
from everstep.sim.trace import FaultTrace

PRESETS = ("llama3", "100k", "stepfun")
TIMEOUTS_S = (600.0, 1800.0)
"""Of a collective, for the comparison with a job without everstep."""

_LLAMA3_HOSTS = LLAMA3_GPU_COUNT // 8
_LLAMA3_RATE = LLAMA3_UNEXPECTED_COUNT / LLAMA3_DAYS / _LLAMA3_HOSTS * 1000

LLAMA3 = Scenario(
    name="llama3",
    gpus=LLAMA3_GPU_COUNT,
    spares=16,
    agents=4,
    days=LLAMA3_DAYS,
    checkpoint_interval_s=450.0,
    checkpoint_pause_s=10.0,
    blocks_per_checkpoint=5,
    restore_tb=104.0,
    storage_tb_per_s=7.0,
    heat_dip_share=0.015,
    failures=FailureModel(
        per_1000_host_days=_LLAMA3_RATE,
        planned_per_day=LLAMA3_PLANNED_COUNT / LLAMA3_DAYS,
        rack_share=0.5,
    ),
    delays=PUBLISHED,
)
"""54 days of Llama 3 405B (arXiv 2407.21783, section 3.3): 3.79 failures per 1000 host-days, 47 planned stops.

Four agents speak for 516 hosts each, and a step is 90 s of work. A checkpoint's pause is assumed as in `everstep plan`:
about what "over 90 %" needs; the interval is near the best for it. A restart loads 104 TB (128 replicas' weights, one
optimizer) at the published peak of 7 TB/s. The number of spares is assumed.
"""

HUNDRED_K = Scenario(
    name="100k",
    gpus=100_000,
    spares=128,
    agents=8,
    days=LLAMA3_DAYS,
    checkpoint_interval_s=180.0,
    checkpoint_pause_s=10.0,
    blocks_per_checkpoint=4,
    heat_dip_share=0.015,
    failures=FailureModel(per_1000_host_days=6.5, down_hours=24.0, rack_share=0.5),
    delays=FT_HSDP,
)
"""100,000 GPUs with a failure every 18 minutes (6.5 per 1000 host-days, RSC-1's) and FT-HSDP's 800 s to recover."""


def stepfun(trace: FaultTrace, *, hosts: int = 368, nodes: int = 400, spares: int | None = None) -> Scenario:
    """The replay of a recorded trace by a job of `hosts`.

    Args:
        nodes: how many the traced cluster has; those without a fault are not in the trace.
        spares: None takes the policy's choice: the 99th percentile of what was down at once, as far as there are nodes.
    """
    chosen = min(spares_for(trace.down_at_once(), availability=0.99), nodes - hosts) if spares is None else spares
    places = Random(0).sample(range(nodes), len(trace.node_names))  # a smaller pool leaves out good and bad nodes alike
    return Scenario(
        name="stepfun",
        gpus=8 * hosts,
        spares=chosen,
        agents=1,
        days=trace.duration_s / 86_400,
        checkpoint_interval_s=600.0,
        checkpoint_pause_s=3.0,
        heat_dip_share=0.0,
        failures=FailureModel(per_1000_host_days=len(trace.faults) / nodes / (trace.duration_s / 86_400) * 1000),
        delays=PUBLISHED,
        faults=tuple(replace(fault, hosts=(places[fault.hosts[0]],)) for fault in trace.faults),
    )


def with_everstep(scenario: Scenario, delays: Delays | None = None) -> Scenario:
    """The same cluster with what everstep measured; the failures stay the same, seed by seed."""
    return replace(scenario, name=f"{scenario.name}, everstep", delays=delays or EVERSTEP)


def with_torchrun(scenario: Scenario, timeout_s: float) -> Scenario:
    """The same cluster and failures, for a job that relies on collective timeouts, a requeue and cold starts."""
    return replace(
        scenario,
        name=f"{scenario.name}, torchrun {timeout_s:g} s",
        delays=torchrun_delays(timeout_s),
        lemon_failures=0,
    )
