"""Lines between savers: who is not of the job gets nothing, and whatever it does, every call ends in time."""

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.adapters.checkpoints import peer_line
from everstep.adapters.checkpoints.peer_files import PeerPin, PeerRoster, read_roster, write_roster
from everstep.adapters.checkpoints.peer_line import (
    Credentials,
    Line,
    Pace,
    address_of,
    answer,
    connect,
    listen,
    load_credentials,
    make_credentials,
)
from everstep.domain.errors import ConfigError, EvidenceError, WorldError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job") / "credentials"
    make_credentials(made)
    return made


@pytest.fixture
def ours(folder: Path) -> Credentials:
    return load_credentials(folder, encrypted=True)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_line, "GREETING_WITHIN_S", 0.4)
    monkeypatch.setattr(peer_line, "STALL_S", 0.4)


@contextmanager
def serving(credentials: Credentials, then: Callable[[Line], None] = lambda _: None) -> Iterator[tuple[str, list[str]]]:
    """Answers one connection; the address, and what became of it: the error's name, or "well"."""
    listener, outcome = listen("127.0.0.1:0"), list[str]()

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            with answer(connection, credentials) as line:
                then(line)
            outcome.append("well")
        except (OSError, EvidenceError) as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address_of(listener), outcome
    finally:
        thread.join(10)
        assert not thread.is_alive()
        listener.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_two_of_one_job_exchange_frames_and_bytes(folder: Path, encrypted: bool) -> None:
    credentials = load_credentials(folder, encrypted=encrypted)

    def echo(line: Line) -> None:
        line.send(line.receive()[::-1])
        line.send_bytes(memoryview(b"x" * 3_000_000))

    with serving(credentials, echo) as (address, outcome), connect(address, credentials) as line:
        line.send(b"abc")
        assert line.receive() == b"cba"
        into = bytearray(3_000_000)
        line.receive_bytes(memoryview(into))
        assert into == b"x" * 3_000_000
    assert outcome == ["well"]


def test_lines_speak_tls_1_3_and_nothing_older(ours: Credentials) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(ours) as (address, outcome):
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port))) as plain,
            pytest.raises(OSError, match=r"(?i)protocol|alert|version"),
        ):
            old.wrap_socket(plain)
    assert outcome == ["SSLError"]


def test_who_does_not_know_the_secret_is_turned_away(ours: Credentials) -> None:
    thief = Credentials(secret=bytes(32), server=ours.server, client=ours.client, certificate=ours.certificate)
    with serving(ours) as (address, outcome), pytest.raises((OSError, EvidenceError)):
        connect(address, thief)
    assert outcome == ["EvidenceError"]


def test_a_server_that_does_not_know_the_secret_learns_nothing(ours: Credentials) -> None:
    thief = Credentials(secret=bytes(32), server=ours.server, client=ours.client, certificate=ours.certificate)
    with serving(thief) as (address, _), pytest.raises((OSError, EvidenceError)):
        connect(address, ours)


def test_another_jobs_certificate_is_refused_on_both_ends(ours: Credentials, folder: Path, tmp_path: Path) -> None:
    make_credentials(tmp_path / "other")
    (tmp_path / "other" / "secret").write_bytes((folder / "secret").read_bytes())
    other = load_credentials(tmp_path / "other", encrypted=True)
    for server, client in ((ours, other), (other, ours)):
        with serving(server) as (address, outcome), pytest.raises(OSError):  # noqa: PT011 - TLS words it in many ways
            connect(address, client).receive()
        assert outcome != ["well"]


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01\xff\xff" + bytes(70000)])
def test_a_stranger_that_talks_nonsense_or_nothing_is_left_in_time(
    words: bytes, ours: Credentials, short: None
) -> None:
    began_s = time.monotonic()
    with serving(ours) as (address, outcome):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            try:
                stranger.sendall(words)
                while stranger.recv(4096):
                    pass
            except OSError:
                stranger.close()
    assert outcome
    assert outcome != ["well"]
    assert time.monotonic() - began_s < 5


def test_a_message_that_announces_gigabytes_is_refused_before_any_is_read(folder: Path) -> None:
    plain = load_credentials(folder, encrypted=False)
    announced = memoryview(struct.pack("<I", 4_000_000_000))
    with (
        serving(plain, lambda line: line.send_bytes(announced)) as (address, _),
        connect(address, plain) as line,
        pytest.raises(EvidenceError, match="4000000000 bytes"),
    ):
        line.receive()


def test_a_peer_that_falls_silent_or_dribbles_is_given_up(ours: Credentials, short: None) -> None:
    def dribble(line: Line) -> None:
        for _ in range(20):
            line.send_bytes(memoryview(b"x"))
            time.sleep(0.1)

    with serving(ours, dribble) as (address, _), connect(address, ours) as line:
        began_s = time.monotonic()
        with pytest.raises(OSError, match=r"silent|timed out"):
            line.receive_bytes(memoryview(bytearray(1000)))
        assert time.monotonic() - began_s < 2


def test_credentials_are_for_their_owner_alone(folder: Path, tmp_path: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    make_credentials(tmp_path / "c")
    (tmp_path / "c" / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        load_credentials(tmp_path / "c", encrypted=True)
    with pytest.raises(WorldError):
        load_credentials(tmp_path / "none", encrypted=True)


def test_lines_to_other_machines_are_never_in_the_clear(tmp_path: Path) -> None:
    about: dict[str, Any] = {"generation": 1, "host": "a", "ranks": {"a": (0,)}, "encrypted": False}
    roster = PeerRoster(addresses={"a": "127.0.0.1:1"}, **about)
    write_roster(tmp_path, roster)
    assert read_roster(tmp_path) == roster
    with pytest.raises(ConfigError, match="only encrypted"):
        PeerRoster(addresses={"a": "10.0.0.1:1"}, **about)
    (tmp_path / "peers.json").write_bytes((tmp_path / "peers.json").read_bytes().replace(b"127.0.0.1", b"10.0.0.1"))
    with pytest.raises(ConfigError, match="only encrypted"):
        read_roster(tmp_path)
    (tmp_path / "peers.json").write_bytes(b"{}")
    with pytest.raises(EvidenceError, match="malformed"):
        read_roster(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"host": "b"}, {"ranks": {"a": (1,)}}, {"addresses": {}}, {"bytes_per_s": 10.0}], ids=str
)
def test_a_roster_that_cannot_be_followed_says_what_it_lacks(wrong: dict[str, Any]) -> None:
    about = {"generation": 1, "host": "a", "ranks": {"a": (0,)}, "addresses": {"a": "127.0.0.1:1"}}
    with pytest.raises(ConfigError):
        PeerRoster(**{**about, **wrong})


def test_all_lines_together_keep_the_pace() -> None:
    pace, began_s = Pace(), time.monotonic()
    threads = [threading.Thread(target=lambda: [pace.wait(1 << 20, 40e6) for _ in range(6)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 11 * (1 << 20) / 40e6 <= time.monotonic() - began_s < 2
    pace.wait(1 << 40, 0.0)


def test_a_pin_is_seen_by_others_and_a_torn_one_holds_nothing(tmp_path: Path) -> None:
    mine, theirs = PeerPin(tmp_path), PeerPin(tmp_path)
    assert theirs.step() == 0
    mine.write(17)
    assert theirs.step() == 17
    with (tmp_path / "peers.pin").open("r+b") as file:
        file.write(b"\xff")
    assert theirs.step() == 0
