"""What the leading saver of several hosts tells the others and all ranks: which step is written, and which is kept.

A page of shared memory in every host's folder; the replicators bring it from the leader's host to the others.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from everstep.adapters.checkpoints.shared_pages import map_page, read_twice, write_twice

_NAME = "saver.leader"
_WORD = struct.Struct("<QQQQQQB32s")
_PAGE = 4096


class Stage(IntEnum):
    """Where the leader is in its life."""

    WORKING = 0
    LAST = 1
    """The job is over, and its newest step is being made durable."""
    DONE = 2
    """Nothing more will come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderWord:
    """What the leader last said.

    Attributes:
        serial: another one for each try to write a step.
        step: that all write now, 0 for none; with the attempt and the layout of its slots.
        keep_from: the first step from here on that all ranks have stays until it is written; 0 for none.
        durable: the newest step that is complete on disk.
        order: attempt of the order that the leader follows.
    """

    serial: int = 0
    step: int = 0
    attempt: int = 0
    layout: str = ""
    keep_from: int = 0
    durable: int = 0
    order: int = 0
    stage: Stage = Stage.WORKING

    def pack(self) -> bytes:
        """Raises struct.error where a number does not fit."""
        return _WORD.pack(
            self.serial,
            self.step,
            self.attempt,
            self.keep_from,
            self.durable,
            self.order,
            self.stage,
            self.layout.encode(),
        )


class LeaderPage:
    """The page in one host's folder. Its writer is the leading saver, or the replicator of another host.

    When the lead moves there may be both for a while; an old leader leaves the word of a newer order alone (`amend`).

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path) -> None:
        self._memory = map_page(folder / _NAME, _PAGE)

    def read(self) -> LeaderWord:
        """Costs some microseconds."""
        return _unpacked(*read_twice(self._memory, _WORD)[1])

    def write(self, word: LeaderWord) -> None:
        write_twice(self._memory, word.pack())

    def amend(self, word: LeaderWord) -> None:
        """Write, except over the word of a newer order."""
        if self.read().order <= word.order:
            self.write(word)


def _unpacked(*fields: Any) -> LeaderWord:
    serial, step, attempt, keep_from, durable, order, stage, layout = fields
    return LeaderWord(
        serial=serial,
        step=step,
        attempt=attempt,
        layout=layout.rstrip(b"\0").decode(errors="replace"),
        keep_from=keep_from,
        durable=durable,
        order=order,
        stage=Stage(stage),
    )
