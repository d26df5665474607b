"""Every figure of a plan, in words: its name, unit, formula, source, and the inputs that it rests on."""

from dataclasses import dataclass

from everstep.planning.scaling_laws import CHINCHILLA, EPOCH

DALY = "Daly 2006"
YOUNG = "Young 1974"
RSC = "arXiv 2410.21680"
FT_HSDP = "arXiv 2602.00277"
LLAMA3_PAPER = "arXiv 2407.21783"
BYTEROBUST = "arXiv 2509.16293"
ARITHMETIC = "arithmetic"
TARGETS = (0.90, 0.95, 0.97, 0.99)
"""Effective training times that a loss budget is told for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is constant about a figure.

    Attributes:
        key: stable, for programs; the unit is its end where it has one.
        unit: `s`, `share`, `W`, `J`, `bytes`, `bytes/s`, `FLOP`, `days`, … or a noun that is counted.
        formula: in the letters of the field; M mean time between failures, d checkpoint pause, R restart, t interval.
        inputs: the keys of the plan that it is computed from, directly or through other figures.
    """

    section: str
    key: str
    title: str
    unit: str
    formula: str
    source: str
    inputs: frozenset[str]


_HOSTS = frozenset({"gpu_count", "gpus_per_host"})
_RATE = _HOSTS | {"failures_per_1000_host_days"}
_RANGED = _RATE | {"count_variance_ratio"}
"""The figures that have a range: it follows from how far the counted failures may be from the mean."""
_PAUSE = _RATE | {"checkpoint_pause_s"}
_INTERVAL = _PAUSE | {"checkpoint_interval_s"}
_RESTART = frozenset({"detection_s", "restart_s", "restore_s"})
_PLANNED = frozenset({"planned_per_day", "planned_stop_s"})
_BEST = _PAUSE | _RESTART | _PLANNED
_EFFECTIVE = _INTERVAL | _RESTART | _PLANNED
_REPLICAS = frozenset({"replica_count", "replica_stall_s", "replica_rejoin_s"})
_DOWN = _RATE | {"replaced_share", "replacement_s"}
_SPARES = _DOWN | {"availability_share"}
_LEMONS = frozenset({"lemon_host_share", "lemon_failure_share"})
_MODEL = frozenset({"parameter_count", "token_count"})
_TRAINING = _MODEL | {"flops_per_gpu"} | _EFFECTIVE | _RANGED
_BYTES = frozenset({"parameter_count", "bytes_per_parameter"})
_GPU_W = frozenset({"gpu_count", "gpu_power_w"})
_IT_W = frozenset({"gpu_count", "it_power_per_gpu_w"})
_FACILITY_W = _IT_W | {"pue"}


def _entry(key: str, title: str, unit: str, formula: str, source: str, inputs: frozenset[str] | set[str]) -> Entry:
    return Entry(section="", key=key, title=title, unit=unit, formula=formula, source=source, inputs=frozenset(inputs))


def _budget(target: float) -> Entry:
    percent = f"{target * 100:.0f}"
    key = f"loss_budget_{percent}_s"
    return _entry(key, f"one failure may cost, for {percent} %", "s", f"M·(1 − {target:.2f})", ARITHMETIC, _RATE)


def _restart_limit(target: float) -> Entry:
    percent = f"{target * 100:.0f}"
    return _entry(
        f"restart_limit_{percent}_s",
        f"restart may take, for {percent} % (0: no restart is fast enough)",
        "s",
        f"M·ln(best share with R = 0 ÷ {target:.2f})",
        f"inverse of the exact model, {DALY}",
        _PAUSE | _PLANNED,
    )


_SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Failures": (
        _entry("host_count", "hosts", "hosts", "GPUs ÷ GPUs per host, rounded up", ARITHMETIC, _HOSTS),
        _entry(
            "failures_per_1000_host_days", "failure rate", "per 1000 host-days", "r", "the plan's", _RANGED - _HOSTS
        ),
        _entry(
            "gpu_days_per_failure",
            "GPU-days per failure",
            "GPU-days",
            "GPUs per host × 1000 ÷ r",
            ARITHMETIC,
            _RANGED - {"gpu_count"},
        ),
        _entry("mtbf_s", "time between failures", "s", "M = 1 ÷ (hosts × r)", RSC, _RANGED),
        _entry("failures_per_day", "failures a day", "per day", "hosts × r", ARITHMETIC, _RANGED),
        _entry(
            "failures_in_run",
            "failures in the run",
            "failures",
            "hosts × r × days; the range is what a run may see (Poisson)",
            ARITHMETIC,
            _RANGED | {"run_days"},
        ),
        _entry(
            "interruption_interval_s",
            "time between interruptions, planned ones too",
            "s",
            "1 ÷ (hosts × r + planned a day)",
            ARITHMETIC,
            _RATE | {"planned_per_day"},
        ),
    ),
    "Checkpoint interval": (
        _entry("young_interval_s", "best interval by Young", "s", "√(2dM)", YOUNG, _PAUSE),
        _entry(
            "daly_interval_s",
            "best interval by Daly",
            "s",
            "√(2dM)·(1 + ⅓√(d/2M) + ⅑·d/2M) − d; M if d ≥ 2M",
            DALY,
            _PAUSE,
        ),
        _entry(
            "exact_interval_s",
            "best interval, exact",
            "s",
            "M·(1 + W₀(−e^{−(1+d/M)}))",
            f"optimum of the exact model, {DALY}",
            _PAUSE,
        ),
        _entry("interval_s", "interval of this plan", "s", "checkpoint_interval_s, or the exact best", "", _INTERVAL),
        _entry(
            "interval_cost_share",
            "cost of missing the best interval",
            "share",
            "best effective time − effective time",
            DALY,
            _EFFECTIVE,
        ),
        _entry(
            "half_interval_cost_share",
            "… if it were half of the best",
            "share",
            "best − exact model at t*/2",
            DALY,
            _BEST,
        ),
        _entry(
            "double_interval_cost_share",
            "… if it were double the best",
            "share",
            "best − exact model at 2t*",
            DALY,
            _BEST,
        ),
    ),
    "Effective training time": (
        _entry(
            "restart_total_s",
            "restart R, without the lost work",
            "s",
            "detection + restart + restore",
            ARITHMETIC,
            _RESTART,
        ),
        _entry("lost_work_s", "work lost at a failure", "s", "t/2", "CoreWeave's rule", _INTERVAL),
        _entry(
            "effective_share",
            "effective training time",
            "share",
            "t ÷ (M·e^{R/M}·(e^{(t+d)/M} − 1)) × (1 − planned)",
            f"exact model, {DALY}",
            _EFFECTIVE | _RANGED,
        ),
        _entry(
            "best_effective_share",
            "… at the best interval",
            "share",
            "the same at t*",
            f"exact model, {DALY}",
            _BEST,
        ),
        _entry(
            "linear_effective_share",
            "… by Meta's linear form (for comparison)",
            "share",
            "(1 − (R + t/2)/M) ÷ (1 + d/t) × (1 − planned)",
            f"{RSC}; wrong once (R + t/2)/M > 0.3",
            _EFFECTIVE,
        ),
        _entry("planned_share", "time in planned interruptions", "share", "planned a day × stop", ARITHMETIC, _PLANNED),
        _entry(
            "replica_effective_share",
            "… with replicas that recover alone",
            "share",
            "(1 − (S + T/k)/M) × (1 − planned)",
            FT_HSDP,
            _RANGED | _REPLICAS | _PLANNED,
        ),
        _entry(
            "pool_effective_share",
            "… and waiting for hosts when the spares are out",
            "share",
            "effective time × pool availability",
            ARITHMETIC,
            _EFFECTIVE | _DOWN | {"spare_host_count", "down_variance_ratio"},
        ),
        _entry(
            "loss_per_interruption_s",
            "lost per interruption, all causes together",
            "s",
            "(1 − effective time) × time between interruptions",
            ARITHMETIC,
            _EFFECTIVE,
        ),
        _entry(
            "lost_gpu_hours",
            "lost in the run",
            "GPU-hours",
            "(1 − effective time) × GPUs × hours",
            ARITHMETIC,
            _EFFECTIVE | {"run_days"},
        ),
    ),
    "Loss budget": (
        *(_budget(target) for target in TARGETS),
        *(_restart_limit(target) for target in TARGETS),
        _entry(
            "interruption_budget_s",
            "one interruption may cost, planned ones too, for the target",
            "s",
            "time between interruptions × (1 − target)",
            ARITHMETIC,
            _RATE | {"planned_per_day", "target_share"},
        ),
        _entry(
            "target_gap_share",
            "missing to the target",
            "share",
            "target − effective time",
            ARITHMETIC,
            _EFFECTIVE | {"target_share"},
        ),
    ),
    "What buys most": tuple(
        _entry(f"{key}_gain_share", title, "share", formula, f"exact model, {DALY}", _EFFECTIVE)
        for key, title, formula in (
            ("failure_rate", "half the failures", "gain at 2M"),
            ("restart", "half the restart time", "gain at R/2"),
            ("checkpoint_pause", "half the checkpoint pause", "gain at d/2"),
            ("best_interval", "the best interval", "gain at t*"),
        )
    ),
    "Spare hosts": (
        _entry("hosts_down_mean", "hosts down at once, on average", "hosts", "N·r·T", "Little's law", _DOWN),
        _entry("poisson_spare_count", "spares, Poisson (optimistic)", "hosts", "quantile of Poisson", "usual", _SPARES),
        _entry(
            "binomial_spare_count",
            "spares, binomial",
            "hosts",
            "quantile of a binomial over hosts",
            BYTEROBUST,
            _SPARES,
        ),
        _entry(
            "two_class_spare_count",
            "spares, lemons and good hosts",
            "hosts",
            "quantile of two binomials",
            ARITHMETIC,
            _SPARES | _LEMONS,
        ),
        _entry(
            "burst_spare_count",
            "spares, failures in bursts",
            "hosts",
            "quantile of Pólya–Aeppli",
            "compound Poisson",
            _SPARES | {"burst_hosts"},
        ),
        _entry(
            "spare_count",
            "spares for the target availability",
            "hosts",
            "quantile of a negative binomial",
            "spread of StepFun's record",
            _SPARES | _RANGED | {"down_variance_ratio"},
        ),
        _entry(
            "excluded_spare_count",
            "… once lemons are excluded",
            "hosts",
            "the same at r·(1 − lemon failures)/(1 − lemons)",
            "StepFun's record; arXiv 2410.21680",
            _SPARES | _LEMONS | {"down_variance_ratio"},
        ),
        _entry(
            "pool_availability_share",
            "time in which the spares at hand suffice",
            "share",
            "negative binomial",
            "spread of StepFun's record",
            _DOWN | {"spare_host_count", "down_variance_ratio"},
        ),
    ),
    "Training": (
        _entry("training_flops", "compute", "FLOP", "C = 6·N·D", "usual", _MODEL),
        _entry(
            "training_days",
            "days to train",
            "days",
            "C ÷ (GPUs × FLOP/s × effective time)",
            ARITHMETIC,
            _TRAINING,
        ),
        _entry("training_gpu_hours", "GPU-hours", "GPU-hours", "GPUs × hours", ARITHMETIC, _TRAINING),
        _entry(
            "training_energy_j",
            "energy",
            "J",
            "facility power × time",
            ARITHMETIC,
            _TRAINING | _FACILITY_W,
        ),
        _entry("tokens_per_parameter", "tokens per parameter", "", "D ÷ N", ARITHMETIC, _MODEL),
    ),
    "Compute-optimal size": (
        *(
            _entry(
                f"{key}_{what}",
                f"{name}: {title}",
                title,
                formula,
                source,
                _MODEL,
            )
            for key, name, source in (
                ("chinchilla", CHINCHILLA.name, CHINCHILLA.source),
                ("epoch", EPOCH.name, f"{EPOCH.source}; constants from memory"),
            )
            for what, title, formula in (
                ("parameter_count", "parameters", "(αA/(βB))^{1/(α+β)}·(C/6)^{β/(α+β)}"),
                ("token_count", "tokens", "C ÷ (6N*)"),
            )
        ),
        _entry(
            "llama3_parameter_count",
            "Llama 3's law: parameters",
            "parameters",
            "C ÷ (6D*)",
            f"{LLAMA3_PAPER}, figure 3",
            _MODEL,
        ),
        _entry(
            "llama3_token_count",
            "Llama 3's law: tokens",
            "tokens",
            "0.299·C^0.537",
            f"{LLAMA3_PAPER}, figure 3",
            _MODEL,
        ),
        _entry(
            "small_parameter_count",
            "half Chinchilla's size, over-trained: parameters",
            "parameters",
            "N*/2",
            CHINCHILLA.source,
            _MODEL,
        ),
        _entry(
            "small_token_count",
            "… tokens to the same loss",
            "tokens",
            "(B ÷ (L* − E − A/N^α))^{1/β}",
            CHINCHILLA.source,
            _MODEL,
        ),
        _entry(
            "small_extra_share",
            "… extra training compute",
            "share",
            "6ND' ÷ C − 1",
            CHINCHILLA.source,
            _MODEL,
        ),
        _entry(
            "small_break_even_token_count",
            "… paid for after serving",
            "tokens",
            "extra FLOP ÷ (2·(N* − N))",
            "2 FLOP per parameter and token",
            _MODEL,
        ),
    ),
    "Checkpoints": (
        _entry("checkpoint_bytes", "size", "bytes", "N × bytes per parameter", ARITHMETIC, _BYTES),
        _entry("checkpoint_gpu_bytes", "per GPU", "bytes", "size ÷ GPUs", ARITHMETIC, _BYTES | {"gpu_count"}),
        _entry(
            "checkpoint_host_bytes",
            "host memory for one copy",
            "bytes",
            "per GPU × GPUs per host",
            ARITHMETIC,
            _BYTES | _HOSTS,
        ),
        _entry(
            "checkpoint_write_s",
            "time to write or load",
            "s",
            "size ÷ storage bandwidth",
            ARITHMETIC,
            _BYTES | {"storage_bytes_per_s"},
        ),
        _entry(
            "checkpoint_bandwidth_bytes_per_s",
            "bandwidth to write one per interval",
            "bytes/s",
            "size ÷ t",
            ARITHMETIC,
            _BYTES | _INTERVAL,
        ),
    ),
    "Power": (
        _entry("gpu_w", "GPUs at full load", "W", "GPUs × W", ARITHMETIC, _GPU_W),
        _entry("it_w", "with hosts, network, storage", "W", "GPUs × W", ARITHMETIC, _IT_W),
        _entry("facility_w", "with cooling and losses", "W", "IT × PUE", ARITHMETIC, _FACILITY_W),
        _entry("run_energy_j", "energy of the run", "J", "facility × days", ARITHMETIC, _FACILITY_W | {"run_days"}),
        _entry(
            "stall_swing_w",
            "swing when all GPUs wait",
            "W",
            "GPU power × (1 − waiting)",
            ARITHMETIC,
            _GPU_W | {"waiting_share"},
        ),
        _entry(
            "end_swing_w",
            "swing when the job ends",
            "W",
            "GPU power × (1 − idle)",
            ARITHMETIC,
            _GPU_W | {"idle_share"},
        ),
        _entry(
            "ramp_s",
            "the larger swing must take, for the ramp limit",
            "s",
            "swing ÷ limit",
            ARITHMETIC,
            _GPU_W | {"idle_share", "waiting_share", "ramp_limit_w_per_s"},
        ),
        _entry(
            "buffer_j",
            "… and needs storage or dummy work of",
            "J",
            "swing² ÷ (2 × limit)",
            ARITHMETIC,
            _GPU_W | {"idle_share", "waiting_share", "ramp_limit_w_per_s"},
        ),
        _entry(
            "floor_energy_j",
            "holding a floor of 90 % of TDP in the run",
            "J",
            "10.5 % of the GPUs' energy",
            "arXiv 2508.14318",
            _GPU_W | {"run_days"},
        ),
    ),
}


def _placed(section: str, entry: Entry) -> Entry:
    return Entry(
        section=section,
        key=entry.key,
        title=entry.title,
        unit=entry.unit,
        formula=entry.formula,
        source=entry.source,
        inputs=entry.inputs,
    )


CATALOGUE: dict[str, Entry] = {
    entry.key: _placed(section, entry) for section, entries in _SECTIONS.items() for entry in entries
}
SECTIONS = tuple(_SECTIONS)
