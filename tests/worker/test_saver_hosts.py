"""The savers of several hosts make one checkpoint: complete or not there, whoever is killed and whenever."""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.worker.peer_hosts import LAYOUT, MB, TWO, Cluster, SaverOfHost, wait_for, write_slot

from everstep.adapters.checkpoints.leader_page import LeaderPage, LeaderWord, Stage
from everstep.adapters.checkpoints.memory_folder import WANTED_NAME
from everstep.adapters.checkpoints.memory_slots import RankSlots, SlotHeader, image_path, rest_path
from everstep.adapters.checkpoints.peer_files import PeerRoster, write_roster
from everstep.adapters.checkpoints.saver_process import KEPT_NAME
from everstep.domain.errors import EvidenceError
from everstep.worker.format import layout as layouts
from everstep.worker.format import manifest as manifests
from everstep.worker.format.publishing import publish
from everstep.worker.saving import among_hosts, saver
from everstep.worker.saving.among_hosts import Leading, roster_of, size_of, try_name
from everstep.worker.saving.saver_order import SaverOrder, order_saver
from everstep.worker.saving.slot_writing import Overtaken, SlotFiles


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
            late = set(found.on_disk()[2:])  # the kill before came after a step was whole and before an old one went
            found.save(step, slot=step % 3, size=4 * MB)
            time.sleep(0.4 * chance.random())  # some moment of the save
            killed = chance.choice([["a"], ["b"], ["b"], ["a", "b"]])
            for name in killed:
                found.savers[name].kill()
            assert set(found.on_disk()) <= {step, step - 1, step - 2} | late
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


def leader_in(folder: Path) -> Leading:
    roster = roster_of(folder)
    assert roster is not None
    return Leading(folder, roster, order=1)


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
    leading = leader_in(folder)
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


def test_a_file_that_another_host_renames_while_sizes_are_added_up_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensors").write_bytes(b"1234")
    fresh = tmp_path / "part-00002.json.new"
    fresh.touch()
    listed = list(os.scandir(tmp_path))
    fresh.rename(tmp_path / "part-00002.json")
    monkeypatch.setattr(os, "scandir", lambda _: nullcontext(listed))
    assert size_of(tmp_path) == 1 + 4


@pytest.mark.parametrize(("failures", "on_disk"), [(1, [9]), (99, [7])])
def test_at_the_end_a_newest_step_that_fails_is_tried_again_and_an_older_one_does_not_let_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, on_disk: list[int]
) -> None:
    folder = alone(tmp_path, monkeypatch)
    for rank in range(4):
        write_slot(folder, rank, 1, 9, of=4)
    left = [OSError(errno.EIO, "Input/output error")] * failures

    def failing(temporary: Path, target: Path) -> None:
        if target.name.endswith("9") and left:
            raise left.pop()
        publish(temporary, target)

    monkeypatch.setattr(saver, "publish", failing)
    monkeypatch.setattr(saver, "_AGAIN_AFTER_S", 0.0)
    monkeypatch.setattr(Leading, "gather", lambda *_: [])
    leader = saver.Saver(folder)
    leader.flush()
    assert manifests.all_steps(tmp_path / "disk")[:1] == on_disk
    assert leader.keeps_folder == (on_disk != [9])


class Clock:
    """The saver's time; whoever sleeps gives the turn to the leader of another host."""

    def __init__(self, each: Callable[[float], None]) -> None:
        self._now_s, self._each = 1000.0, each

    def monotonic(self) -> float:
        return self._now_s

    def monotonic_ns(self) -> int:
        return int(self._now_s * 1e9)

    def sleep(self, _: float) -> None:
        self._now_s += 1.0
        self._each(self._now_s - 1000.0)

    def waited_s(self) -> float:
        return self._now_s - 1000.0


def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the host that does not lead."""
    folder = alone(tmp_path, monkeypatch)
    addresses = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    write_roster(folder, PeerRoster(generation=1, host="b", addresses=addresses, ranks=TWO))
    return folder


def announced(tmp_path: Path, **changes: object) -> tuple[LeaderWord, Path]:
    """A try of step 7, and its folder."""
    word = LeaderWord(serial=5, step=7, attempt=1, layout=layouts.digest_of(LAYOUT), order=1)
    temporary = tmp_path / "disk" / f"{saver.TEMPORARY}{try_name(word)}"
    temporary.mkdir(parents=True)
    return replace(word, **changes), temporary


@pytest.mark.parametrize("stage", [Stage.WORKING, Stage.LAST])
def test_a_host_whose_run_is_over_stays_as_long_as_anybody_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    folder = following(tmp_path, monkeypatch)
    word, temporary = announced(tmp_path, stage=stage)
    page = LeaderPage(folder)
    page.write(word)

    def lead(waited_s: float) -> None:
        if waited_s >= 300:
            page.write(replace(word, step=0, durable=7, stage=Stage.DONE))
        elif waited_s % 40 == 0:
            (temporary / "__0_0.distcp").write_bytes(bytes(int(waited_s)))

    monkeypatch.setattr(saver, "time", clock := Clock(lead))
    follower = saver.Saver(folder)
    follower.flush()
    assert (temporary / "part-00002.json").exists()
    assert not follower.keeps_folder
    assert clock.waited_s() == 300


def test_a_host_whose_run_is_over_leaves_a_leader_that_writes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = following(tmp_path, monkeypatch)
    word, _ = announced(tmp_path)
    LeaderPage(folder).write(word)
    monkeypatch.setattr(saver, "time", clock := Clock(lambda _: None))
    follower = saver.Saver(folder)
    follower.flush()
    assert follower.keeps_folder
    assert 60 < clock.waited_s() < 70


def test_words_of_another_attempt_make_nobody_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = following(tmp_path, monkeypatch)
    page = LeaderPage(folder)
    clock = Clock(lambda waited_s: page.write(LeaderWord(order=2, serial=int(waited_s), step=7)))
    monkeypatch.setattr(saver, "time", clock)
    follower = saver.Saver(folder)
    follower.flush()
    assert follower.keeps_folder
    assert clock.waited_s() < 15


def test_the_word_that_is_tested_is_the_one_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = following(tmp_path, monkeypatch)
    word, temporary = announced(tmp_path)
    heard = iter([LeaderWord(order=1)])
    monkeypatch.setattr(LeaderPage, "read", lambda _: next(heard, word))
    saver.Saver(folder).turn()
    assert (temporary / "part-00002.json").exists()


def test_a_step_is_announced_when_its_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = alone(tmp_path, monkeypatch)
    monkeypatch.setattr(among_hosts, "SILENT_S", 0.05)
    seen: list[bool] = []

    def look(_: LeaderPage, word: LeaderWord) -> None:
        if word.step:
            seen.append((tmp_path / "disk" / f"{saver.TEMPORARY}{try_name(word)}").is_dir())

    monkeypatch.setattr(LeaderPage, "amend", look)
    saver.Saver(folder).turn()
    assert seen == [True]


def test_an_old_checkpoint_goes_also_where_its_removal_was_broken_off_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disk = alone(tmp_path, monkeypatch), tmp_path / "disk"
    (folder / "peers.json").unlink()
    order_saver(folder, replace(order(disk), every_steps=1))
    one = saver.Saver(folder)
    one.turn()
    (disk / f"{saver.TEMPORARY}old-{manifests.folder_name(7)}" / "rest").mkdir(parents=True)
    for slot, step in ((1, 8), (2, 9)):
        for rank in range(4):
            write_slot(folder, rank, slot, step, of=4)
        one.turn()
    assert sorted(path.name for path in disk.iterdir()) == [manifests.folder_name(8), manifests.folder_name(9)]


@pytest.mark.parametrize("path_of", [image_path, rest_path])
@pytest.mark.parametrize("content", [b"", b"other", None])
def test_a_slot_that_is_made_anew_while_it_is_read_is_overtaken_and_no_failure_of_the_disk(
    tmp_path: Path, path_of: Callable[[Path, int, int], Path], content: bytes | None
) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    write_slot(folder, 0, 0, 7, of=1)
    headers = RankSlots(folder, 0)
    files = SlotFiles(folder, [headers], lambda: None)
    found = files.find(7, [0])
    path = path_of(folder, 0, 0)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for name, expected in (("damaged", EvidenceError), ("anew", Overtaken)):
        (tmp_path / name).mkdir()
        with pytest.raises(expected):
            files.write(tmp_path / name, found)
        headers.write(0, SlotHeader())


def test_a_leader_whose_job_went_on_under_another_one_leaves_that_one_s_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    old = leader_in(folder)
    old.tell(durable=7)
    new = LeaderWord(order=2, serial=3, step=9, durable=8)
    page = LeaderPage(folder)
    page.write(new)
    old.end(overtaken=False, durable=7)
    old.tell(stage=Stage.DONE)
    assert page.read() == new


def test_after_being_overtaken_a_later_step_is_asked_for_long_before_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = alone(tmp_path, monkeypatch)
    order_saver(folder, order(tmp_path / "disk", every_s=3600.0))

    def overtaken(*_: object) -> list[object]:
        raise Overtaken

    monkeypatch.setattr(Leading, "gather", overtaken)
    monkeypatch.setattr(saver, "_AGAIN_AFTER_S", 0.0)
    leader = saver.Saver(folder)
    page = LeaderPage(folder)
    wait_for(lambda: leader.turn() or page.read().keep_from, "a later step to be asked for", within_s=5)
