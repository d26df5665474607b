"""A ledger in memory."""

from collections.abc import Sequence

from everstep.domain.codec import Entry
from everstep.domain.commands import Command
from everstep.domain.events import Event


class MemoryLedger:
    """The `Ledger` port without a disk.

    Args:
        entries: what an earlier one has left, to be opened again.
    """

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._opened = tuple(entries)
        self.entries: list[Entry] = list(entries)

    def read(self) -> Sequence[Entry]:
        return self._opened

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        for body in bodies:
            self.entries.append(Entry(number=len(self.entries) + 1, wall=wall, body=body))
