"""What hosts say to each other over a line: entries of the ledger's own form, and a few words of the line itself.

A frame begins with a letter: E for an entry, C for one of the words below as JSON; an empty one is a heartbeat. Nothing
in a frame is executed.
"""

import msgspec

from everstep.domain.codec import Entry, decode_entry, encode_entry
from everstep.domain.commands import Command
from everstep.domain.errors import EvidenceError
from everstep.domain.events import Event

HEARTBEAT = b""
_ENTRY, _WORD = b"E", b"C"


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Who wants to join, and what was typed there.

    Attributes:
        instance: another one for each start of `everstep run`.
        nnodes, program, rdzv_id, everstep: must be the same on all hosts.
        node_rank: another one on each; None where none was given.
    """

    host: str
    instance: str
    everstep: str
    nnodes: str
    program: tuple[str, ...]
    rdzv_id: str
    node_rank: int | None = None


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`run` is the run's id."""

    run: str


class Refusal(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Why not. Unless `final`, asking again may help."""

    reason: str
    final: bool


class Ping(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What time is it?"""


class Pong(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Seconds on the coordinator's clock."""

    now_s: float


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Joining is over; from here on the line belongs to both ends alike."""


class Posted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A value for the board: on its way there, or on its way to all."""

    key: str
    value: bytes


Word = Hello | Welcome | Refusal | Ping | Pong | Ready | Posted
_decode_word = msgspec.json.Decoder(Word).decode


def frame_of(message: Event | Command | Word) -> bytes:
    if isinstance(message, Word):
        return _WORD + msgspec.json.encode(message)
    return _ENTRY + encode_entry(Entry(number=0, wall="", body=message))


def message_of(frame: bytes) -> Event | Command | Word:
    """What a frame says.

    Raises:
        EvidenceError: nothing that we know.
    """
    kind, content = frame[:1], frame[1:]
    if kind not in (_ENTRY, _WORD):
        raise EvidenceError(f"a message of unknown kind {kind!r}")
    try:
        return decode_entry(content).body if kind == _ENTRY else _decode_word(content)
    except RecursionError as error:
        raise EvidenceError("a message nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EvidenceError(f"a malformed message ({error})") from error
