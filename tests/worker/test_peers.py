"""Copies on other hosts: complete or not there, whoever is killed or lies; an empty host gets its own back."""

import contextlib
import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker.peer_hosts import MB, TWO, Cluster, complete, save, steps, wait_for, write_shard

from everstep.adapters.checkpoints import peer_line
from everstep.adapters.checkpoints.memory_slots import RankSlots, SlotHeader, image_path, rest_path
from everstep.adapters.checkpoints.peer_files import (
    COPIES_NAME,
    ROSTER_NAME,
    PeerPin,
    PeerRoster,
    read_address,
    read_roster,
    write_roster,
)
from everstep.adapters.checkpoints.peer_line import (
    Credentials,
    Line,
    address_of,
    answer,
    listen,
    load_credentials,
    make_credentials,
)
from everstep.adapters.checkpoints.peer_repairs import (
    Repair,
    Repaired,
    answer_of,
    ask_repair,
    repairs_asked,
    withdraw_repair,
)
from everstep.domain.errors import EvidenceError
from everstep.policy.checkpoints import committed_steps
from everstep.policy.replication import HostReport, Word
from everstep.worker.peers.board import Board
from everstep.worker.peers.mover import Mover, Stores
from everstep.worker.peers.service import News, Offer, Request, fetch
from everstep.worker.peers.shard_store import PIECE_BYTES, ShardStore, version_of
from everstep.worker.restoring import mending
from everstep.worker.restoring.mending import Mending
from everstep.worker.saving.parallel_groups import arrange_keepers


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


def test_copies_follow_when_other_hosts_become_the_keepers_and_the_old_ones_free_them(tmp_path: Path) -> None:
    with Cluster(tmp_path, {name: (rank,) for rank, name in enumerate("abcd")}) as cluster:

        def arrange(*groups: tuple[int, ...]) -> dict[str, str]:
            for host in cluster.hosts.values():
                before = read_roster(host.folder)
                assert before is not None
                arrange_keepers(host.folder, before, groups)
            found = read_roster(cluster.hosts["a"].folder)
            assert found is not None
            return dict(found.keepers)

        def lie_with(keepers: Mapping[str, str], step: int) -> bool:
            """Every shard on its own host and with its keeper, of this step, and nowhere else any."""
            places = {
                (rank, name): max(version.step for version in held)
                for rank in range(4)
                for name, host in cluster.hosts.items()
                if (held := host.copies(rank))
            }
            return places == {(n, place): step for n, own in enumerate("abcd") for place in (own, keepers[own])}

        cluster.tell()
        first = arrange((0, 1), (2, 3))
        assert all((one in "ab") != (keeper in "ab") for one, keeper in first.items())
        save(cluster, 7, slot=0)
        wait_for(lambda: lie_with(first, 7), f"copies of step 7; {cluster.errors()}")
        second = arrange((0, 3), (1, 2))
        assert all((one in "ad") != (keeper in "ad") for one, keeper in second.items())
        assert first != second
        save(cluster, 9, slot=1)
        wait_for(lambda: lie_with(second, 9), f"copies of step 9 with the new keepers alone; {cluster.errors()}")
        for owner, keeper in first.items():
            if second[owner] != keeper:
                folder = cluster.hosts[keeper].folder / COPIES_NAME
                assert not list(folder.glob(f"rank-{'abcd'.index(owner):05d}.*.*"))
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
        self._listener.close()  # whoever tries again is turned away at once
        with contextlib.suppress(OSError, EvidenceError), answer(connection, self._credentials) as line:
            line.receive()
            self._lie(line, self._header)

    def close(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


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


@dataclass(frozen=True)
class Moved:
    """Host a of a job, as its mover sees it; nothing moves before `mover.start`."""

    memory: Path
    board: Board
    stores: Stores
    mover: Mover

    def tell(self, *copies_of: int) -> None:
        """Host a says that it holds copies of these ranks."""
        held = tuple(item for rank in copies_of for item in self.stores.copies.held(rank))
        self.board.tell(HostReport(host="a", generation=1, copies=held), (), None)

    def ask(self, serial: int, shard: int) -> Repair:
        """A rank wants slot 0 again."""
        version = version_of(ShardStore(self.memory).header(shard, 0))
        repair = Repair(serial=serial, shard=shard, slot=0, version=version)
        ask_repair(self.memory, repair)
        return repair

    def answer(self, serial: int) -> Repaired:
        wait_for(lambda: answer_of(self.memory, serial), "an answer", within_s=5)
        found = answer_of(self.memory, serial)
        assert found is not None
        return found


@contextlib.contextmanager
def host_a(folder: Path, ranks: Mapping[str, tuple[int, ...]], b: str = "127.0.0.1:1") -> Iterator[Moved]:
    memory = folder / "memory"
    memory.mkdir()
    if not (folder / "credentials").exists():
        make_credentials(folder / "credentials")
    addresses = {"a": "127.0.0.1:1", "b": b}
    roster = PeerRoster(generation=1, host="a", addresses=addresses, ranks=ranks, keepers={"b": "a"})
    write_roster(memory, roster)
    board = Board()
    board.follow(roster, load_credentials(folder / "credentials", encrypted=True))
    stores = Stores(slots=ShardStore(memory), copies=ShardStore(memory / COPIES_NAME), pin=PeerPin(memory))
    mover = Mover(board, stores)
    try:
        yield Moved(memory, board, stores, mover)
    finally:
        mover.close(within_s=10)


def hold(board: Board, store: ShardStore, shard: int) -> None:
    """Host b says that it holds what lies in a store."""
    report = HostReport(host="b", generation=1, copies=tuple(store.held(shard)))
    board.hear("b", News(serial=1, report=report))


@pytest.mark.parametrize("meanwhile", ["nothing", "the rank goes on without it", "the slot is used again"])
def test_a_repair_that_comes_too_late_never_replaces_a_slot_that_ranks_have_mapped(
    meanwhile: str, tmp_path: Path
) -> None:
    arrived, released = threading.Event(), threading.Event()

    def slow(line: Line, header: SlotHeader) -> None:
        offer(line, header)
        line.send_bytes(memoryview(image_path(other.folder, 0, 0).read_bytes()))
        arrived.set()
        released.wait(10)
        line.send_bytes(memoryview(rest_path(other.folder, 0, 0).read_bytes()))

    make_credentials(tmp_path / "credentials")
    other = ShardStore(tmp_path / "other")
    write_shard(other.folder, 0, 0, 7, b"good" * 1000, of=4)
    peer = LyingPeer(load_credentials(tmp_path / "credentials", encrypted=True), slow, other.header(0, 0))
    with host_a(tmp_path, TWO, peer.address) as host:
        write_shard(host.memory, 0, 0, 7, b"good" * 1000, of=4)
        hold(host.board, other, 0)
        path = image_path(host.memory, 0, 0)
        with path.open("rb"):  # as the rank that maps it, so that its number is not given to another file
            before = path.stat().st_ino
            repair = host.ask(1, 0)
            host.mover.start()
            assert arrived.wait(10)
            if meanwhile == "the rank goes on without it":
                assert withdraw_repair(host.memory, repair.serial)
            elif meanwhile == "the slot is used again":
                host.stores.slots.write_header(0, 0, SlotHeader(layout="a" * 32))
            released.set()
            answer = host.answer(1)
            assert (answer.source == "b") == (path.stat().st_ino != before) == (meanwhile == "nothing")
        assert not list(host.memory.glob("rank*.new"))
    peer.close()


def test_a_rank_that_has_waited_long_enough_withdraws_what_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending, "_ANSWERED_WITHIN_S", 0.0)
    (tmp_path / ROSTER_NAME).touch()
    write_shard(tmp_path, 0, 0, 7, b"bad", of=4)
    seen = []
    asking = Mending(tmp_path, lambda: seen.extend(repairs_asked(tmp_path)))
    assert not asking.mend(0, 0, ShardStore(tmp_path).header(0, 0), "damaged")
    assert repairs_asked(tmp_path) == []
    monkeypatch.setattr(mending, "_ANSWERED_WITHIN_S", 60.0)

    def end() -> None:
        assert repairs_asked(tmp_path)
        raise SystemExit

    with pytest.raises(SystemExit):
        Mending(tmp_path, end).mend(0, 0, ShardStore(tmp_path).header(0, 0), "damaged")
    assert repairs_asked(tmp_path) == []


def test_a_repair_that_cannot_be_is_answered_and_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    with host_a(tmp_path, TWO) as host:
        for rank in (0, 1):
            write_shard(host.memory, rank, 0, 7, b"good" * 1000, of=4)
            write_shard(host.memory / COPIES_NAME, rank, 0, 7, b"good" * 1000, of=4)
        host.tell(0, 1)
        host.board.hear("c", News(serial=1, report=HostReport(host="c", generation=1)))
        assert host.board.reports().keys() == {"a"}  # a host that left the job, and whose watch is still closing
        for rank in (0, 1):
            host.ask(rank, rank)
        headers = host.memory / "rank-00000.headers"
        headers.unlink()
        headers.mkdir()  # nobody can map it
        host.mover.start()
        assert "shared memory" in host.answer(0).problem
        assert host.answer(1).source == "a"
        assert repairs_asked(host.memory) == []


def test_a_repair_goes_before_a_copy_that_is_under_way(tmp_path: Path) -> None:
    arrived, released = threading.Event(), threading.Event()

    def slow(line: Line, header: SlotHeader) -> None:
        offer(line, header)
        line.send_bytes(memoryview(bytes(PIECE_BYTES)))
        arrived.set()
        released.wait(10)
        line.send_bytes(memoryview(bytes(PIECE_BYTES)))
        line.receive()  # until the other end closes it

    make_credentials(tmp_path / "credentials")
    other = ShardStore(tmp_path / "other")
    write_shard(other.folder, 2, 0, 9, bytes(3 * PIECE_BYTES), of=4)
    peer = LyingPeer(load_credentials(tmp_path / "credentials", encrypted=True), slow, other.header(2, 0))
    with host_a(tmp_path, TWO, peer.address) as host:
        for rank in (0, 1):
            write_shard(host.memory, rank, 0, 9, b"good" * 1000, of=4)
            write_shard(host.memory / COPIES_NAME, rank, 0, 9, b"good" * 1000, of=4)
        host.tell(0, 1)
        hold(host.board, other, 2)
        host.board.lead(Word(generation=1, wanted=version_of(other.header(2, 0))))
        host.mover.start()
        assert arrived.wait(10)
        host.ask(1, 0)
        released.set()
        assert host.answer(1).source == "a"
        assert complete(host.memory / COPIES_NAME, 2) == []
    peer.close()


def test_a_layout_that_no_rank_can_read_any_more_comes_with_the_copy_of_a_slot(lab: Any, tmp_path: Path) -> None:
    with host_a(tmp_path, {"a": (0, 1)}) as host:
        spec = {"kind": "fsdp", "world": 2, "until": 14, "memory": str(host.memory), "pause_s": 0.01}
        lab.train("first", **spec, die_at=10, code=-9)
        headers = [RankSlots(host.memory, rank) for rank in (0, 1)]
        step = committed_steps([found.slots() for found in headers])[0]
        slots = [found.find(step) for found in headers]
        assert slots[0] is not None
        wanted = version_of(headers[0].read(slots[0]))
        host.board.lead(Word(generation=1, wanted=wanted))
        host.mover.start()
        wait_for(lambda: all(complete(host.memory / COPIES_NAME, rank) == [wanted] for rank in (0, 1)), "copies")
        host.tell(0, 1)
        for rank, slot in enumerate(slots):
            assert slot is not None
            path = image_path(host.memory, rank, slot)
            with path.open("r+b") as file:
                file.seek(-64, 2)
                file.write(bytes(64))
        lab.train("second", **spec)
        assert lab.restored_step("second") == step
        assert "its layout is gone or was changed); brought again from host a" in lab.errors("second")
