"""Reads flight recorder dumps whole, rank by rank, for those who want to see what was recorded; it judges nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from everstep.adapters.evidence.dump_files import find_dump_files
from everstep.adapters.evidence.flight_dumps import DUMP_BYTES_MAX, UNUSABLE, clause_of, rank_of, read_dump
from everstep.domain.ids import Rank
from everstep.domain.recorder_dump import Entry
from everstep.policy.trace_summary import MemberLists


def entries_of(
    paths: Sequence[Path], *, prefix: str = "", ranks: Sequence[int] | None = None
) -> Iterator[tuple[Rank, list[Entry]] | str]:
    """Each rank with its entries, oldest first, or a sentence about a file that could not be used.

    Args:
        prefix: as in `find_dump_files`.
        ranks: only these; all when None.

    Raises:
        ConfigError: a path does not exist, or there is no dump in any of them.
    """
    members = MemberLists()
    files = [file for file in find_dump_files(paths, prefix=prefix) if not file.is_snapshot]
    for file in sorted(files, key=lambda one: (one.rank is None, one.rank or 0, one.snapshot)):
        if ranks is not None and file.rank is not None and file.rank not in ranks:
            continue
        try:
            dump = read_dump(file.path, DUMP_BYTES_MAX)
            rank = rank_of(file, dump, members)
            entries = list(dump.entries)
        except UNUSABLE as error:
            yield f"{file.path.name} could not be used: {clause_of(error)}"
            continue
        if ranks is None or rank in ranks:
            yield rank, entries
