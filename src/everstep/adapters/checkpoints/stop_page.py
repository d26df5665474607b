"""A page of shared memory on which ranks agree after which step they stop: who was asked, how far each is, which step.

Every word has one writer, so nobody waits for anybody. Beside it, the agent's mark that an attempt is broken.
"""

from collections.abc import Sequence
from pathlib import Path

from everstep.adapters.checkpoints.shared_pages import map_page

_WORD_BYTES = 8
_BROKEN = "broken"


class StopPage:
    """The page of one attempt.

    Args:
        folder: the run's folder in shared memory.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path, *, attempt: int, world_size: int) -> None:
        self._world_size = world_size
        size = _WORD_BYTES * (1 + 2 * world_size)
        self._words = memoryview(map_page(folder / f"stop-{attempt:04d}", size)).cast("Q")

    def note_step(self, rank: int, step: int) -> None:
        """This rank has ended a step."""
        self._words[1 + rank] = step

    def ask(self, rank: int) -> None:
        """This rank was told to stop."""
        self._words[1 + self._world_size + rank] = 1

    def is_asked(self, rank: int) -> bool:
        return bool(self._words[1 + self._world_size + rank])

    def anyone_asked(self) -> bool:
        return any(self._words[1 + self._world_size :])

    def steps(self) -> Sequence[int]:
        """The last step that each rank has ended in this attempt; 0 before the first."""
        return list(self._words[1 : 1 + self._world_size])

    def announce(self, step: int) -> None:
        """Rank 0's word: all save after this step."""
        self._words[0] = step

    def announced(self) -> int:
        """0 while nothing is announced."""
        return self._words[0]


def mark_broken(folder: Path) -> None:
    """Nobody of the attempt whose pages lie in `folder` will end another step, so there is nothing to wait for."""
    (folder / _BROKEN).touch()


def is_broken(folder: Path) -> bool:
    return (folder / _BROKEN).exists()
