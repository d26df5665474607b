"""Copies on other hosts: complete or not there, whoever is killed or lies; an empty host gets its own back."""

import contextlib
import dataclasses
import random
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker.peer_hosts import MB, TWO, Cluster, complete, save, steps, wait_for, write_shard

from everstep.adapters import peer_line
from everstep.adapters.memory_slots import SlotHeader
from everstep.adapters.peer_files import PeerPin, PeerRoster, read_address, write_roster
from everstep.adapters.peer_line import (
    Credentials,
    Line,
    address_of,
    answer,
    listen,
    load_credentials,
    make_credentials,
)
from everstep.domain.errors import EvidenceError
from everstep.worker.peers.service import Offer, Request, fetch
from everstep.worker.peers.shard_store import ShardStore, version_of


def test_each_host_holds_the_others_newest_step_and_a_replaced_one_gets_its_own_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, TWO) as cluster:
        cluster.tell()
        save(cluster, 7, slot=0)
        wait_for(lambda: steps(cluster) == [7], f"copies of step 7; {cluster.errors()}")
        save(cluster, 9, slot=1)
        wait_for(lambda: steps(cluster) == [7, 9], f"copies of step 9; {cluster.errors()}")
        cluster.hosts["b"].lose()
        cluster.hosts["b"].come_up()
        ready = cluster.restore()
        assert [told.step for told in ready] == [9, 9]
        for rank in (2, 3):
            assert [v.step for v in complete(cluster.hosts["b"].folder, rank)] == [9]
        for host in cluster.hosts.values():
            host.stop()
    assert "defect" not in cluster.errors()


class LyingPeer:
    """Says that it holds step 9 and then does as it likes."""

    def __init__(self, credentials: Credentials, lie: Callable[[Line, SlotHeader], None], header: SlotHeader) -> None:
        self._listener = listen("127.0.0.1:0")
        self.address = address_of(self._listener)
        self._credentials, self._lie, self._header = credentials, lie, header
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with contextlib.suppress(OSError, EvidenceError), answer(connection, self._credentials) as line:
            line.receive()
            self._lie(line, self._header)

    def close(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()


def offer(line: Line, header: SlotHeader, **changed: Any) -> None:
    line.send(msgspec.msgpack.encode(Offer(header=dataclasses.replace(header, **changed))))


def other_bytes(line: Line, header: SlotHeader) -> None:
    offer(line, header)
    line.send_bytes(memoryview(bytes(header.image_bytes + header.rest_bytes)))


def half(line: Line, header: SlotHeader) -> None:
    offer(line, header)
    line.send_bytes(memoryview(bytes(header.image_bytes // 2)))


def silence(line: Line, header: SlotHeader) -> None:
    offer(line, header)
    with contextlib.suppress(OSError, EvidenceError):
        line.receive(within_s=3)


LIES: dict[str, Callable[[Line, SlotHeader], None]] = {
    "other bytes": other_bytes,
    "half": half,
    "silence": silence,
    "nonsense": lambda line, _: line.send(b"\xc1nonsense"),
    "another step": lambda line, header: offer(line, header, step=10),
    "a size beyond all memory": lambda line, header: offer(line, header, image_bytes=1 << 50),
    "a negative size": lambda line, header: offer(line, header, image_bytes=-1),
    "facts that would overflow the page": lambda line, header: offer(line, header, facts=bytes(5000)),
    "a name that would be cut": lambda line, header: offer(line, header, layout="b" * 33),
    "nothing": lambda line, _: None,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_leaves_the_good_copy_as_it_is_and_its_own_never_counts(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_line, "STALL_S", 0.3)
    make_credentials(tmp_path / "credentials")
    credentials = load_credentials(tmp_path / "credentials", encrypted=True)
    store = ShardStore(tmp_path / "copies")
    write_shard(tmp_path / "copies", 3, 0, 7, b"good" * MB, of=4)
    header = dataclasses.replace(store.header(3, 0), step=9)
    peer = LyingPeer(credentials, LIES[lie], header)
    request = Request(shard=3, version=version_of(header))
    with pytest.raises((OSError, EvidenceError)):
        fetch(peer.address, credentials, request, partial(store.take, 3, 1, in_place=True), lambda: True)
    peer.close()
    assert [version.step for version in complete(tmp_path / "copies", 3)] == [7]


def test_strangers_at_the_door_of_a_saver_neither_stop_it_nor_keep_others_out(tmp_path: Path) -> None:
    with Cluster(tmp_path, TWO) as cluster, contextlib.ExitStack() as strangers:
        host, port = read_address(cluster.hosts["a"].folder).split(":")
        for number in range(40):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                stranger.sendall([b"", b"GET / HTTP/1.0\r\n\r\n", random.Random(number).randbytes(3000)][number % 3])
        cluster.tell()
        for number in range(40):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                stranger.sendall([b"", b"\x16\x03\x03", random.Random(number).randbytes(3000)][number % 3])
        save(cluster, 7, slot=0)
        wait_for(lambda: steps(cluster) == [7], f"copies of step 7; {cluster.errors()}")
    assert "defect" not in cluster.errors()


def test_ranks_keep_the_step_that_the_replicator_of_their_host_reads(lab: Any, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    write_roster(memory, PeerRoster(generation=1, host="a", addresses={"a": "127.0.0.1:1"}, ranks={"a": (0,)}))
    PeerPin(memory).write(4)
    lab.train("first", kind="alone", world=1, until=12, memory=str(memory), die_at=10, code=-9, pause_s=0.01)
    assert {4, 9} <= {version.step for version in complete(memory, 0)}
