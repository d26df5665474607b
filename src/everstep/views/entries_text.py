"""What a flight recorder holds, one line for each operation, for eyes and for grep."""

from collections.abc import Collection, Iterator, Sequence

from everstep.domain.ids import Rank
from everstep.domain.recorder_dump import Entry
from everstep.policy.trace_summary import call_lines

_HEAD = ("rank", "record", "group", "number", "operation", "sizes", "dtypes", "state")
_WIDTHS = (7, 8, 18, 8, 26, 24, 10, 9)


def entries_header() -> str:
    """The names of the columns."""
    return _row(_HEAD)


def entry_lines(
    rank: Rank, entries: Sequence[Entry], *, groups: Collection[str] | None = None, stacks: bool = False
) -> Iterator[str]:
    """Lines of one rank, oldest first.

    Args:
        groups: only entries of groups with these names or descriptions; all when None.
        stacks: with the lines that each was called from, innermost first.
    """
    for entry in entries:
        name, description = entry.process_group
        if groups is not None and name not in groups and description not in groups:
            continue
        number = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
        sizes = entry.input_sizes or entry.output_sizes or ()
        dtypes = entry.input_dtypes or entry.output_dtypes or ()
        yield _row(
            (
                str(rank),
                str(entry.record_id),
                f"{name} ({description})" if description else name,
                str(number),
                entry.profiling_name,
                str(sizes),
                " ".join(dict.fromkeys(map(str, dtypes))),
                f"{entry.state or '?'}{' retired' if entry.retired else ''}",
            )
        )
        if stacks:
            yield from (f"          {line}" for line in call_lines(entry.frames))


def _row(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
