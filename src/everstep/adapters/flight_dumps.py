"""Finds and loads flight recorder dumps of any torchrun job, and admits no code; knows nothing of what they mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.domain.recorder import Membership, RankTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDumps:
    """Attributes:
    traces: one for each rank whose dump could be read, by rank.
    memberships: the member lists that they name.
    problems: one sentence for each file that could not be used, or not fully.
    """

    traces: tuple[RankTrace, ...]
    memberships: tuple[Membership, ...]
    problems: tuple[str, ...] = ()


def load_dumps(paths: Sequence[Path]) -> LoadedDumps:
    """Load folders and files.

    Raises:
        ConfigError: a path does not exist, or there is no dump in any of them.
    """
    raise NotImplementedError
