"""Plans are quick enough to sweep: CPU time, so that a busy machine does not matter, with room for a slow one."""

import time

from bench.plan import SWEEP_COUNT, swept_plans
from everstep.planning import evaluate

BAR_S = 5.0
"""For all 10,000; `make bench-plan` measures it."""


def test_a_twentieth_of_the_sweep_takes_less_than_its_part_of_the_bar_twice() -> None:
    plans = swept_plans()
    assert len(plans) == SWEEP_COUNT
    part = plans[::20]
    evaluate(part[0])
    began_s = time.process_time()
    for plan in part:
        evaluate(plan)
    assert time.process_time() - began_s < 2 * BAR_S * len(part) / SWEEP_COUNT
