"""What a rank says that it is doing, and the order in which one rank's phase speaks for a whole host."""

from enum import IntEnum


class Phase(IntEnum):
    """The phase on a progress page. The numbers are the page's format: never renumber, only add."""

    UNOBSERVED = 0
    """No observer: `--no-python`, or not there yet."""
    STARTING = 1
    """From the process's start to the first step or restore: imports, process group, model."""
    RESTORING = 2
    WARMING_UP = 3
    """The first step of an attempt, with what it compiles and allocates."""
    TRAINING = 4
    SAVING = 5
    EVALUATING = 6
    ENDING = 7
    """The script has returned; the process is on its way out."""


_SPEAKS_FIRST = (
    Phase.SAVING,
    Phase.EVALUATING,
    Phase.RESTORING,
    Phase.STARTING,
    Phase.WARMING_UP,
    Phase.TRAINING,
    Phase.ENDING,
    Phase.UNOBSERVED,
)


def phase_of_group(phases: list[Phase]) -> Phase:
    """The one phase that explains a group of ranks: a rank that saves explains why the others wait.

    Args:
        phases: the phase of each rank; an empty list gives UNOBSERVED.
    """
    present = set(phases)
    return next((phase for phase in _SPEAKS_FIRST if phase in present), Phase.UNOBSERVED)
