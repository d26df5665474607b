"""How far saves to disk are apart in a job that runs: the exact optimum, from what it has seen of itself so far.

Every time is in seconds. It knows neither what is saved nor who measures.
"""

from everstep.planning.efficiency import exact_interval_s
from everstep.planning.failures import LLAMA3_RATE, mtbf_s

_ELAPSED_MIN_S = 1.0


def seen_mtbf_s(*, interruption_count: int, elapsed_s: float, host_count: float) -> float:
    """Mean time between failures of this job: its time so far ÷ its interruptions, and Llama 3's rate before the first.

    Llama 3's (3.8 per 1000 host-days) is an upper end also afterwards: a few interruptions in a long run say little.
    """
    usual_s = mtbf_s(failures_per_1000_host_days=LLAMA3_RATE, host_count=host_count)
    if interruption_count < 1:
        return usual_s
    return min(usual_s, max(elapsed_s, _ELAPSED_MIN_S) / interruption_count)


def save_interval_s(*, pause_s: float, mtbf_s: float, shortest_s: float, longest_s: float) -> float:
    """The best interval, within what the settings allow; `shortest_s` wins where they contradict each other.

    Args:
        pause_s: what one save costs training.
    """
    return max(shortest_s, min(longest_s, exact_interval_s(pause_s=pause_s, mtbf_s=mtbf_s)))
