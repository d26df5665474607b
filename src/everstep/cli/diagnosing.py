"""From paths to a verdict: loads, decides, and says what was missing; the Python face `everstep.diagnose` is this."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from everstep.adapters.evidence.dump_files import evidence_of
from everstep.adapters.evidence.flight_dumps import DUMP_BYTES_MAX, load_dumps
from everstep.adapters.evidence.safe_pickle import without_collections
from everstep.adapters.ledger_file import LEDGER_NAME, read_entries
from everstep.domain.commands import RecordVerdict
from everstep.domain.diagnosis import Explanation, HangVerdict
from everstep.domain.errors import EverstepError
from everstep.domain.ids import Rank
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.diagnosis import diagnose as decide
from everstep.policy.group_creation import judge_creation, without_creations

_PROBLEMS_MAX = 20


def diagnose(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    world_size: int | None = None,
    prefix: str = "",
    dump_bytes_max: int = DUMP_BYTES_MAX,
) -> HangVerdict:
    """Say why a job does not move, from PyTorch flight recorder dumps or the evidence that everstep kept.

    Args:
        paths: a folder or file, or several: dumps of any torchrun job, pickle or JSON, of format 2.1 to 2.10 and any
            file prefix; or a run directory of `everstep run`.
        world_size: how many ranks the job has, where the dumps don't say.
        prefix: only files with this in their names, as torchfrtrace's `--prefix`; all when empty.
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
    loaded = load_dumps([Path(path) for path in given], prefix=prefix, dump_bytes_max=dump_bytes_max)
    with without_collections():
        verdict = judge_creation(loaded.traces) or decide(
            [replace(trace, groups=without_creations(trace)) for trace in loaded.traces],
            loaded.memberships,
            expected_ranks=[Rank(rank) for rank in range(world_size or 0)],
            moved=loaded.moved,
        )
    if (said := _said_by_the_run(given)) is not None:
        verdict = _as_the_run_said(verdict, said)
    problems = loaded.problems[:_PROBLEMS_MAX]
    if len(loaded.problems) > _PROBLEMS_MAX:
        problems += (f"{len(loaded.problems) - _PROBLEMS_MAX} more files could not be used",)
    return replace(verdict, missing=(*verdict.missing, *problems))


def _said_by_the_run(given: Sequence[str | PathLike[str]]) -> Verdict | None:
    """What the run itself has said of this incident: it knew how each process ended, and who only lost a peer."""
    if len(given) != 1 or not (ledger := Path(given[0]) / LEDGER_NAME).is_file():
        return None
    incident = evidence_of(Path(given[0])).name
    try:
        bodies = [entry.body for entry in read_entries(ledger)]
    except (EverstepError, OSError):
        return None  # the evidence speaks for itself
    said = [body.verdict for body in bodies if isinstance(body, RecordVerdict) and body.incident == incident]
    return said[-1] if said and said[-1].trouble is not Trouble.UNKNOWN else None


def _as_the_run_said(verdict: HangVerdict, said: Verdict) -> HangVerdict:
    """The picture of the waits with the run's own verdict; what operations alone would say becomes an alternative."""
    if (said.trouble, said.ranks) == (verdict.trouble, verdict.ranks):
        return verdict
    other = Explanation(
        trouble=verdict.trouble,
        suspects=verdict.ranks or verdict.suspects,
        reason=f"Without knowing how the processes ended: {verdict.reason}",
        evidence=verdict.evidence,
    )
    return replace(
        verdict,
        trouble=said.trouble,
        ranks=said.ranks,
        hosts=said.hosts,
        suspects=(),
        reason=f"{said.reason[:1].upper()}{said.reason[1:]}",
        evidence=said.evidence,
        alternatives=(other, *verdict.alternatives),
        stack=(said.where,) if said.where else (),
    )
