"""Every event and command survives the way into a ledger line and back; what is not a line is refused in words."""

import json
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.domain.codec import FORMAT, Entry, decode_entry, decode_event, encode_entry, is_command, to_json
from everstep.domain.commands import Command, HostCommand
from everstep.domain.errors import EvidenceError
from everstep.domain.events import Event, HostJoined, StopRequested, Ticked
from everstep.domain.ids import HostId

EVENTS, COMMANDS = get_args(Event), get_args(Command)
WALL = "2026-11-30T05:44:33.123Z"
FIELD_VALUES = {float: st.floats(allow_nan=False, allow_infinity=False), int: st.integers(-(2**53), 2**53)}
for field_type, strategy in FIELD_VALUES.items():
    st.register_type_strategy(field_type, strategy)
BODIES = st.one_of(*map(st.from_type, EVENTS + COMMANDS))
ASKED = StopRequested(at_s=2.5, by="SIGTERM")


def line_of(**changed: object) -> bytes:
    """The line of `ASKED` with some of its envelope changed."""
    envelope = json.loads(encode_entry(Entry(number=3, wall=WALL, body=ASKED)))
    return json.dumps(envelope | changed).encode() + b"\n"


@pytest.mark.parametrize("kind", EVENTS + COMMANDS, ids=lambda kind: kind.__name__)
def test_every_type_comes_back_from_its_line_unchanged(kind: type) -> None:
    @settings(max_examples=15, deadline=None)
    @given(body=st.from_type(kind), number=st.integers(1, 2**53))
    def survives(body: Event | Command, number: int) -> None:
        entry = Entry(number=number, wall=WALL, body=body)
        line = encode_entry(entry)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode_entry(line) == entry
        assert type(decode_entry(line).body) is kind

    survives()


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_comes_back_from_a_line_that_names_its_type_beside_it(kind: type) -> None:
    @settings(max_examples=5, deadline=None)
    @given(body=st.from_type(kind))
    def survives(body: Event) -> None:
        assert decode_event(to_json(body), type_name=kind.__name__) == body

    survives()


def test_no_type_is_both_event_and_command_and_every_one_says_when() -> None:
    names = [kind.__name__ for kind in EVENTS + COMMANDS]
    assert len(set(names)) == len(names)
    assert set(get_args(HostCommand)) < set(COMMANDS)
    for kind in EVENTS + COMMANDS:
        assert "at_s" in {field.name for field in fields(kind)}, kind


@given(body=BODIES)
@settings(max_examples=60, deadline=None)
def test_commands_are_told_from_events(body: Event | Command) -> None:
    assert is_command(body) == (type(body) in COMMANDS)


def test_the_line_is_an_envelope_with_the_names_that_are_documented() -> None:
    assert json.loads(line_of()) == {
        "v": FORMAT,
        "n": 3,
        "at_s": 2.5,
        "wall": WALL,
        "type": "StopRequested",
        "body": {"at_s": 2.5, "by": "SIGTERM"},
    }


@given(body=BODIES)
@settings(max_examples=60, deadline=None)
def test_fields_that_this_version_does_not_know_are_ignored(body: Event | Command) -> None:
    envelope = json.loads(encode_entry(Entry(number=1, wall=WALL, body=body)))
    envelope["invented"] = {"later": [1, 2]}
    envelope["body"]["invented_too"] = "x"
    assert decode_entry(json.dumps(envelope).encode()).body == body


def test_fields_that_were_added_later_take_their_defaults_in_older_lines() -> None:
    line = line_of(type="RunStarted", body={"at_s": 0, "run": "r", "everstep": "0", "command": [], "world_size": 1,
                                            "host_count": 1})  # fmt: skip
    assert decode_entry(line).body.faults == ()  # type: ignore[union-attr]


@pytest.mark.parametrize("newer", [FORMAT + 1, FORMAT + 40])
def test_a_newer_format_is_refused_with_both_numbers_and_the_word_upgrade(newer: int) -> None:
    with pytest.raises(EvidenceError, match=rf"format {newer}, and .* up to {FORMAT}: upgrade everstep"):
        decode_entry(line_of(v=newer, type="Invented", body={}))


def test_an_unknown_type_is_refused_with_its_name_and_the_word_upgrade() -> None:
    with pytest.raises(EvidenceError, match=r"unknown type 'Invented': upgrade everstep"):
        decode_entry(line_of(type="Invented"))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"\0\0\0\0",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b"\xff\xfe",
        b'{"v":1',
        line_of()[:-10],
        line_of(n="three"),
        line_of(body=[]),
        line_of(body={"at_s": "soon", "by": "x"}),
        line_of(body={"by": "x"}),
    ],
)
def test_what_is_no_entry_is_refused_in_words(line: bytes) -> None:
    with pytest.raises(EvidenceError, match="not a ledger entry"):
        decode_entry(line)


def test_an_event_of_unknown_type_or_shape_is_refused_in_words() -> None:
    with pytest.raises(EvidenceError, match="'FinishJob' is no event"):
        decode_event(b"{}", type_name="FinishJob")
    with pytest.raises(EvidenceError, match="malformed HostJoined"):
        decode_event(b'{"at_s": 1}', type_name="HostJoined")


def test_lists_of_values_become_json_too() -> None:
    joined = HostJoined(at_s=1.0, host=HostId("ü"), worker_count=2, address="a")
    assert json.loads(to_json([joined, Ticked(at_s=2.0)])) == [
        {"at_s": 1.0, "host": "ü", "worker_count": 2, "address": "a", "members": [], "place": None},
        {"at_s": 2.0},
    ]
