"""How ranks, signals and seconds are put into sentences, the same everywhere."""

from collections.abc import Iterable, Sequence

from everstep.domain.evidence import Frame

_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}
_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ", "/everstep/worker/script.py")

_RANGES_MAX = 8
_STRIDE_MIN = 4


def fold_ranks(ranks: Iterable[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5; `none` for nobody."""
    folded: list[list[int]] = []
    for rank in sorted(ranks):
        if folded and rank == folded[-1][1] + 1:
            folded[-1][1] = rank
        else:
            folded.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in folded) or "none"


def few_ranks(ranks: Iterable[int], ranges_max: int = _RANGES_MAX) -> str:
    """As `fold_ranks`, for sentences about thousands: `5-61 by 8` for every eighth, and no more than some ranges."""
    rest = sorted(ranks)
    count, place = len(rest), 0
    parts: list[str] = []
    while place < count:
        if len(parts) == ranges_max:
            return f"{', '.join(parts)} and others ({count} ranks)"
        end = place + 1
        step = rest[end] - rest[place] if end < count else 0
        while end < count and rest[end] - rest[end - 1] == step:
            end += 1
        if step > 1 and end - place < _STRIDE_MIN:
            end = place + 1
        first, last = rest[place], rest[end - 1]
        parts.append(str(first) if first == last else f"{first}-{last}{f' by {step}' if step > 1 else ''}")
        place = end
    return ", ".join(parts) or "none"


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`; of very many no more than some ranges."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {few_ranks(ranks)}"


def name_signal(number: int) -> str:
    return _SIGNALS.get(number, f"signal {number}")


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is the user's own rather than a library's; else the innermost."""
    own = (frame for frame in stack if not any(part in frame.file for part in _LIBRARY_PARTS))
    return next(own, stack[0] if stack else None)
