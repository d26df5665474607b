"""When a silence becomes suspicious: one deadline per phase, learned from this run's own steps.

A suspicion kills nobody: it only asks for evidence. The deadline for training is a multiple of the slowest ordinary
step of late and never shorter than a stated floor; phases that are long by nature have allowances of their own.
"""

from collections import deque
from dataclasses import dataclass

from everstep.domain.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StallConfig:
    """Deadlines in seconds.

    Attributes:
        floor_s: no silence in training shorter than this is ever suspicious.
        factor: a training silence is suspicious at this multiple of the slow end of recent steps.
        learn_from: steps to have seen before the training deadline is trusted.
        window: how many recent steps it is learned from.
        unlearned_s: allowance for start-up, restoring, the first step, and each special phase not seen yet. Half of the
            shortest usual collective timeout (NCCL: 600 s), so that evidence is taken before that fires.
        special_floor_s, special_factor: allowance for a special phase once it has been seen: this multiple of the
            longest, and no less than the floor.
    """

    floor_s: float = 1.5
    factor: float = 4.0
    learn_from: int = 20
    window: int = 200
    unlearned_s: float = 300.0
    special_floor_s: float = 60.0
    special_factor: float = 5.0

    def __post_init__(self) -> None:
        assert self.floor_s > 0
        assert self.factor > 1
        assert 1 < self.learn_from <= self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """An allowance and the sentence that says where it comes from."""

    allowed_s: float
    learned_from: str


class StallWatch:
    """Learns durations over all attempts of a run on one host, and tells the deadline of a phase."""

    def __init__(self, config: StallConfig) -> None:
        self._config = config
        self._steps: deque[float] = deque(maxlen=config.window)
        self._longest: dict[Phase, float] = {}
        self._last_step_at_s: float | None = None
        self._phase = Phase.UNOBSERVED
        self._phase_since_s = 0.0
        self._patience = 1.0

    def begin_attempt(self, at_s: float) -> None:
        self._last_step_at_s = None
        self._patience = 1.0
        self._phase = Phase.STARTING
        self._phase_since_s = at_s

    def finish_step(self, at_s: float) -> None:
        """A step has ended. The first of an attempt teaches nothing, nor does one with a special phase in it.

        Nor do steps told together, with one time for all: a rank that never steps held them back (`host_progress`).
        """
        if self._last_step_at_s is not None and at_s > self._last_step_at_s:
            self._steps.append(at_s - self._last_step_at_s)
        self._last_step_at_s = at_s
        self._patience = 1.0

    def enter(self, phase: Phase, at_s: float) -> None:
        if phase is not self._phase:  # the mark that an attempt starts with ends no phase
            spent_s = at_s - self._phase_since_s
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), spent_s)
            self._phase, self._phase_since_s = phase, at_s
        self._last_step_at_s = None if phase is not Phase.TRAINING else self._last_step_at_s
        self._patience = 1.0

    def be_patient(self, factor: float) -> None:
        """Stretch the deadline of the present silence: it was looked into, and is not (yet) a hang."""
        self._patience *= factor

    def deadline(self) -> Deadline:
        """The allowance for silence in the present phase."""
        found = self._training() if self._phase is Phase.TRAINING else self._special()
        return Deadline(allowed_s=found.allowed_s * self._patience, learned_from=found.learned_from)

    def _training(self) -> Deadline:
        config = self._config
        if len(self._steps) < config.learn_from:
            return Deadline(
                allowed_s=config.unlearned_s, learned_from=f"only {len(self._steps)} of {config.learn_from} steps seen"
            )
        # the longest one in a hundred is left out: an unannounced checkpoint must not blind us for the next 200 steps
        slow_s = sorted(self._steps)[-1 - max(1, len(self._steps) // 100)]
        if slow_s * config.factor <= config.floor_s:
            return Deadline(allowed_s=config.floor_s, learned_from=f"the floor; steps take up to {slow_s:.3f} s")
        return Deadline(
            allowed_s=slow_s * config.factor,
            learned_from=f"{config.factor:g} times {slow_s:.3f} s, the slow end of the last {len(self._steps)} steps",
        )

    def _special(self) -> Deadline:
        config = self._config
        longest_s = self._longest.get(self._phase)
        name = self._phase.name.lower()
        if longest_s is None or self._phase in (Phase.UNOBSERVED, Phase.ENDING):
            return Deadline(allowed_s=config.unlearned_s, learned_from=f"the allowance for {name}")
        allowed_s = max(config.special_floor_s, config.special_factor * longest_s)
        return Deadline(allowed_s=allowed_s, learned_from=f"the longest {name} so far took {longest_s:.1f} s")
