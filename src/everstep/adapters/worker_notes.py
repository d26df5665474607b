"""Reads the events that workers write down themselves: lines of a type name and a JSON body in one file per rank."""

from collections.abc import Iterable
from pathlib import Path

from everstep.domain.codec import decode_event
from everstep.domain.errors import EvidenceError
from everstep.domain.events import Event


class NoteReader:
    """Remembers how far it has read in each file."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}

    def new(self, paths: Iterable[Path]) -> list[Event]:
        """Whole lines that are new, file after file; a line that makes no sense is left out."""
        events: list[Event] = []
        for path in paths:
            try:
                size = path.stat().st_size
            except OSError:
                continue
            start = self._read.get(path, 0)
            if size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._read[path] = start + len(whole)
                events += _events(whole)
        return events

    def forget(self) -> None:
        self._read.clear()


def _events(text: bytes) -> list[Event]:
    events = []
    for line in text.splitlines():
        type_name, _, body = line.partition(b" ")
        try:
            events.append(decode_event(body, type_name=type_name.decode(errors="replace")))
        except EvidenceError:
            continue  # a user's process may scribble where it likes; the ledger takes only what is well formed
    return events
