"""The names of things in a job: a run has attempts, an attempt has ranks on hosts, a rank takes steps."""

from typing import NewType

RunId = NewType("RunId", str)
HostId = NewType("HostId", str)
IncidentId = NewType("IncidentId", str)
"""`a0003-1`: the attempt that failed and a counter, so that a folder of evidence names the attempt it is about."""
Rank = NewType("Rank", int)
Attempt = NewType("Attempt", int)
"""Counts from 1 and fences late news: every event and command about workers carries it."""
Step = NewType("Step", int)
"""Optimizer steps finished, counted over the whole job where the script says so, else within the attempt."""
