"""Hosts agree before each attempt whether memory is used, and all have the newest step when they do."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.worker.peer_hosts import complete, wait_for, write_shard

from everstep.adapters.checkpoints import peer_hosts
from everstep.adapters.checkpoints.memory_folder import MemoryFolder, open_folder
from everstep.adapters.checkpoints.peer_files import COPIES_NAME, ROSTER_NAME, PeerRoster, read_roster
from everstep.adapters.checkpoints.peer_hosts import PeerConfig, PeerHosts
from everstep.adapters.checkpoints.peer_line import make_credentials
from everstep.adapters.hosts.board import LocalBoard
from everstep.adapters.workers.rendezvous_store import Meeting, find_meeting, tell_meeting
from everstep.domain.commands import HostShare, Rung, StartWorkers
from everstep.domain.errors import WorldError
from everstep.domain.ids import Attempt, HostId, Rank
from everstep.worker.saving.parallel_groups import arrange_keepers

HOSTS = ("a", "b")


def start(attempt: int, hosts: tuple[str, ...] = HOSTS) -> StartWorkers:
    shares = tuple(HostShare(host=HostId(host), first_rank=Rank(2 * n), count=2) for n, host in enumerate(hosts))
    return StartWorkers(
        at_s=0.0,
        attempt=Attempt(attempt),
        shares=shares,
        world_size=2 * len(hosts),
        restart_count=0,
        faults=(),
        rung=Rung.RESTART_ALL,
        why="",
    )


class Host:
    """One host's part, with a folder of its own."""

    def __init__(self, name: str, parent: Path, board: LocalBoard, *, has_room: bool = True, rack: str = "") -> None:
        self.held: MemoryFolder | None = open_folder(name, parent=parent) if has_room else None
        config = PeerConfig(
            host=HostId(name),
            folder=self.held.path if self.held else None,
            address="127.0.0.1",
            credentials=parent / "credentials",
            rack=rack,
        )
        self.board = board
        self.peers = PeerHosts(config, board)

    @property
    def folder(self) -> Path:
        assert self.held is not None
        return self.held.path


def prepare(hosts: dict[str, Host], attempt: int) -> dict[str, object]:
    """What each host says, all at once as in a job."""
    answers: dict[str, object] = {}

    def ask(name: str) -> None:
        try:
            answers[name] = hosts[name].peers.prepare(start(attempt, tuple(hosts)), lambda: False)
        except WorldError as error:
            answers[name] = error

    threads = [threading.Thread(target=ask, args=(name,)) for name in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@contextmanager
def pair(parent: Path, *, has_credentials: bool = True, b_has_room: bool = True) -> Iterator[dict[str, Host]]:
    if has_credentials:
        make_credentials(parent / "credentials")
    board = LocalBoard()
    hosts = {name: Host(name, parent, board, has_room=b_has_room or name == "a") for name in HOSTS}
    try:
        yield hosts
    finally:
        for host in hosts.values():
            host.peers.close()


def test_both_hosts_are_told_to_use_memory_and_what_one_of_them_lost_is_there_again(tmp_path: Path) -> None:
    with pair(tmp_path) as hosts:
        assert prepare(hosts, 1) == {"a": True, "b": True}
        for rank in range(4):
            write_shard(hosts["ab"[rank // 2]].folder, rank, 0, 7, bytes([rank]) * 5000, of=4)
        keeper = hosts["a"].folder / COPIES_NAME
        wait_for(lambda: [v.step for v in complete(keeper, 3)] == [7], "a to hold copies of b")
        for rank in (2, 3):
            (hosts["b"].folder / f"rank-{rank:05d}.headers").write_bytes(bytes(3 * 4096))
        assert prepare(hosts, 2) == {"a": True, "b": True}
        for rank in (2, 3):
            assert [v.step for v in complete(hosts["b"].folder, rank)] == [7]
        assert prepare({"a": hosts["a"]}, 3) == {"a": True}
        assert not (hosts["a"].folder / ROSTER_NAME).exists()


@pytest.mark.parametrize("lack", ["has_credentials", "b_has_room"])
def test_what_one_host_lacks_leaves_all_without_memory_and_is_told_once(
    lack: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(tmp_path, **{lack: False}) as hosts:
        for attempt in (1, 2):
            assert prepare(hosts, attempt) == {"a": False, "b": False}
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert all(text.startswith("checkpoints are not kept in memory and go to disk only: host ") for text in told)


def test_a_replicator_that_is_never_ready_leaves_all_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_hosts, "_STILL_S", -1.0)
    with pair(tmp_path) as hosts:
        assert prepare(hosts, 1) == {"a": False, "b": False}


def test_a_host_that_waits_for_another_is_free_for_what_is_wanted_next(tmp_path: Path) -> None:
    is_stopped = threading.Event()
    with pair(tmp_path) as hosts:
        timer = threading.Timer(0.2, is_stopped.set)
        timer.start()
        began_s = time.monotonic()
        with pytest.raises(WorldError, match="called off"):
            hosts["a"].peers.prepare(start(1), is_stopped.is_set)
        with pytest.raises(WorldError, match="called off"):  # told before it began to wait
            hosts["a"].peers.prepare(start(1), is_stopped.is_set)
        assert time.monotonic() - began_s < 10


def test_a_host_that_waits_for_the_first_hosts_store_is_free_for_what_is_wanted_next() -> None:
    board, is_stopped = LocalBoard(), threading.Event()
    threading.Timer(0.2, is_stopped.set).start()
    began_s = time.monotonic()
    with pytest.raises(WorldError, match="called off"):
        find_meeting(board, 1, is_stopped.is_set)
    assert time.monotonic() - began_s < 10
    tell_meeting(board, 2, Meeting(address="::1", port=7))
    assert find_meeting(board, 2, lambda: False) == Meeting(address="::1", port=7)


def test_a_host_waits_no_more_when_another_tells_that_memory_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(tmp_path) as hosts:
        hosts["a"].board.post("peers/1/address/b", b'{"address":"127.0.0.1:1"}')
        hosts["a"].board.post("peers/1/ready/b", b'{"problem":"its memory is full"}')
        began_s = time.monotonic()
        assert not hosts["a"].peers.prepare(start(1), lambda: False)
        assert time.monotonic() - began_s < 10
    assert caplog.records[-1].message.endswith("go to disk only: host b: its memory is full")


def rosters(hosts: dict[str, Host]) -> list[PeerRoster]:
    found = [read_roster(host.folder) for host in hosts.values()]
    return [roster for roster in found if roster is not None]


def test_copies_go_to_another_rack_and_stay_where_they_are_when_a_host_is_replaced(tmp_path: Path) -> None:
    make_credentials(tmp_path / "credentials")
    board, racks = LocalBoard(), {"a": "r1", "b": "r1", "c": "r2", "d": "r2", "z": "r1"}
    every = {name: Host(name, tmp_path, board, rack=rack) for name, rack in racks.items()}
    try:
        hosts = {name: every[name] for name in "abcd"}
        assert set(prepare(hosts, 1).values()) == {True}
        first = rosters(hosts)
        assert all(racks[one] != racks[keeper] for one, keeper in first[0].keepers.items())
        assert all(found.keepers == first[0].keepers for found in first)
        for host, roster in zip(hosts.values(), first, strict=True):
            # the ranks have told of groups that leave one choice only
            arrange_keepers(host.folder, roster, [(0, 1, 4, 5), (2, 3, 6, 7)])
        crossed = {"a": "d", "b": "c", "c": "b", "d": "a"}
        assert [found.keepers for found in rosters(hosts)] == [crossed] * 4
        hosts = {name: every[name] for name in "zbcd"}  # for a comes z, which knows of nothing
        assert set(prepare(hosts, 2).values()) == {True}
        assert [found.keepers for found in rosters(hosts)] == [
            {"z": "d", "b": "c", "c": "b", "d": "z"}
        ] * 4  # and nobody else moved
    finally:
        for host in every.values():
            host.peers.close()
