"""What must be said about each case: the class, the culprits, and for what reason something else would be right too."""

from collections.abc import Callable
from dataclasses import dataclass

Ranks = frozenset[int]


def _everyone(case: "Case") -> tuple[int, ...]:
    return tuple(range(case.world))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attributes:
    name: the function in `job.py`.
    troubles: the classes that are right; none for a job in which nobody may be blamed.
    victims: ranks that may play the victim; the seed chooses.
    culprits: who is to be named when `victim` plays it.
    world: number of ranks.
    """

    name: str
    troubles: tuple[str, ...]
    victims: tuple[int, ...] = (0, 1, 2, 3)
    culprits: Callable[[int], Ranks] = lambda victim: frozenset((victim,))
    world: int = 4

    def victim(self, seed: int) -> int:
        return self.victims[(seed + len(self.name)) % len(self.victims)]


def _pair(_: int) -> Ranks:
    return frozenset((0, 1))


def _nobody(_: int) -> Ranks:
    return frozenset()


NEVER, FROZEN = ("never_entered",), ("frozen",)
MISMATCH, DEADLOCK = ("mismatch",), ("order_deadlock",)

CASES = (
    # One step fewer, then another reduction. gloo ends the job at that moment, and up to there the record is the one of
    # `extra`: a collective from a line that no rank has called before. What comes after it nobody can know yet, and a
    # person on call needs the rank and that line. A plain mismatch would be too little.
    Case(name="uneven", troubles=("loop_bound", "extra_collective")),
    Case(name="early_exit", troubles=("loop_bound",)),
    Case(name="nan_raise", troubles=("script_error",)),
    Case(name="oom_kill", troubles=("dead",)),
    Case(name="sigstop", troubles=FROZEN),
    Case(name="slow_ckpt", troubles=NEVER),
    Case(name="loader", troubles=NEVER),
    Case(name="gil", troubles=FROZEN),
    Case(name="nested", troubles=NEVER),
    Case(name="order", troubles=MISMATCH),
    Case(name="shape", troubles=MISMATCH),
    Case(name="dtype", troubles=MISMATCH),
    Case(name="extra", troubles=("extra_collective", "mismatch")),  # at the place where it is one ahead, shapes differ
    Case(name="silent_shift", troubles=("loop_bound", "mismatch")),  # it ends one reduction early
    Case(name="cross_pg", troubles=DEADLOCK, culprits=_pair),
    Case(name="new_group", troubles=("group_creation",)),
    Case(name="p2p_order", troubles=DEADLOCK, culprits=_pair),
    Case(name="p2p_missing", troubles=NEVER, victims=(0,)),
    # our own
    Case(name="mesh_2d", troubles=NEVER, victims=tuple(range(8)), world=8),
    Case(name="mesh_3d", troubles=NEVER, victims=tuple(range(8)), world=8),
    Case(name="pipeline", troubles=NEVER),
    Case(name="pipeline_frozen", troubles=FROZEN),
    Case(name="batched", troubles=NEVER),
    Case(name="p2p_cycle", troubles=DEADLOCK, culprits=_nobody),  # all run the same program: no rank is at fault
    Case(name="torch_save", troubles=NEVER),
    Case(name="compiling", troubles=NEVER),
    Case(name="data_loader", troubles=NEVER),
    Case(name="data_loader_worker", troubles=NEVER),
    Case(name="side_group", troubles=NEVER),
    Case(name="side_mismatch", troubles=MISMATCH, victims=(0, 1, 2)),
    Case(name="wrong_root", troubles=MISMATCH),
    Case(name="spin", troubles=NEVER),
    Case(name="lock", troubles=NEVER),
    Case(name="metric_group", troubles=("loop_bound",)),
    Case(name="sharded", troubles=NEVER),
    Case(name="skipped_group", troubles=("group_creation",)),
    Case(name="late_group", troubles=NEVER),
    # The one rank that waits and is named all the same: its count of messages is odd among ranks that all count alike,
    # and the neighbour it waits for has received as many as everybody. Its line is the one to correct.
    Case(name="unread_message", troubles=MISMATCH),
    Case(name="unsent_message", troubles=MISMATCH),
)

HEALTHY = tuple(
    Case(name=name, troubles=(), culprits=_nobody)
    for name in (
        "slow",
        "one_long_step",
        "ever_slower",
        "checkpoint_pause",
        "evaluation",
        "evaluate_alone",
        "slow_pipeline",
        "healthy_mesh",
        "healthy_ring",
        "late_end",
    )
)
"""`slow` is the reference's nineteenth case."""

BY_NAME = {case.name: case for case in (*CASES, *HEALTHY)}
