"""How `everstep checkpoints list` shows a checkpoint, wherever it lies: a line for each."""

from everstep.domain.errors import EverstepError
from everstep.worker.format.manifest import Manifest

HEAD = f"{'step':>10}  {'size':>9}  {'ranks':>5}  {'written':16}  state"


def row(step: int, written: str, found: Manifest | EverstepError | str) -> str:
    """One line.

    Args:
        written: when, or where to.
        found: its manifest, or why it is not complete.
    """
    if not isinstance(found, Manifest):
        return f"{step:>10}  {'':>9}  {'':>5}  {written:16}  {found}"
    state = f"complete; {'; '.join(found.inexact_because) or 'resumes exactly'}"
    return f"{step:>10}  {_size(found.size_bytes):>9}  {found.world_size:>5}  {written:16}  {state}"


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"
