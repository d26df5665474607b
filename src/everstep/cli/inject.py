"""The text of `--inject`: which fault, on which rank, when."""

import re

from everstep.domain.causes import FaultKind
from everstep.domain.errors import ConfigError
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Rank

_FORM = re.compile(r"(?P<kind>[a-z]+):rank=(?P<rank>\d+),(?:step=(?P<step>\d+)|after=(?P<after>\d+(?:\.\d+)?)s?)")


def parse_fault(text: str, *, number: int, world_size: int) -> PlannedFault:
    """One `--inject`, such as `kill:rank=1,step=40` or `freeze:rank=2,after=30s`.

    Raises:
        ConfigError: another form, an unknown kind, or a rank that does not exist.
    """
    kinds = ", ".join(FaultKind)
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in set(FaultKind):
        raise ConfigError(
            f"--inject {text!r} is not understood; write KIND:rank=R,step=S or KIND:rank=R,after=30s, "
            f"where KIND is one of {kinds}"
        )
    rank = int(match["rank"])
    if rank >= world_size:
        raise ConfigError(f"--inject {text!r}: there is no rank {rank}; the last one is {world_size - 1}")
    return PlannedFault(
        number=number,
        kind=FaultKind(match["kind"]),
        rank=Rank(rank),
        step=int(match["step"]) if match["step"] else None,
        after_s=float(match["after"]) if match["after"] else None,
    )
