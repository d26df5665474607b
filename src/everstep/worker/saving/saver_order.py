"""What rank 0 tells the saver of its host, in a file that the saver looks at."""

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.memory_slots import JOB_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOrder:
    """The saver's task.

    Attributes:
        directory: where checkpoints go.
        every_steps, every_s, keep: as in `SaveConfig`.
    """

    directory: str
    world_size: int
    every_steps: int | None
    every_s: float
    keep: int
    attempt: int


def order_saver(folder: Path, order: SaverOrder) -> None:
    """Write the order; the saver reads it again when it has changed.

    Args:
        folder: the run's folder in shared memory.
    """
    fresh = folder / f"{JOB_NAME}.new"
    fresh.write_bytes(msgspec.json.encode(asdict(order)))
    fresh.rename(folder / JOB_NAME)
