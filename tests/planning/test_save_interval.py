"""The interval of a running job is the exact optimum of what it has seen of itself, within the settings."""

import pytest

from everstep.planning.efficiency import exact_interval_s
from everstep.planning.failures import DAY_S, LLAMA3_RATE
from everstep.planning.save_interval import save_interval_s, seen_mtbf_s


def test_before_the_first_interruption_llama_3s_rate_per_host_counts() -> None:
    assert seen_mtbf_s(interruption_count=0, elapsed_s=5.0, host_count=2048) == pytest.approx(
        1000 * DAY_S / LLAMA3_RATE / 2048
    )


def test_interruptions_that_were_seen_count_and_never_make_the_rate_lower_than_the_usual() -> None:
    assert seen_mtbf_s(interruption_count=3, elapsed_s=900.0, host_count=1) == 300.0
    assert seen_mtbf_s(interruption_count=1, elapsed_s=1e12, host_count=1) == seen_mtbf_s(
        interruption_count=0, elapsed_s=0.0, host_count=1
    )
    assert seen_mtbf_s(interruption_count=2, elapsed_s=0.0, host_count=1) == 0.5


def test_the_interval_is_the_exact_optimum_between_its_bounds() -> None:
    best_s = exact_interval_s(pause_s=0.5, mtbf_s=3600.0)
    assert save_interval_s(pause_s=0.5, mtbf_s=3600.0, shortest_s=30.0, longest_s=600.0) == best_s
    assert save_interval_s(pause_s=0.0, mtbf_s=3600.0, shortest_s=30.0, longest_s=600.0) == 30.0
    assert save_interval_s(pause_s=9.0, mtbf_s=1e7, shortest_s=30.0, longest_s=600.0) == 600.0
    assert save_interval_s(pause_s=9.0, mtbf_s=1e7, shortest_s=1800.0, longest_s=600.0) == 1800.0
