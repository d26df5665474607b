"""Reads what the workers of a host write themselves: progress pages, and notes, which are events in a file per rank.

A line of notes is a type name and a JSON body.
"""

from collections.abc import Sequence
from pathlib import Path

from everstep.adapters.workers.roster import Roster
from everstep.domain.codec import decode_event
from everstep.domain.errors import EvidenceError
from everstep.domain.events import Event
from everstep.domain.progress import PageView

_ALLOWED = {
    b"WorkerReady",
    *(b"CheckpointSaved", b"CheckpointRestored", b"CheckpointRefused", b"CheckpointFailed", b"CheckpointDelayed"),
    b"CheckpointMirrored",
}
"""What a worker may say: a user's process must not be able to end the job or rewrite its beginning."""


class RosterPages:
    """The `Pages` port over the workers of a roster, and the notes of the mirror's uploader where there is one."""

    def __init__(self, roster: Roster, mirror_notes: Path | None = None) -> None:
        self._roster = roster
        self._mirror_notes = mirror_notes
        self._read: dict[Path, int] = {}

    def views(self) -> Sequence[PageView]:
        return [worker.page.view() for worker in self._roster.workers.values()]

    def notes(self) -> Sequence[Event]:
        """Whole lines that are new, rank after rank; a line that makes no sense is left out."""
        paths = [worker.notes for worker in self._roster.workers.values()]
        if self._mirror_notes is not None:
            paths.append(self._mirror_notes)
        self._read = {path: self._read.get(path, 0) for path in paths}  # an old attempt's files are gone
        return [event for path in paths for event in self._new(path)]

    def _new(self, path: Path) -> list[Event]:
        start = self._read[path]
        try:
            if path.stat().st_size <= start:
                return []
            with path.open("rb") as file:
                file.seek(start)
                text = file.read()
        except OSError:
            return []  # nothing written yet
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = start + len(whole)
        return _events(whole)


def _events(text: bytes) -> list[Event]:
    events = []
    for line in text.splitlines():
        type_name, _, body = line.partition(b" ")
        try:
            if type_name in _ALLOWED:
                events.append(decode_event(body, type_name=type_name.decode()))
        except EvidenceError:
            continue  # a user's process may scribble where it likes; the ledger takes only what is well formed
    return events
