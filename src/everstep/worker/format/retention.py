"""Which complete checkpoints of a folder go, and how; it needs no numpy, so that `everstep checkpoints` can prune."""

import shutil
from pathlib import Path

from everstep.worker.format import manifest as manifests


def remove_old(directory: Path, keep: int, aside: str) -> list[int]:
    """Remove all complete checkpoints but the newest; which ones that were.

    Args:
        keep: how many stay, at least 1.
        aside: what a folder's name begins with while it is removed: a half removed one must not look complete.

    Raises:
        OSError: the disk does not remove one. What is left of it is under its name aside.
    """
    assert keep >= 1
    old = manifests.complete_steps(directory)[keep:]
    for step in old:
        folder = directory / manifests.folder_name(step)
        hidden = directory / f"{aside}{folder.name}"
        if hidden.exists():  # whoever began to remove this step before, and was killed
            shutil.rmtree(hidden)
        shutil.rmtree(folder.rename(hidden))
    return old
