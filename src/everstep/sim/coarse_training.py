"""The work of a simulated job in blocks: which are finished, which are saved, and when the next ones will end.

A simulated step is a block of useful work between two checkpoints, so that 54 days are some ten thousand steps and not
a million. Knows no hosts, faults or agents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CHECKPOINTS_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    saved_at_s: float


class CoarseTraining:
    """One job over all its attempts.

    Args:
        block_s: useful work in a block, at full speed.
        blocks: between two checkpoints.
        slowness: how much longer work takes when it is begun at a time; at least 1.
    """

    def __init__(self, *, block_s: float, blocks: int, slowness: Callable[[float], float]) -> None:
        self._block_s = block_s
        self._blocks = blocks
        self._slowness = slowness
        self._ends_s: list[float] = []
        self.step = 0
        self._checkpoints: list[Checkpoint] = []

    @property
    def newest(self) -> Checkpoint | None:
        """The checkpoint that a restart continues from."""
        return self._checkpoints[-1] if self._checkpoints else None

    def resume(self) -> None:
        self.step = self.newest.step if self.newest else 0
        self._ends_s.clear()

    def begin_segment(self, at_s: float, *, extra_s: float = 0.0) -> Sequence[float]:
        """Set off for the next checkpoint; gives when each block will end. `extra_s` lengthens the first one."""
        block_s = self._block_s * self._slowness(at_s)
        count = self._blocks - self.step % self._blocks
        begin_s = at_s + extra_s
        self._ends_s = [round(begin_s + block_s * (number + 1), 3) for number in range(count)]
        return tuple(self._ends_s)

    def take_finished(self, at_s: float) -> tuple[int, tuple[float, ...]]:
        """The blocks that have ended by now and were not taken yet: the first one's number, and their ends."""
        first = self.step + 1
        ended = [end_s for end_s in self._ends_s if end_s <= at_s]
        del self._ends_s[: len(ended)]
        self.step += len(ended)
        return first, tuple(ended)

    def halt(self) -> None:
        """What was under way is lost."""
        self._ends_s.clear()

    def save(self, at_s: float) -> Checkpoint:
        self._checkpoints.append(Checkpoint(step=self.step, saved_at_s=at_s))
        del self._checkpoints[:-_CHECKPOINTS_KEPT]
        return self._checkpoints[-1]

    def distrust(self, since_s: float) -> None:
        """Checkpoints saved since then hold corrupted numbers."""
        while len(self._checkpoints) > 1 and self._checkpoints[-1].saved_at_s > since_s:
            self._checkpoints.pop()
