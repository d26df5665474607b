"""Power and heat of the coarse world: what a job draws, how far it swings, and how much slower a hot day makes it.

Llama 3 saw 1–2 % less throughput at midday and tens of megawatts swinging when all GPUs stop or start at once
(section 3.3.4). Knows no cluster: only counts and times.
"""

import math
from dataclasses import dataclass

_DAY_S = 86_400.0
_HOTTEST_S = 14 * 3600.0


def heat_factor(at_s: float, dip_share: float) -> float:
    """How much longer work takes at this time of day, of which second 0 is midnight; 1 at night."""
    if dip_share == 0:
        return 1.0
    warmth = max(0.0, math.cos(2 * math.pi * (at_s % _DAY_S - _HOTTEST_S) / _DAY_S))
    return 1.0 / (1.0 - dip_share * warmth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Attributes:
    working_mw: all GPUs at work; `stalled_mw` while none is.
    swing_count: how often all went from one to the other: twice for each interruption and each checkpoint.
    energy_gwh: over the run.
    """

    working_mw: float
    stalled_mw: float
    swing_count: int
    energy_gwh: float

    @property
    def swing_mw(self) -> float:
        return self.working_mw - self.stalled_mw


def power_of(
    *, gpus: int, gpu_watts: float, idle_share: float, working_s: float, elapsed_s: float, stall_count: int
) -> Power:
    """GPU power alone: no CPU, network or cooling.

    Args:
        working_s: time in which steps were done, replayed ones too.
        stall_count: interruptions and checkpoints.
    """
    working_mw = gpus * gpu_watts / 1e6
    stalled_mw = working_mw * idle_share
    megajoules = working_mw * working_s + stalled_mw * (elapsed_s - working_s)
    return Power(
        working_mw=working_mw,
        stalled_mw=stalled_mw,
        swing_count=2 * stall_count,
        energy_gwh=megajoules / 3.6e6,
    )
