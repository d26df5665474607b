"""The savers of several hosts make one checkpoint: complete or not there, whoever is killed and whenever."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.worker.peer_hosts import LAYOUT, MB, TWO, Cluster, SaverOfHost, wait_for, write_slot

from everstep.adapters.leader_page import LeaderPage, LeaderWord, Stage
from everstep.adapters.memory_folder import WANTED_NAME
from everstep.adapters.peer_files import PeerRoster, write_roster
from everstep.adapters.saver_process import KEPT_NAME
from everstep.domain.errors import EvidenceError
from everstep.worker.format import layout as layouts
from everstep.worker.format import manifest as manifests
from everstep.worker.saving import among_hosts, saver
from everstep.worker.saving.among_hosts import Leading, roster_of, try_name
from everstep.worker.saving.saver_order import SaverOrder, order_saver


class Job:
    """Two hosts with replicators and savers, and the disk that they share."""

    def __init__(self, cluster: Cluster, disk: Path) -> None:
        self.cluster, self.disk = cluster, disk
        cluster.tell()
        self.savers = {name: SaverOfHost(host) for name, host in cluster.hosts.items()}
        for host in cluster.hosts.values():
            order_saver(host.folder, order(disk))
        for found in self.savers.values():
            found.start()

    def save(self, step: int, *, slot: int, size: int = MB) -> None:
        for rank, folder in enumerate(self.cluster.memories()):
            write_slot(Path(folder), rank, slot, step, of=4, size=size)

    def on_disk(self) -> list[int]:
        """The complete steps; whatever has a checkpoint's name must be one, to the last byte."""
        found = manifests.all_steps(self.disk) if self.disk.exists() else []
        for step in found:
            folder = self.disk / manifests.folder_name(step)
            try:
                check(folder)
            except (EvidenceError, OSError):
                if folder.exists():
                    raise  # else it was pruned meanwhile
        return found

    def leftovers(self) -> list[str]:
        return [path.name for path in self.disk.iterdir() if path.name.startswith(".")]


def check(folder: Path) -> None:
    entries = manifests.read(folder).files
    assert len(entries) == 2 + 2 * 4
    for entry in entries:
        manifests.read_verified(folder, entry)
    assert {path.name for path in folder.iterdir()} == {manifests.MANIFEST_NAME, *(e.name for e in entries)}


def order(disk: Path, every_s: float = 0.05) -> SaverOrder:
    return SaverOrder(directory=str(disk), world_size=4, every_steps=None, every_s=every_s, keep=2, attempt=1)


@contextmanager
def job(tmp_path: Path) -> Iterator[Job]:
    with Cluster(tmp_path, TWO) as cluster:
        found = Job(cluster, tmp_path / "disk")
        try:
            yield found
        finally:
            for one in found.savers.values():
                one.kill()
        assert "defect" not in cluster.errors()
        assert "the saver failed" not in cluster.errors()


def test_each_host_writes_its_own_ranks_and_the_flush_at_the_end_takes_the_last_step(tmp_path: Path) -> None:
    with job(tmp_path) as found:
        found.save(7, slot=0)
        wait_for(lambda: found.on_disk() == [7], f"step 7 on disk; {found.cluster.errors()}")
        wait_for(lambda: LeaderPage(found.cluster.hosts["b"].folder).read().durable == 7, "b to know of it")
        for host in found.cluster.hosts.values():
            order_saver(host.folder, order(found.disk, every_s=3600.0))
        found.save(9, slot=1)
        for host in found.cluster.hosts.values():
            host.end()
        for one in found.savers.values():
            one.end()
        for one in found.savers.values():
            assert one.wait(20) == 0
        assert found.on_disk() == [9, 7]
        assert found.leftovers() == []
        assert not any(host.folder.exists() for host in found.cluster.hosts.values())


def test_savers_killed_at_any_moment_leave_whole_checkpoints_or_none(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("EVERSTEP_FUZZ_SEED", "3")))
    kills = int(os.environ.get("EVERSTEP_FUZZ_KILLS", "4"))
    with job(tmp_path) as found:
        for step in range(1, 1 + kills):
            found.save(step, slot=step % 3, size=4 * MB)
            time.sleep(0.4 * chance.random())  # some moment of the save
            killed = chance.choice([["a"], ["b"], ["b"], ["a", "b"]])
            for name in killed:
                found.savers[name].kill()
            assert set(found.on_disk()) <= {step, step - 1, step - 2}
            for name in killed:
                found.savers[name].start()
            wait_for(lambda step=step: found.on_disk()[:1] == [step], f"step {step}; {found.cluster.errors()}")
        wait_for(lambda: found.leftovers() == [], "what was left behind to go")


def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The leader's host of a job whose other host is gone; its ranks' last headers are still here."""
    monkeypatch.setattr(among_hosts, "SILENT_S", 1.0)
    folder = tmp_path / "memory"
    folder.mkdir()
    addresses = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    write_roster(folder, PeerRoster(generation=1, host="a", addresses=addresses, ranks=TWO))
    for rank in range(4):
        write_slot(folder, rank, 0, 7, of=4)
    order_saver(folder, order(tmp_path / "disk"))
    return folder


def test_a_host_that_is_gone_makes_the_leader_give_up_the_step_and_keep_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    leader = saver.Saver(folder)
    leader.turn()
    assert (
        "step 7 could not be made durable (host b has written nothing for 1 s)" in (folder / "saver.error").read_text()
    )
    assert list((tmp_path / "disk").iterdir()) == []
    leader.flush()
    assert leader.keeps_folder
    assert LeaderPage(folder).read().stage is Stage.DONE


def test_a_start_that_waits_for_the_folder_gets_it_at_once_with_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    monkeypatch.setattr(among_hosts, "SILENT_S", 60.0)
    leader = saver.Saver(folder)
    (folder / WANTED_NAME).touch()
    leader.flush()
    assert leader.keeps_folder
    assert list((tmp_path / "disk").glob("*")) == []


def test_the_leader_begins_nothing_between_a_new_attempt_and_its_ranks_first_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    leader = saver.Saver(folder)
    addresses = {"a": "127.0.0.1:1", "c": "127.0.0.1:3"}
    ranks = {"a": (0, 1), "c": (2, 3)}
    write_roster(folder, PeerRoster(generation=2, attempt=2, host="a", addresses=addresses, ranks=ranks))
    leader.turn()
    leader.flush()
    assert leader.keeps_folder
    assert not (tmp_path / "disk").exists()
    assert not (folder / "saver.error").exists()


def test_a_host_that_is_no_part_of_the_attempt_any_more_writes_nothing_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    addresses = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    write_roster(folder, PeerRoster(generation=1, host="b", addresses=addresses, ranks=TWO))
    spare = saver.Saver(folder)
    word = LeaderWord(serial=5, step=7, attempt=1, layout=layouts.digest_of(LAYOUT), order=2)
    LeaderPage(folder).write(word)
    temporary = tmp_path / "disk" / f"{saver.TEMPORARY}{try_name(word)}"
    temporary.mkdir(parents=True)
    spare.turn()
    assert list(temporary.iterdir()) == []
    LeaderPage(folder).write(replace(word, order=1))
    spare.turn()
    assert (temporary / "part-00002.json").exists()
    assert (temporary / "__3_0.distcp").exists()


def test_a_host_whose_leader_is_silent_keeps_its_memory_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    monkeypatch.setattr(saver, "_LEADER_ENDS_WITHIN_S", 0.2)
    addresses = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    write_roster(folder, PeerRoster(generation=1, host="b", addresses=addresses, ranks=TWO))
    follower = saver.Saver(folder)
    follower.flush()
    assert follower.keeps_folder
    LeaderPage(folder).write(LeaderWord(order=1, durable=7, stage=Stage.DONE))
    follower.flush()
    assert not follower.keeps_folder
    (folder / KEPT_NAME).touch()
    saver.Saver(folder)
    assert not (folder / KEPT_NAME).exists()


def test_a_part_of_another_attempt_is_not_taken_and_a_later_step_is_asked_to_stay(tmp_path: Path) -> None:
    with job(tmp_path) as found:
        for rank, folder in enumerate(found.cluster.memories()):
            write_slot(Path(folder), rank, 0, 7, of=4, attempt=1 if rank < 2 else 2)
        page = LeaderPage(found.cluster.hosts["b"].folder)
        wait_for(lambda: page.read().keep_from >= 9, f"a later step to be asked for; {found.cluster.errors()}")
        assert found.on_disk() == []
        found.save(9, slot=1)
        wait_for(lambda: found.on_disk() == [9], f"step 9; {found.cluster.errors()}")


def test_after_being_overtaken_the_leader_announces_steps_ahead_and_takes_the_newest_where_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    roster = roster_of(folder)
    assert roster is not None
    leading = Leading(folder, roster, order=1)
    assert leading.choose([10, 8], stride=2) == 10
    leading.end(overtaken=True, durable=0)
    assert leading.choose([12, 10], stride=2) is None
    assert LeaderPage(folder).read().keep_from == 16
    assert leading.choose([14, 12], stride=2) is None
    assert leading.choose([18, 16], stride=2) == 16
    leading.end(overtaken=False, durable=16)
    monkeypatch.setattr(among_hosts, "_STILL_S", 0.0)
    assert leading.choose([20], stride=2) is None
    time.sleep(0.01)
    assert leading.choose([20], stride=2) == 20
