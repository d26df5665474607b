"""Everything that runs in the training process; the only package that imports torch, and not before it is needed."""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.worker.attachment import Run as Run
    from everstep.worker.attachment import attach as attach
    from everstep.worker.data.sampler import EpochSampler as EpochSampler
    from everstep.worker.data.seeded_dataset import SeededDataset as SeededDataset
    from everstep.worker.resume_promise import resuming as resuming

__all__ = ["EpochSampler", "Run", "SeededDataset", "attach", "phase", "resuming", "start_at", "step"]

# Their modules import torch, and the start of a worker is timed.
_LAZY = {
    "EpochSampler": "data.sampler",
    "Run": "attachment",
    "SeededDataset": "data.seeded_dataset",
    "attach": "attachment",
    "resuming": "resume_promise",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"everstep.worker.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def step() -> None:
    """Say that a step has ended, in a script with its own loop and no torch optimizer."""
    from everstep.worker.observer import current

    current().finish_step()


def start_at(step: int) -> None:
    """Say that a script with checkpoints of its own resumes after `step` steps, so that the next one is `step + 1`.

    Without it, the steps of every attempt count from 1 and are taken for replayed ones.

    Raises:
        ConfigError: a negative number.
    """
    from everstep.domain.errors import ConfigError
    from everstep.worker.observer import current

    if step < 0:
        raise ConfigError(f"start_at({step}): a script resumes after 0 or more steps")
    current().start_at(step)


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a part of the script that is no training: `with phase("evaluating"):` or `with phase("saving"):`.

    Raises:
        ConfigError: another name.
    """
    from everstep.domain.errors import ConfigError
    from everstep.domain.phases import Phase
    from everstep.worker.observer import current

    known = {"evaluating": Phase.EVALUATING, "saving": Phase.SAVING}
    if name not in known:
        raise ConfigError(f"phase({name!r}) is unknown; write phase('evaluating') or phase('saving')")
    return current().during(known[name])
