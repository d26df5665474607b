"""From paths to a verdict: loads, decides, and says what was missing; the Python face `everstep.diagnose` is this."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from everstep.adapters.flight_dumps import DUMP_BYTES_MAX, load_dumps
from everstep.adapters.safe_pickle import without_collections
from everstep.domain.diagnosis import HangVerdict
from everstep.domain.ids import Rank
from everstep.policy.diagnosis import diagnose as decide
from everstep.policy.group_creation import judge_creation, without_creations

_PROBLEMS_MAX = 20


def diagnose(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    world_size: int | None = None,
    dump_bytes_max: int = DUMP_BYTES_MAX,
) -> HangVerdict:
    """Say why a job does not move, from PyTorch flight recorder dumps or the evidence that everstep kept.

    Args:
        paths: a folder or file, or several: dumps of any torchrun job, pickle or JSON, of format 2.1 to 2.10 and any
            file prefix; or a run directory of `everstep run`.
        world_size: how many ranks the job has, where the dumps don't say.
        dump_bytes_max: larger files are not read, and reported.

    Returns:
        The verdict. `ranks` holds the ranks at fault, and never one that waits for others; files that could not be
        used are in `missing`. Torch is not needed, and nothing in a dump is executed.

    Raises:
        ConfigError: a path does not exist or holds no dump.

    Example:
        >>> verdict = everstep.diagnose("/tmp/nccl_dumps")          # doctest: +SKIP
        >>> verdict.trouble, verdict.ranks                          # doctest: +SKIP
        (<Trouble.NEVER_ENTERED: 'never_entered'>, (275,))
    """
    given: Sequence[str | PathLike[str]] = [paths] if isinstance(paths, str | PathLike) else list(paths)
    loaded = load_dumps([Path(path) for path in given], dump_bytes_max=dump_bytes_max)
    with without_collections():
        verdict = judge_creation(loaded.traces) or decide(
            [replace(trace, groups=without_creations(trace)) for trace in loaded.traces],
            loaded.memberships,
            expected_ranks=[Rank(rank) for rank in range(world_size or 0)],
            moved=loaded.moved,
        )
    problems = loaded.problems[:_PROBLEMS_MAX]
    if len(loaded.problems) > _PROBLEMS_MAX:
        problems += (f"{len(loaded.problems) - _PROBLEMS_MAX} more files could not be used",)
    return replace(verdict, missing=(*verdict.missing, *problems))
