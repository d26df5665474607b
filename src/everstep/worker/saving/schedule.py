"""When the next checkpoint is due, in steps, so that ranks agree without a collective; rank 0 decides at each save."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from everstep.domain.errors import ConfigError
from everstep.planning.save_interval import save_interval_s, seen_mtbf_s
from everstep.worker.observer import Observer

FIRST_SAVE_STEPS = 10
"""Steps before the first save, when nothing has been measured: early, so that a job that dies young keeps something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """How `attach` saves and resumes.

    Attributes:
        every_steps: a fixed interval; None lets the measured times decide.
        every_s: the shortest interval in seconds when they do; the first one.
        within_s: the longest; `every_s` where that is longer.
        keep: how many complete checkpoints stay on disk.
        rehearse: whether the first step after a resume is run once for show (see docs/attach.md).
    """

    every_steps: int | None = None
    every_s: float = 30.0
    within_s: float = 600.0
    keep: int = 2
    rehearse: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"save_every_steps={self.every_steps} must be at least 1")
        if not self.every_s > 0:
            raise ConfigError(f"save_every_s={self.every_s} must be above 0")
        if not self.within_s > 0:
            raise ConfigError(f"save_within_s={self.within_s} must be above 0")
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} must be at least 1; 2 survives a damaged file")
        if self.rehearse not in (True, False, "auto"):
            raise ConfigError(f"rehearse={self.rehearse!r} must be True, False or 'auto'")


class Schedule:
    """Measures steps and knows the next save.

    Args:
        step: steps finished when the attempt begins.
        interval_steps: what the checkpoint resumed from says; None for a fresh run.
        mtbf_s: says the job's mean time between failures as it is known now.
    """

    def __init__(
        self, config: SaveConfig, *, step: int, interval_steps: int | None, mtbf_s: Callable[[], float]
    ) -> None:
        self._config = config
        self._mtbf_s = mtbf_s
        self.interval_steps = config.every_steps or interval_steps or FIRST_SAVE_STEPS
        self._next_step = self._after(step)
        self._since_s = 0.0
        self._steps_since = -1  # the first step compiles and allocates: it is not measured

    def due(self, step: int) -> bool:
        """Whether to save now that `step` has ended. Called once for each step."""
        if self._steps_since < 0:
            self._since_s = time.monotonic()
        self._steps_since += 1
        return step >= self._next_step

    def decide(self, stall_s: float) -> int:
        """The interval from now on, in steps, from what was measured since the last save. For rank 0."""
        if self._config.every_steps is not None:
            return self._config.every_steps
        if self._steps_since < 1:
            return self.interval_steps
        step_s = max((time.monotonic() - self._since_s - stall_s) / self._steps_since, 1e-6)
        return max(1, round(best_interval_s(self._config, stall_s, self._mtbf_s()) / step_s))

    def agree(self, step: int, interval_steps: int) -> None:
        """All ranks heard rank 0's decision, right after a save at `step`."""
        self.interval_steps = interval_steps
        self._next_step = self._after(step)
        self._since_s = time.monotonic()
        self._steps_since = 0

    def _after(self, step: int) -> int:
        if self._config.every_steps is not None:
            return (step // self.interval_steps + 1) * self.interval_steps
        return step + self.interval_steps


def best_interval_s(config: SaveConfig, pause_s: float, mtbf_s: float) -> float:
    """Seconds between two saves that cost training `pause_s` each, within the settings."""
    return save_interval_s(pause_s=pause_s, mtbf_s=mtbf_s, shortest_s=config.every_s, longest_s=config.within_s)


def job_mtbf_s(observer: Observer, world_size: int) -> float:
    """The job's mean time between failures, from its attempts and its time under `everstep run` so far."""
    host_count = max(1.0, world_size / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)))
    paths = observer.paths
    if paths is None:
        return seen_mtbf_s(interruption_count=0, elapsed_s=0.0, host_count=host_count)
    elapsed_s = observer.notes.now_s()
    return seen_mtbf_s(interruption_count=paths.attempt - 1, elapsed_s=elapsed_s, host_count=host_count)
