"""What a job draws, and how fast that changes when all GPUs stop at once; it knows no power plant and no tariff.

Powers in watts, ramps in watts per second. Everything is proportional: no model of a GPU's clocks or of a feeder.
"""

from dataclasses import dataclass

H100_W = 700.0
"""TDP of Llama 3's H100 (arXiv 2407.21783, section 3.3.1)."""
IT_W_PER_GPU = 30e6 / 24_576
"""1,221 W: hosts, network and storage included; about 30 MW for Meta's cluster of 24K GPUs."""
FLOOR_SHARE = 0.90
FLOOR_ENERGY_SHARE = 0.105
"""Holding a floor of 90 % of TDP costs about 10.5 % more energy (arXiv 2508.14318)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A job's power, in watts.

    Attributes:
        gpu_w: the GPUs alone at full load.
        it_w: hosts, network and storage too.
        facility_w: cooling and losses too.
        stall_swing_w: what falls away when all GPUs wait in a collective or for a checkpoint.
        end_swing_w: what falls away when the job ends or dies.
    """

    gpu_w: float
    it_w: float
    facility_w: float
    stall_swing_w: float
    end_swing_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """What one GPU draws, in watts and shares.

    Attributes:
        gpu_w: at full load.
        it_w_per_gpu: with its part of host, network and storage.
        pue: facility power ÷ IT power.
        waiting_share: of `gpu_w`, while it waits in a collective.
        idle_share: of `gpu_w`, with no process on it.
    """

    gpu_w: float
    it_w_per_gpu: float
    pue: float
    waiting_share: float
    idle_share: float


def draw(model: PowerModel, *, gpu_count: int) -> Draw:
    """The power of a job of `gpu_count` GPUs."""
    gpu_w = model.gpu_w * gpu_count
    it_w = model.it_w_per_gpu * gpu_count
    return Draw(
        gpu_w=gpu_w,
        it_w=it_w,
        facility_w=it_w * model.pue,
        stall_swing_w=gpu_w * (1.0 - model.waiting_share),
        end_swing_w=gpu_w * (1.0 - model.idle_share),
    )


def ramp_s(*, swing_w: float, limit_w_per_s: float) -> float:
    """How long a swing must be stretched to keep within a ramp limit."""
    return swing_w / limit_w_per_s


def buffer_j(*, swing_w: float, limit_w_per_s: float) -> float:
    """Energy that storage or dummy work must give or take while a sudden swing is stretched to a ramp: ½ P²/limit."""
    return swing_w * swing_w / (2.0 * limit_w_per_s)


def energy_j(*, power_w: float, duration_s: float) -> float:
    return power_w * duration_s
