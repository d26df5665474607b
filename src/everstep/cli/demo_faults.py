"""Which faults the demo injects, and when: drawn from Llama 3's counts by a seed, or the kinds that were asked for.

Faults are due at steps rather than at seconds: a slower or faster machine then meets every one of them, in the same
order and at the same step, and each comes after progress that no attempt had made before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random

from everstep.domain.causes import LLAMA3, Cause, FaultKind
from everstep.domain.errors import ConfigError
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Rank

TRAINING_S_PER_FAULT = 7.5
"""About twice what a fault costs on two cores with the steps done again, so that most of the time is still training."""
FIRST_STEP = 25
"""A hang is found by a deadline that is learned from the first 20 steps."""
GAP_STEPS_MIN = 15
LAST_SHARE = 0.85
"""No fault comes later than at this share of the steps, so that the last recovery ends well before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultChoice:
    """What `--faults` says.

    Attributes:
        llama3: draw from Llama 3's table.
        kinds: else these, in turn; none at all when empty.
    """

    llama3: bool = False
    kinds: tuple[FaultKind, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "FaultChoice":
        """From `none`, `llama3`, or kinds with commas between them.

        Raises:
            ConfigError: an unknown kind.
        """
        if text in ("none", "llama3"):
            return cls(llama3=text == "llama3")
        known = set(FaultKind)
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if word not in known]:
            raise ConfigError(
                f"--faults {text!r}: there is no fault {unknown[0]!r}; write none, llama3, "
                f"or one or more of {', '.join(FaultKind)} with commas between them"
            )
        return cls(kinds=tuple(FaultKind(word) for word in words))

    def count(self, training_s: float) -> int:
        """How many faults belong into so much training; every kind that was asked for comes at least once."""
        if not (self.llama3 or self.kinds):
            return 0
        return max(1, len(self.kinds), round(training_s / TRAINING_S_PER_FAULT))


def steps_needed(fault_count: int) -> int:
    """The fewest steps in which so many faults have room."""
    return 1 + int((FIRST_STEP + GAP_STEPS_MIN * fault_count) / LAST_SHARE)


def plan_faults(
    choice: FaultChoice, *, seed: int, fault_count: int, step_count: int, worker_count: int
) -> tuple[PlannedFault, ...]:
    """The faults of a run, each in its own stretch of steps at a place, and on a rank, that the seed decides."""
    assert step_count >= steps_needed(fault_count)
    rng = Random(seed)
    stretch_steps = (LAST_SHARE * step_count - FIRST_STEP) / max(1, fault_count)
    plan = []
    for number, (kind, cause) in zip(range(1, fault_count + 1), _kinds(choice, rng), strict=False):
        into_steps = rng.random() * (stretch_steps - GAP_STEPS_MIN)
        plan.append(
            PlannedFault(
                number=number,
                kind=kind,
                rank=Rank(rng.randrange(worker_count)),
                step=int(FIRST_STEP + stretch_steps * (number - 1) + into_steps),
                cause=cause,
            )
        )
    return tuple(plan)


def _kinds(choice: FaultChoice, rng: Random) -> Iterator[tuple[FaultKind, Cause | None]]:
    if not choice.llama3:
        yield from ((kind, None) for kind in cycle(choice.kinds))
    counts = [row.count for row in LLAMA3]
    while choice.llama3:
        (row,) = rng.choices(LLAMA3, weights=counts)
        yield row.fault, row.cause
