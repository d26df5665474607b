"""What the lines between hosts do when something is wrong: strangers, nonsense, silence, cuts, and a job's end."""

import contextlib
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contracts.hosts import HELLO, Center, Host, center, hello

from everstep.adapters.checkpoints.peer_line import (
    GREETING_WITHIN_S,
    address_of,
    connect,
    listen,
    load_credentials,
    make_credentials,
)
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.snapshot_request import Collect
from everstep.adapters.hosts import host_switchboard
from everstep.adapters.hosts.host_joining import Stranger, join
from everstep.adapters.hosts.host_line import LineConfig
from everstep.adapters.hosts.host_looks import ask_all, obey_looks
from everstep.adapters.hosts.host_messages import frame_of
from everstep.domain.commands import FinishJob
from everstep.domain.errors import ConfigError, ExitCode, WorldError
from everstep.domain.events import Event, HostLost, RunResumed, StallEnded, StopRequested
from everstep.domain.ids import Attempt, HostId, IncidentId

SILENT = """
import sys, time
from pathlib import Path
from tests.contracts.hosts import HELLO, Host
from everstep.adapters.hosts.host_joining import join
from everstep.adapters.checkpoints.peer_line import load_credentials
host = Host(join(sys.argv[1], load_credentials(Path(sys.argv[2]), encrypted=True), HELLO))
print("joined", flush=True)
time.sleep(60)
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Center]:
    with center(tmp_path / "credentials") as it:
        yield it


def next_event(made: Center, within_s: float = 20.0) -> Event:
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s:
        if made.unread:
            return made.unread.pop(0)
        made.unread += made.channel.receive(0.5)
    raise AssertionError("no event came")


def lost(made: Center) -> str:
    event = next_event(made)
    assert isinstance(event, HostLost), event
    assert (event.host, event.defect) == ("h1", False)
    return event.reason


def until(condition: object, what: str) -> None:
    ends_s = time.monotonic() + 20.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends_s, f"waited in vain for {what}"
        time.sleep(0.01)


def test_the_time_of_the_coordinator_is_known_after_joining_to_a_fraction_of_a_round_trip(made: Center) -> None:
    host = made.join()
    assert abs(host.welcomed.zero_ns - made.clock.zero_ns) < 20e6
    assert host.welcomed.run == "run-1"
    assert host.welcomed.address == "127.0.0.1"
    host.end.close()


def test_a_stranger_without_the_secret_or_the_certificate_is_turned_away(made: Center, tmp_path: Path) -> None:
    make_credentials(tmp_path / "other")
    stranger = load_credentials(tmp_path / "other", encrypted=True)
    with pytest.raises(Stranger):
        join(made.address, stranger, HELLO)
    right = load_credentials(made.folder, encrypted=True)
    with pytest.raises(WorldError, match="closed the line"):  # what a coordinator that just ends does, too
        join(made.address, replace(right, secret=b"x" * 32), HELLO)
    with pytest.raises(Stranger):
        join(made.address, replace(stranger, secret=right.secret), HELLO)
    made.join().end.close()  # and those who belong here are served as before


def test_a_stranger_that_holds_many_connections_does_not_keep_hosts_out(
    made: Center, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_switchboard, "_OF_ONE_ADDRESS_MAX", 2)
    made.switchboard._greeting = threading.BoundedSemaphore(3)
    host, port = made.address.rsplit(":", 1)
    with contextlib.ExitStack() as held:
        idle = [
            held.enter_context(socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)))
            for _ in range(4)
        ]
        for connection in idle[2:]:
            connection.settimeout(GREETING_WITHIN_S / 2)
            assert connection.recv(1) == b""  # turned away at once
        made.join().end.close()


def test_a_host_that_comes_when_no_thread_can_be_had_may_come_again(
    made: Center, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", Without)
        with pytest.raises(WorldError) as caught:
            made.join()
    assert caught.value.retryable
    made.join().end.close()


@pytest.mark.parametrize("resets", [False, True])
def test_whoever_accepts_and_leaves_is_no_stranger_but_worth_another_try(made: Center, resets: bool) -> None:
    """A coordinator that ends, or an ssh tunnel with nobody behind it."""

    def leave() -> None:
        connection, _ = door.accept()
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    with listen("127.0.0.1:0") as door:
        thread = threading.Thread(target=leave)
        thread.start()
        with pytest.raises(WorldError) as caught:
            join(address_of(door), made.credentials, HELLO)
        thread.join()
    assert caught.value.retryable


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 300, b""])
def test_whoever_speaks_no_tls_is_turned_away(made: Center, said: bytes) -> None:
    with socket.create_connection(made.address.rsplit(":", 1)) as plain:
        plain.settimeout(10.0)
        with contextlib.suppress(OSError):  # a reset, or no connection any more
            plain.sendall(said)
            plain.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(4096):
                continue
    made.join().end.close()


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"E{}", "not a ledger entry"),
        (b"Cnonsense", "malformed"),
        (b"X", "unknown kind"),
        (b"C" + b"[" * 100_000, "malformed"),
        (frame_of(hello()), "a Hello is not for h1 to say"),
        (frame_of(RunResumed(at_s=1.0, gap_s=1.0, command=())), "RunResumed is not for h1 to say"),
        (frame_of(StallEnded(at_s=1.0, attempt=Attempt(1), host=HostId("h2"))), "StallEnded is not for h1 to say"),
        (frame_of(FinishJob(at_s=1.0, exit_code=ExitCode.DONE, rung=None, summary="")), "FinishJob is not for h1"),
    ],
)
def test_nonsense_ends_the_line_with_one_sentence(made: Center, frame: bytes, words: str) -> None:
    host = made.join()
    host.end._line.send(frame)
    reason = lost(made)
    assert words in reason, reason
    assert "\n" not in reason
    until(lambda: host.end.lost, "the host to notice")


def test_a_message_beyond_the_limit_ends_the_line(tmp_path: Path) -> None:
    small = LineConfig(beat_s=0.1, silence_s=5.0, frame_bytes_max=1000)
    with center(tmp_path, line=small) as made:
        host = made.join()
        host.end.send(StopRequested(at_s=1.0, by="x" * 2000))
        assert "bytes, over 1000" in lost(made)


def test_a_host_whose_process_stands_still_is_lost_and_learns_it_when_it_wakes(made: Center, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT, made.address, str(made.folder)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"joined\n"
    os.kill(process.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    assert lost(made) == "the line to host h1 has ended: nothing was heard from it for 1 s"
    assert time.monotonic() - started_s < 10.0
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_host_that_is_killed_is_lost_at_once(tmp_path: Path) -> None:
    patient = LineConfig(beat_s=1.0, silence_s=60.0)
    with center(tmp_path, line=patient) as made:
        host = Host(join(made.address, made.credentials, HELLO), config=patient)
        host.welcomed.connection.shutdown(socket.SHUT_RDWR)  # what the kernel does for a dead process
        assert "closed from there" in lost(made)


def test_a_silent_coordinator_is_gone_for_a_host(tmp_path: Path) -> None:
    with center(tmp_path, line=LineConfig(beat_s=60.0, silence_s=60.0)) as made:
        host = made.join()
        until(lambda: host.end.lost, "the host to notice")
        assert host.end.lost == "nothing was heard from it for 1 s"


def test_the_same_host_joins_again_after_a_loss_and_the_loss_is_told_first(made: Center) -> None:
    first = made.join()
    first.end.send(StopRequested(at_s=1.0, by="first"))
    assert isinstance(next_event(made), StopRequested)
    second = made.join()  # the same start of everstep: its end of the first line broke
    second.end.send(StopRequested(at_s=2.0, by="second"))
    assert isinstance(next_event(made), HostLost)
    assert isinstance(next_event(made), StopRequested)
    second.end.close()


def test_two_hosts_of_one_name_are_refused_until_the_first_has_left(made: Center) -> None:
    first = made.join()
    with pytest.raises(WorldError, match=r"there is a host h1 already; each .* needs a hostname of its own"):
        made.join(instance="another")
    first.end.close()
    until(lambda: not made.switchboard._seats, "the seat to be free")
    made.join(instance="another").end.close()


def test_two_hosts_of_one_node_rank_are_refused_until_the_first_has_left(made: Center) -> None:
    first = Host(join(made.address, made.credentials, hello(node_rank=1)))
    with pytest.raises(WorldError, match="host h1 has --node-rank 1 already; give each its own"):
        join(made.address, made.credentials, hello(host="h2", node_rank=1))
    Host(join(made.address, made.credentials, hello(host="h2", node_rank=2))).end.close()
    first.end.close()
    until(lambda: not made.switchboard.hosts, "the seats to be free")
    Host(join(made.address, made.credentials, hello(host="h2", node_rank=1))).end.close()


def test_more_hosts_than_the_job_has_room_for_are_told_who_is_there(made: Center) -> None:
    hosts = [made.join("h1"), made.join("h2")]
    with pytest.raises(WorldError, match=r"all its hosts \(h0, h1, h2\)"):
        made.join("h3")
    for host in hosts:
        host.end.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nnodes": "2"}, "--nnodes is 2 on h1 and 3 on the coordinator's host h0"),
        ({"program": ("train.py", "--lr", "1")}, "the command is train.py --lr 1 on h1 and train.py on"),
        ({"rdzv_id": "other"}, "--rdzv-id is other on h1 and not given on"),
        ({"everstep": "2"}, "everstep is 2 on h1 and 1 on"),
    ],
)
def test_what_must_be_the_same_on_all_hosts_is_compared(made: Center, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        join(made.address, made.credentials, hello(**change))
    assert words in str(caught.value)


def test_a_look_that_a_person_asks_for_is_taken_on_all_hosts_and_who_does_not_answer_is_named(
    made: Center, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[tuple[str, str, int]] = []

    def collects(name: str) -> Collect:
        def collect(*, attempt: Attempt, incident: IncidentId, snapshot: int) -> None:
            looks.append((name, incident, snapshot))

        return collect

    first, second = made.join("h1"), made.join("h2")
    obey_looks(first.board, MonotonicClock.of_zero(first.welcomed.zero_ns), HostId("h1"), collects("h1"))
    look = ask_all(made.board, made.clock, lambda: made.switchboard.hosts, collects("h0"), within_s=0.5)
    look(attempt=Attempt(0), incident=IncidentId("asked-1"), snapshot=1)
    assert sorted(looks) == [("h0", "asked-1", 1), ("h1", "asked-1", 1)]
    assert [record.getMessage() for record in caplog.records] == ["host h2 has not looked at its ranks within 0.5 s"]
    made.board.post("look/../1", b"0")
    made.board.post("look/asked-2/1", b"0")  # long ago
    made.board.post("seen", b"")
    first.board.read("seen", within_s=5.0)
    assert len(looks) == 2
    for host in (first, second):
        host.end.close()


def test_all_hosts_hear_the_end_of_the_job(made: Center) -> None:
    hosts = [made.join("h1"), made.join("h2")]
    end = FinishJob(at_s=1.0, exit_code=ExitCode.PREEMPTED, rung=None, summary="stopped")
    started_s = time.monotonic()
    made.switchboard.finish(end)
    assert time.monotonic() - started_s < 4.0
    assert [host.end.end for host in hosts] == [end, end]
    assert list(made.channel.receive(0.0)) == []


def test_nobody_at_the_endpoint_is_worth_another_try(made: Center) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(WorldError, match="Connection refused") as caught:
            join(f"127.0.0.1:{port}", made.credentials, HELLO)
    assert caught.value.retryable


def test_a_line_carries_large_messages_both_ways_at_once(made: Center) -> None:
    host = made.join()
    big = "x" * (4 << 20)
    for number in range(6):
        host.end.send(StopRequested(at_s=float(number), by=big))
        made.board.post(f"key{number}", b"y" * 60_000)
    for number in range(6):
        event = next_event(made)
        assert isinstance(event, StopRequested)
        assert (event.at_s, len(event.by)) == (number, len(big))
    assert len(host.board.read("key5", within_s=10.0)) == 60_000
    host.end.close()


def test_the_lines_are_encrypted_with_tls_1_3(made: Center) -> None:
    line = connect(made.address, made.credentials)
    connection = line.release()
    assert isinstance(connection, ssl.SSLSocket)
    assert connection.version() == "TLSv1.3"
    line.close()
