"""Which host has the coordinator: the one that can listen at the endpoint, or was told to."""

import logging
import socket
from pathlib import Path

import pytest

from everstep.adapters.checkpoints.peer_line import make_credentials
from everstep.adapters.hosts.host_endpoint import Endpoint, check_local, claim, made_credentials
from everstep.domain.errors import ConfigError, WorldError

ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737): no host has it."""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_first_at_an_address_of_this_host_has_the_coordinator_and_the_next_ones_join(port: int) -> None:
    here = Endpoint(host="127.0.0.1", port=port)
    first = claim(here, node_rank=None)
    assert first is not None
    with first:
        assert first.getsockname() == ("127.0.0.1", port)
        assert claim(here, node_rank=None) is None
    again = claim(here, node_rank=None)  # free once more
    assert again is not None
    again.close()


def test_a_node_rank_says_it_without_a_look(port: int) -> None:
    here = Endpoint(host="127.0.0.1", port=port)
    assert claim(here, node_rank=1) is None
    listener = claim(here, node_rank=0)
    assert listener is not None
    with listener, pytest.raises(ConfigError, match="is in use, by another program or job"):
        claim(here, node_rank=0)


def test_an_address_or_name_of_another_host_is_not_this_ones(port: int) -> None:
    assert claim(Endpoint(host=ELSEWHERE, port=port), node_rank=None) is None
    assert claim(Endpoint(host="no-such-host.invalid", port=port), node_rank=None) is None
    with pytest.raises(ConfigError, match="is no address of this host; give the one to listen at with --local-addr"):
        claim(Endpoint(host=ELSEWHERE, port=port), node_rank=0)
    with pytest.raises(ConfigError, match="is not known here"):
        claim(Endpoint(host="no-such-host.invalid", port=port), node_rank=0)


@pytest.mark.parametrize("name", [ELSEWHERE, "no-such-host.invalid"])
def test_the_coordinators_host_listens_at_its_local_address_where_the_endpoint_is_a_door_before_it(
    name: str, port: int
) -> None:
    listener = claim(Endpoint(host=name, port=port, local="127.0.0.1"), node_rank=0)
    assert listener is not None
    with listener:
        assert listener.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize("local", [ELSEWHERE, "no-such-host.invalid", "2001:db8::1"])
def test_a_local_address_that_this_host_has_not_is_refused_by_its_flag(local: str) -> None:
    with pytest.raises(ConfigError, match=f"--local-addr {local} is no address of this host"):
        check_local(Endpoint(host="h", port=1, local=local))


@pytest.mark.parametrize("local", ["", "127.0.0.1", "localhost"])
def test_a_local_address_of_this_host_or_none_is_taken(local: str) -> None:
    check_local(Endpoint(host="h", port=1, local=local))


def test_a_name_of_several_addresses_of_this_host_is_taken_when_the_first_one_is(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: two)
    named = Endpoint(host="localhost", port=port)
    first = claim(named, node_rank=None)
    assert first is not None
    with first:
        assert claim(named, node_rank=None) is None


def test_a_name_that_is_loopback_here_is_warned_of(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with caplog.at_level(logging.WARNING):
        listener = claim(Endpoint(host="node7", port=port), node_rank=None)
    assert listener is not None
    listener.close()
    assert "node7 is 127.0.1.1 on this host, where other hosts cannot come" in caplog.text


def test_credentials_are_made_once_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir()  # as a user may do who gives --credentials
    made = made_credentials(folder)
    assert made_credentials(folder).secret == made.secret
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["credentials"]


def test_credentials_that_others_can_read_or_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    make_credentials(folder)
    (folder / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        made_credentials(folder)
    (folder / "secret").unlink()
    with pytest.raises(WorldError):
        made_credentials(folder)
