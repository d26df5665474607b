"""Named plans of published runs: each value with its source, and what nobody published marked as assumed."""

from dataclasses import dataclass
from typing import Any

from everstep.domain.causes import LLAMA3_DAYS, LLAMA3_GPU_COUNT, LLAMA3_PLANNED_COUNT, LLAMA3_UNEXPECTED_COUNT
from everstep.planning.failures import LLAMA3_HOST_DAYS
from everstep.planning.inputs import Origin, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published run.

    Attributes:
        values: keys of `Plan` with what they are in this run.
        origins: for each of them, where that is published, or why it is assumed.
    """

    name: str
    title: str
    values: dict[str, Any]
    origins: dict[str, Origin]


def _preset(name: str, title: str, *values: tuple[str, float, str | Origin]) -> Preset:
    return Preset(
        name=name,
        title=title,
        values={key: value for key, value, _ in values},
        origins={key: origin if isinstance(origin, Origin) else Origin(source=origin) for key, _, origin in values},
    )


_HERD = "arXiv 2407.21783"
_RSC = "arXiv 2410.21680"


def _guess(why: str) -> Origin:
    return Origin(source=why, is_assumed=True)


LLAMA3_405B = _preset(
    "llama3-405b",
    "Llama 3 405B: 16,384 H100 for 54 days",
    ("gpu_count", LLAMA3_GPU_COUNT, f"{_HERD}, section 3.3.1"),
    ("gpus_per_host", 8, f"{_HERD}, section 3.3.1"),
    ("run_days", LLAMA3_DAYS, f"{_HERD}, section 3.3.4"),
    ("failure_count", LLAMA3_UNEXPECTED_COUNT, f"419 unexpected interruptions in 54 days ({_HERD}, Table 5)"),
    ("observed_host_days", LLAMA3_HOST_DAYS, f"2,048 hosts for 54 days ({_HERD}, section 3.3.4)"),
    ("planned_per_day", LLAMA3_PLANNED_COUNT / LLAMA3_DAYS, f"47 planned interruptions ({_HERD}, section 3.3.4)"),
    ("checkpoint_pause_s", 10, _guess('not published; about what "over 90 %" needs at this failure rate')),
    ("target_share", 0.90, f'"higher than 90%" ({_HERD}, section 3.3.4)'),
    ("parameter_count", 405e9, f"{_HERD}, section 3.2"),
    ("token_count", 15.6e12, f"{_HERD}, section 3.2"),
    ("flops_per_gpu", 400e12, f"{_HERD}, Table 4"),
    ("storage_bytes_per_s", 2e12, f"sustained throughput of Tectonic ({_HERD}, section 3.3.1)"),
    ("gpu_power_w", 700, f"{_HERD}, section 3.3.1"),
)
XAI_100K = _preset(
    "xai-100k",
    "100,000 H100 in one job, as xAI's Colossus",
    ("gpu_count", 100_000, "xAI, 2024"),
    ("gpus_per_host", 8, "HGX H100"),
    ("gpu_power_w", 700, "H100 TDP"),
    ("pue", 1.2, _guess("no published figure: with it 100,000 H100 draw 147 MW, and SemiAnalysis says about 150")),
)
RSC_16K = _preset(
    "rsc-16k",
    "Meta's Research SuperCluster: 16,384 A100 at RSC-1's failure rate",
    ("gpu_count", 16_384, f"{_RSC}: the size that its time between failures is projected to"),
    ("gpus_per_host", 8, f"{_RSC}"),
    ("failures_per_1000_host_days", 6.50, f"RSC-1, jobs above 128 GPUs ({_RSC})"),
    ("checkpoint_interval_s", 3600, f"{_RSC}: hourly checkpoints, 0.7"),
    ("restart_s", 240, f"the rest of u0, 5 minutes of the 5 to 20 in notes on {_RSC}"),
    ("detection_s", 60, f"a part of u0, 5 minutes of the 5 to 20 in notes on {_RSC}"),
    ("restore_s", 0, f"in u0, 5 minutes of the 5 to 20 in notes on {_RSC}"),
    ("flops_per_gpu", 140e12, _guess("about 45 % of an A100's 312 TFLOP/s; not published for this cluster")),
    ("gpu_peak_flops", 312e12, "A100, dense BF16"),
    ("gpu_power_w", 400, "A100 SXM TDP"),
    ("it_power_per_gpu_w", 800, _guess("no published figure: twice the GPU's own")),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in (LLAMA3_405B, XAI_100K, RSC_16K)}


def preset_plan(name: str) -> Plan:
    """The plan of a preset.

    Raises:
        KeyError: there is none of this name.
    """
    preset = PRESETS[name]
    return Plan(name=preset.name, origins=preset.origins, **preset.values)
