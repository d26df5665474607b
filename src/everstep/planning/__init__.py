"""Arithmetic for large runs: how often they fail, what is left of their time, what they need.

`evaluate(Plan(gpu_count=16_384, ...))` gives everything; each module's functions can be called alone.
"""

from everstep.planning.inputs import Origin, Plan
from everstep.planning.plan import Figure, PlanReport, evaluate
from everstep.planning.presets import PRESETS, preset_plan

__all__ = ["PRESETS", "Figure", "Origin", "Plan", "PlanReport", "evaluate", "preset_plan"]
