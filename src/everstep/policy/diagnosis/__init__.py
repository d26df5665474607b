"""Why a job does not move, from the traces of its ranks: one door, `diagnose`."""

from everstep.policy.diagnosis.deciding import diagnose

__all__ = ["diagnose"]
