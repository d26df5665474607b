"""The one mapping between events, commands and JSON: a line of the ledger is an envelope and a body named by its type.

    {"v":1,"n":17,"at_s":12.3,"wall":"2026-11-30T05:44:33.123Z","type":"WorkerExited","body":{...}}

Unknown fields are ignored, so a newer minor version can be read; a newer format number is refused with a sentence.
"""

from dataclasses import dataclass
from typing import get_args

import msgspec

from everstep.domain.commands import Command
from everstep.domain.errors import EvidenceError
from everstep.domain.events import Event

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a ledger.

    Attributes:
        number: counts from 1 without a gap.
        wall: UTC wall time in ISO 8601, for people; nothing is computed from it but the gap of a dead coordinator.
    """

    number: int
    wall: str
    body: Event | Command


class _Envelope(msgspec.Struct):
    v: int
    n: int
    at_s: float
    wall: str
    type: str
    body: msgspec.Raw


_EVENTS = {cls.__name__: cls for cls in get_args(Event)}
_COMMANDS = {cls.__name__: cls for cls in get_args(Command)}
_DECODERS = {name: msgspec.json.Decoder(cls) for name, cls in (_EVENTS | _COMMANDS).items()}


class _Format(msgspec.Struct):
    v: int


_decode_format = msgspec.json.Decoder(_Format).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_encode = msgspec.json.encode


def is_command(body: Event | Command) -> bool:
    return type(body).__name__ in _COMMANDS


def encode_entry(entry: Entry) -> bytes:
    """The entry as one JSON line, newline included."""
    body = entry.body
    return (
        _encode(
            _Envelope(
                v=FORMAT,
                n=entry.number,
                at_s=body.at_s,
                wall=entry.wall,
                type=type(body).__name__,
                body=msgspec.Raw(_encode(body)),
            )
        )
        + b"\n"
    )


def decode_entry(line: bytes) -> Entry:
    """The entry of a line.

    Raises:
        EvidenceError: the line is not an entry, or comes from a newer format.
    """
    try:
        envelope = _decode_envelope(line)
        if envelope.v == FORMAT and (decoder := _DECODERS.get(envelope.type)) is not None:
            return Entry(number=envelope.n, wall=envelope.wall, body=decoder.decode(envelope.body))
    except msgspec.MsgspecError as error:
        _refuse_newer(_format_of(line))
        raise EvidenceError(f"not a ledger entry ({error})") from error
    _refuse_newer(envelope.v)
    raise EvidenceError(f"an entry of unknown type {envelope.type!r}: upgrade everstep")


def _format_of(line: bytes) -> int:
    try:
        return _decode_format(line).v
    except msgspec.MsgspecError:
        return 0


def _refuse_newer(written_in: int) -> None:
    if written_in > FORMAT:
        raise EvidenceError(
            f"written in ledger format {written_in}, and this everstep reads up to {FORMAT}: upgrade everstep"
        )


def decode_event(line: bytes, *, type_name: str) -> Event:
    """An event from its bare JSON body, for channels that name the type beside it.

    Raises:
        EvidenceError: unknown type or malformed body.
    """
    if type_name not in _EVENTS:
        raise EvidenceError(f"{type_name!r} is no event")
    try:
        return _DECODERS[type_name].decode(line)  # type: ignore[no-any-return]
    except msgspec.MsgspecError as error:
        raise EvidenceError(f"malformed {type_name} ({error})") from error


def to_json(value: object) -> bytes:
    """Any value of this package, or lists and dicts of them, as JSON."""
    return _encode(value)
