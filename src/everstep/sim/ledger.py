"""A ledger in memory."""

from collections.abc import Sequence

from everstep.domain.codec import Entry
from everstep.domain.commands import Command
from everstep.domain.events import Event


class MemoryLedger:
    """The `Ledger` port without a disk."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def read(self) -> Sequence[Entry]:
        return tuple(self.entries)

    def append(self, bodies: Sequence[Event | Command], *, wall: str, durable: bool) -> None:
        for body in bodies:
            self.entries.append(Entry(number=len(self.entries) + 1, wall=wall, body=body))
