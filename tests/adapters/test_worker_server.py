"""What a worker's own server says: counts from the recorder's JSON as gloo and NCCL write it, and answers that fail."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.adapters.workers.worker_server import ask, group_counts
from everstep.domain.evidence import GroupCounts

STATUS = {"last_enqueued_collective": 41, "last_started_collective": -1, "last_completed_collective": 40}
ENTRY = {
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[4, 8]],
}


def dump(**changed: Any) -> bytes:
    known = {"version": "2.10", "pg_config": {"": {"ranks": "[0, 1]"}}, "pg_status": {"0": STATUS}, "entries": [ENTRY]}
    return json.dumps(known | changed).encode()


def test_gloo_keeps_the_default_groups_members_under_an_empty_name() -> None:
    assert group_counts(dump()) == (
        GroupCounts(group="0 (default_pg)", ranks=(0, 1), enqueued=41, completed=40, newest="all_reduce of [[4, 8]]"),
    )


def test_a_group_that_is_listed_by_its_name_has_its_own_members() -> None:
    config = {"0": {"ranks": "[0, 1, 2, 3]"}, "7": {"ranks": "[1, 3]"}}
    entries = [ENTRY, ENTRY | {"pg_id": 1, "process_group": ["7", "tp"], "profiling_name": "nccl:all_gather"}]
    status = {"0": STATUS, "1": STATUS | {"last_enqueued_collective": 5, "last_completed_collective": 5}}
    default, tensor_parallel = group_counts(dump(pg_config=config, pg_status=status, entries=entries))
    assert default.ranks == (0, 1, 2, 3)
    assert (tensor_parallel.group, tensor_parallel.ranks) == ("7 (tp)", (1, 3))
    assert (tensor_parallel.enqueued, tensor_parallel.completed) == (5, 5)


def test_the_newest_entry_of_a_group_names_its_operation() -> None:
    entries = [ENTRY, ENTRY | {"profiling_name": "gloo:barrier", "input_sizes": []}]
    assert group_counts(dump(entries=entries))[0].newest == "barrier"


def test_a_group_without_entries_is_known_by_its_number() -> None:
    (group,) = group_counts(dump(entries=[]))
    assert (group.group, group.newest) == ("0", "")


def test_before_the_first_collective_there_are_no_groups() -> None:
    assert group_counts(dump(pg_status={})) == ()
    assert group_counts(b"{}") == ()


@given(length=st.integers(0, len(dump()) - 1))
def test_a_torn_dump_gives_no_counts(length: int) -> None:
    assert group_counts(dump()[:length]) == ()


@pytest.mark.parametrize(
    "text",
    [
        b"null",
        b"[]",
        b'"x"',
        b"\xff",
        dump(pg_status=[]),
        dump(pg_status={"0": {}}),
        dump(pg_status={"0": STATUS | {"last_enqueued_collective": "x"}}),
        dump(entries=None),
        dump(entries=[{}]),
        dump(entries=[ENTRY | {"process_group": "0"}]),
        dump(pg_config={"": {"ranks": "[0, 1"}}),
        dump(pg_config=[]),
    ],
)
def test_a_dump_of_another_shape_gives_no_counts(text: bytes) -> None:
    assert group_counts(text) == ()


def serve(path: Path, reply: bytes | None) -> tuple[threading.Thread, list[bytes]]:
    """A server for one question; without a reply it stays silent until it is hung up on."""
    heard: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        with listener, listener.accept()[0] as line:
            heard.append(line.recv(4096))
            if reply is not None:
                line.sendall(reply)
            while reply is None and line.recv(4096):
                pass

    thread = threading.Thread(target=answer, name="test-server")
    thread.start()
    return thread, heard


@pytest.mark.parametrize(
    ("reply", "body", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", ""),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"", "ping: HTTP 404"),
        (b"nonsense\r\n\r\n", b"", "ping: "),
        (b"", b"", "ping: "),
        (None, b"", "ping: no answer within 0.2 s"),
    ],
    ids=["well", "not found", "no http", "hung up", "silent"],
)
def test_a_question_has_an_answer_or_says_why_not(
    tmp_path: Path, reply: bytes | None, body: bytes, problem: str
) -> None:
    thread, heard = serve(tmp_path / "s", reply)
    answer = ask(str(tmp_path / "s"), "ping", timeout_s=0.2 if reply is None else 20.0)
    thread.join(20.0)
    assert heard[0].startswith(b"POST /handler/ping HTTP/1.1")
    assert answer.body == body
    assert answer.problem.startswith(problem)
    assert bool(answer.problem) == bool(problem)


def test_nobody_there_is_said_to_be_so(tmp_path: Path) -> None:
    assert "No such file" in ask(str(tmp_path / "none"), "ping", timeout_s=1.0).problem
