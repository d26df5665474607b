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


def fold_ranks(ranks: Iterable[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5; `none` for nobody."""
    folded: list[list[int]] = []
    for rank in sorted(ranks):
        if folded and rank == folded[-1][1] + 1:
            folded[-1][1] = rank
        else:
            folded.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in folded) or "none"


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold_ranks(ranks)}"


def name_signal(number: int) -> str:
    return _SIGNALS.get(number, f"signal {number}")


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is the user's own rather than a library's; else the innermost."""
    own = (frame for frame in stack if not any(part in frame.file for part in _LIBRARY_PARTS))
    return next(own, stack[0] if stack else None)
