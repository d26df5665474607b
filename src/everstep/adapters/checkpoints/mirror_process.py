"""The uploader of a run's mirror as a process; the process behind it is `everstep.worker.mirror.upload`.

Knows nothing of checkpoints or stores.
"""

from dataclasses import dataclass

import msgspec

from everstep.adapters.workers.piped_process import PipedProcess

ELSEWHERE = "elsewhere"
"""A file in the run's checkpoint folder that names the folder which the script chose instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOrder:
    """What the uploader is to do.

    Attributes:
        url: where the mirror is.
        directory: the run's checkpoint folder.
        keep: complete checkpoints that stay in the mirror.
        notes: a file for events, which the agent reads.
        clock_zero_ns: CLOCK_MONOTONIC at second 0 of the run's clock.
    """

    url: str
    directory: str
    keep: int
    notes: str
    clock_zero_ns: int


class MirrorProcess:
    """Keeps an uploader alive beside the workers."""

    def __init__(self, order: MirrorOrder) -> None:
        self.order = order
        self._process = PipedProcess("everstep.worker.mirror.upload", [msgspec.json.encode(order).decode()])

    @property
    def pid(self) -> int:
        return self._process.pid

    def ensure(self) -> None:
        """Start it, and again after it has died."""
        self._process.ensure()

    def release(self) -> None:
        """Let it bring the newest checkpoint and end, without waiting for it: another host takes over."""
        self._process.release()

    def close(self, *, within_s: float) -> bool:
        """Let it bring the newest checkpoint; False when that takes longer, and then it goes on by itself."""
        return self._process.finish(within_s=within_s, what=f"the newest step is not in {self.order.url}")
