"""The keys of a plan: what each means, what is allowed, and what is assumed for it, with where that comes from.

One table for the checks, the flags, the pages and the sentences of errors. A key's unit is the end of its name.
"""

import math
from dataclasses import dataclass

from everstep.planning.checkpoint_cost import BYTES_PER_PARAMETER
from everstep.planning.failures import DAY_S, LLAMA3_REPLACED_SHARE
from everstep.planning.power import H100_W, IT_W_PER_GPU
from everstep.planning.scaling_laws import H100_PEAK_FLOPS
from everstep.planning.spares import STEPFUN_TOP_FAILURE_SHARE, STEPFUN_TOP_HOST_SHARE, STEPFUN_VARIANCE_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One input of a plan.

    Attributes:
        meaning: for people, without the name.
        low, high: the allowed range; `low` itself is allowed only when `includes_low`.
        is_whole: no fractions.
        assumed: what is taken when nobody says; None when figures that need it are left out, or another key stands in.
        why: where the assumed value comes from.
    """

    name: str
    group: str
    meaning: str
    low: float = 0.0
    high: float = math.inf
    includes_low: bool = False
    is_whole: bool = False
    assumed: float | None = None
    why: str = ""

    @property
    def allowed(self) -> str:
        """The rest of the sentence "… must be"."""
        whole = "a whole number, " if self.is_whole else ""
        if self.name.endswith("_share"):
            least = f"from {self.low:g} to" if self.includes_low else f"above {self.low:g} and at most"
            return f"{least} {self.high:g} (0.9 or '90 %')"
        least = f"{self.low:g} or more" if self.includes_low else f"above {self.low:g}"
        return f"{whole}{least}" if math.isinf(self.high) else f"{whole}{least}, at most {self.high:,.0f}"

    def allows(self, value: float) -> bool:
        if not math.isfinite(value) or value > self.high or (self.is_whole and value != int(value)):
            return False
        return value >= self.low if self.includes_low else value > self.low


def _count(name: str, group: str, meaning: str, *, low: float = 1, assumed: float | None = None, why: str = "") -> Key:
    return Key(
        name=name,
        group=group,
        meaning=meaning,
        low=low,
        high=1e9,
        includes_low=True,
        is_whole=True,
        assumed=assumed,
        why=why,
    )


def _share(name: str, group: str, meaning: str, *, assumed: float | None, why: str, includes_low: bool = False) -> Key:
    return Key(name=name, group=group, meaning=meaning, high=1.0, includes_low=includes_low, assumed=assumed, why=why)


_SCALE, _FAILURES, _RECOVERY, _SPARES, _MODEL, _POWER = "scale", "failures", "recovery", "spares", "model", "power"

KEYS: tuple[Key, ...] = (
    Key(
        name="gpu_count",
        group=_SCALE,
        meaning="GPUs of the job",
        low=1,
        high=1e9,
        includes_low=True,
        is_whole=True,
    ),
    _count("gpus_per_host", _SCALE, "GPUs in one host", assumed=8, why="the usual host"),
    Key(name="run_days", group=_SCALE, meaning="length of the run", high=36_500, assumed=30.0, why="a month"),
    Key(name="failures_per_1000_host_days", group=_FAILURES, meaning="failures per 1000 host-days", high=1e6),
    Key(
        name="gpu_days_per_failure", group=_FAILURES, meaning="GPU-days between failures (another way to say the rate)"
    ),
    Key(name="mtbf_s", group=_FAILURES, meaning="mean time between failures of this job (another way to say the rate)"),
    _count("failure_count", _FAILURES, "failures seen, with observed_host_days (another way to say the rate)", low=0),
    Key(name="observed_host_days", group=_FAILURES, meaning="host-days in which they were seen"),
    Key(
        name="count_variance_ratio",
        group=_FAILURES,
        meaning="variance ÷ mean of failure_count in equal periods; 1 is Poisson, more widens the range",
        low=1.0,
        high=1e4,
        includes_low=True,
        assumed=1.0,
        why="failures independent of each other",
    ),
    Key(
        name="planned_per_day",
        group=_FAILURES,
        meaning="planned interruptions a day",
        high=1000,
        includes_low=True,
        assumed=0.0,
        why="no maintenance while the job runs",
    ),
    Key(
        name="planned_stop_s",
        group=_FAILURES,
        meaning="time that a planned interruption takes",
        includes_low=True,
        why="checkpoint_pause_s + restart_s + restore_s: nothing to detect, no work lost",
    ),
    Key(
        name="checkpoint_pause_s",
        group=_RECOVERY,
        meaning="how long training stands still for a checkpoint",
        assumed=60.0,
        why="a blocking save of a large model (Nemotron 3 before asynchronous saves, third-party notes)",
    ),
    Key(
        name="checkpoint_interval_s",
        group=_RECOVERY,
        meaning="useful work between two checkpoints",
        why="the best one, by the exact model",
    ),
    Key(
        name="detection_s",
        group=_RECOVERY,
        meaning="from a failure to the order to restart",
        includes_low=True,
        assumed=60.0,
        why="FT-HSDP's synchronous recovery (notes on arXiv 2602.00277)",
    ),
    Key(
        name="restart_s",
        group=_RECOVERY,
        meaning="stop, new hosts, processes, groups",
        includes_low=True,
        assumed=420.0,
        why="FT-HSDP's synchronous recovery: scheduling 120 s, groups 300 s (notes on arXiv 2602.00277)",
    ),
    Key(
        name="restore_s",
        group=_RECOVERY,
        meaning="loading the checkpoint and the first step",
        includes_low=True,
        assumed=120.0,
        why="FT-HSDP's synchronous recovery: checkpoint load, without its 200 s first step (notes on arXiv 2602.00277)",
    ),
    _share("target_share", _RECOVERY, "effective training time to reach", assumed=0.95, why="a goal"),
    _count("replica_count", _RECOVERY, "replicas that recover one by one", why="one for every 8,192 GPUs, at least 2"),
    Key(
        name="replica_stall_s",
        group=_RECOVERY,
        meaning="all replicas stand still after a failure",
        includes_low=True,
        assumed=180.0,
        why="FT-HSDP: 3 minutes (arXiv 2602.00277)",
    ),
    Key(
        name="replica_rejoin_s",
        group=_RECOVERY,
        meaning="the failed replica alone stays away after that",
        includes_low=True,
        assumed=420.0,
        why="FT-HSDP: 7 of 18 minutes (notes on arXiv 2602.00277)",
    ),
    Key(
        name="replacement_s",
        group=_SPARES,
        meaning="until a failed host is back or replaced in the pool",
        includes_low=True,
        assumed=DAY_S,
        why="a day; StepFun's repairs: median 20.4 h, mean 132.8 h (InfiniteHBD trace)",
    ),
    _share(
        "replaced_share",
        _SPARES,
        "failures after which the job needs another host",
        assumed=LLAMA3_REPLACED_SHARE,
        why="Llama 3: GPU, host and network causes, 324 of 419 (arXiv 2407.21783, Table 5)",
        includes_low=True,
    ),
    _count("spare_host_count", _SPARES, "hot spares at hand", low=0),
    Key(
        name="availability_share",
        group=_SPARES,
        meaning="share of the time in which the spares must suffice",
        low=0.5,
        high=0.99999,
        includes_low=True,
        assumed=0.99,
        why="P99, the usual rule",
    ),
    Key(
        name="down_variance_ratio",
        group=_SPARES,
        meaning="variance ÷ mean of hosts down at once; 1 is Poisson",
        low=1.0,
        high=1e4,
        includes_low=True,
        assumed=STEPFUN_VARIANCE_RATIO,
        why="StepFun's record, 400 hosts in 348 days (InfiniteHBD trace)",
    ),
    Key(
        name="burst_hosts",
        group=_SPARES,
        meaning="hosts that one event takes down, on average",
        low=1.0,
        high=1e4,
        includes_low=True,
        assumed=2.0,
        why="a rack of Llama 3's cluster: 2 hosts behind one switch (arXiv 2407.21783, section 3.3.1)",
    ),
    _share(
        "lemon_host_share",
        _SPARES,
        "lemon hosts among all",
        assumed=STEPFUN_TOP_HOST_SHARE,
        why="the worst 5 % of StepFun's hosts, by hindsight",
        includes_low=True,
    ),
    _share(
        "lemon_failure_share",
        _SPARES,
        "failures of lemon hosts among all",
        assumed=STEPFUN_TOP_FAILURE_SHARE,
        why="they had 24.5 % of its faults",
        includes_low=True,
    ),
    Key(name="parameter_count", group=_MODEL, meaning="parameters of the model"),
    Key(name="token_count", group=_MODEL, meaning="tokens to train on"),
    Key(
        name="flops_per_gpu",
        group=_MODEL,
        meaning="achieved FLOP/s of one GPU (or give mfu_share)",
        high=1e18,
        assumed=400e12,
        why="Llama 3 405B on 16,384 H100 (arXiv 2407.21783, Table 4)",
    ),
    _share(
        "mfu_share", _MODEL, "model FLOPs utilisation, of gpu_peak_flops (or give flops_per_gpu)", assumed=None, why=""
    ),
    Key(
        name="gpu_peak_flops",
        group=_MODEL,
        meaning="peak FLOP/s of one GPU",
        high=1e18,
        assumed=H100_PEAK_FLOPS,
        why="H100 SXM, dense BF16",
    ),
    Key(
        name="bytes_per_parameter",
        group=_MODEL,
        meaning="of a checkpoint",
        high=1000,
        assumed=BYTES_PER_PARAMETER,
        why="bf16 weights, fp32 master weights, two Adam moments",
    ),
    Key(
        name="storage_bytes_per_s",
        group=_MODEL,
        meaning="sustained bandwidth of the checkpoint storage",
        assumed=100e9,
        why="production fleets have 50 to 200 GB/s (third-party notes)",
    ),
    Key(
        name="gpu_power_w",
        group=_POWER,
        meaning="one GPU at full load",
        high=1e5,
        assumed=H100_W,
        why="H100 TDP (arXiv 2407.21783, section 3.3.1)",
    ),
    Key(
        name="it_power_per_gpu_w",
        group=_POWER,
        meaning="one GPU with its part of host, network and storage",
        high=1e5,
        assumed=IT_W_PER_GPU,
        why="about 30 MW for Meta's cluster of 24,576 GPUs",
    ),
    Key(
        name="pue",
        group=_POWER,
        meaning="facility power ÷ IT power",
        low=1.0,
        high=5.0,
        includes_low=True,
        assumed=1.2,
        why="no published figure: with it 100,000 H100 draw 147 MW, and SemiAnalysis says about 150",
    ),
    _share(
        "waiting_share",
        _POWER,
        "of its full power that a GPU draws while it waits in a collective",
        assumed=0.4,
        why="no published figure",
        includes_low=True,
    ),
    _share(
        "idle_share",
        _POWER,
        "of its full power that a GPU draws without a process",
        assumed=0.1,
        why="no published figure; an idle H100 draws about 70 W",
        includes_low=True,
    ),
    Key(name="ramp_limit_w_per_s", group=_POWER, meaning="how fast the grid lets the draw change"),
)
KEY_BY_NAME: dict[str, Key] = {key.name: key for key in KEYS}
RATE_KEYS = (
    "failures_per_1000_host_days",
    "gpu_days_per_failure",
    "mtbf_s",
    "failure_count",
    "observed_host_days",
    "count_variance_ratio",
)
"""They all say the failure rate: one who names any of them has said it."""
SPEED_KEYS = ("flops_per_gpu", "mfu_share")
