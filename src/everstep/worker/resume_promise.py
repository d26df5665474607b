"""Tells a script, before it builds its model, that `attach` will overwrite all of it, so that nothing is made in vain.

Who was told so must not train on when nothing could be restored after all: the model may hold no numbers yet.
"""

import logging
import os
from pathlib import Path

from everstep.adapters.checkpoints.memory_slots import RankSlots, ranks_present
from everstep.domain.errors import ConfigError, WorldError
from everstep.policy.checkpoints import committed_steps
from everstep.worker.format import manifest as manifests
from everstep.worker.observer import Observer, current
from everstep.worker.ranks import Ranks
from everstep.worker.saving.storage_watch import Answer

_log = logging.getLogger(__name__)
_DEFAULT_DIRECTORY = "everstep-checkpoints"
_DISK_WITHIN_S = 5.0
_promised = False


def checkpoint_directory(given: str | Path | None, observer: Observer) -> Path:
    """Where checkpoints lie: as the script says, as `everstep run` says, else in the current folder."""
    ordered = observer.paths.checkpoints if observer.paths else ""
    return Path(given or ordered or _DEFAULT_DIRECTORY).absolute()


def resuming(directory: str | Path | None = None) -> bool:
    """Whether `attach` will restore a checkpoint, so that parameters, buffers and DDP's first broadcast are needless.

    A collective, after `init_process_group`: every rank gets the same answer. When it is True and then nothing can be
    restored, `attach` raises; the next attempt gets False.

    Args:
        directory: as for `attach`.

    Raises:
        ConfigError: there are other ranks, and no process group to reach them.
    """
    global _promised  # noqa: PLW0603 - one run per process is the point
    observer, ranks = current(), Ranks()
    found = ranks.leads and _is_there(checkpoint_directory(directory, observer), observer, ranks.world_size)
    _promised = ranks.broadcast(b"yes" if found else b"no") == b"yes"
    return _promised


def keep_promise(*, restored: bool) -> None:
    """Called by `attach` when it has looked.

    Raises:
        ConfigError: the script was told that there is something to resume from.
    """
    if _promised and not restored:
        raise ConfigError(
            "everstep.worker.resuming() was True and then no checkpoint could be restored (the log says why), so the "
            "model may be without numbers; what was damaged is set aside, and a new start begins from the beginning"
        )


def _is_there(directory: Path, observer: Observer, world_size: int) -> bool:
    given = observer.paths.memory if observer.paths else ""
    if given and os.path.isdir(given) and _in_memory(Path(given), world_size):  # noqa: PTH112
        return True
    listing = Answer(lambda: manifests.complete_steps(directory), name="resuming")
    if not listing.is_there(_DISK_WITHIN_S):
        return False  # which costs time and nothing else
    try:
        return bool(listing.get())
    except OSError:
        return False


def _in_memory(folder: Path, world_size: int) -> bool:
    ranks = ranks_present(folder)
    if list(ranks) != list(range(world_size)):
        return False
    try:
        return bool(committed_steps([RankSlots(folder, rank).slots() for rank in ranks]))
    except (WorldError, OSError):
        return False
