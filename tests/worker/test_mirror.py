"""A checkpoint in the mirror is whole or does not count, also when uploads fail, tear or are killed at any moment."""

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.storage.faulty_store import FaultyStore

from everstep.adapters.checkpoints.mirror_process import ELSEWHERE, MirrorOrder, MirrorProcess
from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.cli.main import main
from everstep.domain.errors import ConfigError, EvidenceError, ExitCode, WorldError
from everstep.worker.format import manifest as manifests
from everstep.worker.format.layout import tensors_name
from everstep.worker.format.manifest import Crc32, FileEntry, Manifest
from everstep.worker.mirror import upload as mirror_upload
from everstep.worker.mirror.store_copies import HELD, Mirror
from everstep.worker.mirror.upload import Uploader
from everstep.worker.observer import Observer
from everstep.worker.restoring.storage_listing import StorageListing


def save(directory: Path, step: int, *, seed: int = 0, size: int = 5000, world: int = 2) -> None:
    """A complete checkpoint of random bytes, as the saver would leave it."""
    folder = directory / manifests.folder_name(step)
    folder.mkdir(parents=True)
    entries, chance = [], random.Random(f"{seed}-{step}")
    for rank in range(world):
        content, crc = chance.randbytes(size), Crc32()
        crc.update(content)
        name = tensors_name(rank)
        (folder / name).write_bytes(content)
        entries.append(FileEntry(name=name, rank=rank, size_bytes=size, digest=crc.hexdigest()))
    facts = {"torch": "2.13", "thread_count": 1, "interval_steps": 10, "inexact_because": ()}
    manifest = Manifest(step=step, world_size=world, files=tuple(entries), **facts)  # type: ignore[arg-type]
    (folder / manifests.MANIFEST_NAME).write_bytes(manifests.encode(manifest))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run" if request.param == "file" else f"memory://{tmp_path}/run"


def complete(mirror: Mirror) -> list[int]:
    return [found.step for found in mirror.steps() if found.manifest is not None]


def test_what_was_uploaded_comes_back_byte_for_byte(url: str, directory: Path, tmp_path: Path) -> None:
    save(directory, 10)
    save(directory, 20)
    (directory / "step-00000020" / "more").mkdir()
    (directory / "step-00000020" / "more" / "notes.txt").write_text("what a later format may have")
    mirror = Mirror(ObjectStore(url))
    assert complete(mirror) == []
    for step in (10, 20, 20):  # the second time it is there already
        mirror.upload(directory, step)
    assert complete(mirror) == [20, 10]
    there = tmp_path / "elsewhere"
    assert mirror.fetch(there, newer_than=0) == (20, [])
    assert content(there / "step-00000020") == content(directory / "step-00000020")
    assert mirror.fetch(there, newer_than=20) == (None, [])
    assert [path.name for path in there.iterdir()] == ["step-00000020"]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000010", "step-00000020"]


def test_retention_keeps_the_newest_complete_ones_and_removes_what_never_ended(url: str, directory: Path) -> None:
    store = ObjectStore(url)
    mirror = Mirror(store)
    for step in (10, 20, 30, 40):
        save(directory, step)
        mirror.upload(directory, step)
    store.remove("step-00000020/manifest.json")
    store.remove("step-00000030/manifest.json")
    assert mirror.prune(40, 2) == [30, 20]
    assert complete(mirror) == [40, 10]  # the second complete one is far back, and stays
    store.write("step-00000050/manifest.json", b"{")
    assert mirror.prune(40, 1) == [10]
    assert complete(mirror) == [40]
    assert "step-00000050/manifest.json" in store.sizes()


def test_a_damaged_file_on_disk_is_never_published(url: str, directory: Path) -> None:
    save(directory, 10)
    path = directory / "step-00000010" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    mirror = Mirror(ObjectStore(url))
    with pytest.raises(EvidenceError, match=r"__1_0\.distcp .*was changed"):
        mirror.upload(directory, 10)
    assert ObjectStore(url).sizes() == {}


def test_a_damaged_step_in_the_mirror_is_refused_for_the_one_before_and_mended_by_the_next_upload(
    directory: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    mirror = Mirror(ObjectStore(url))
    for step in (10, 20):
        save(directory, step)
        mirror.upload(directory, step)
    path = tmp_path / "store" / "step-00000020" / "__0_0.distcp"
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    step, refused = mirror.fetch(tmp_path / "there", newer_than=0)
    assert (step, [number for number, _ in refused]) == (10, [20])
    assert "checksum" in refused[0][1]
    path.write_bytes(whole[:100])
    assert complete(mirror) == [10]
    mirror.upload(directory, 20)
    assert complete(mirror) == [20, 10]


def test_faults_of_the_store_delay_the_mirror_and_never_leave_half_a_step_that_counts(tmp_path: Path) -> None:
    chance = random.Random(7)
    for number in range(10):
        directory = tmp_path / f"{number}" / "checkpoints"
        url = f"faulty://{tmp_path}/{number}/store"
        faulty, newest, failures = Mirror(ObjectStore(url)), 0, 0
        for step in range(10, 60, 10):
            save(directory, step, seed=number, size=300)
            for _ in range(chance.randint(1, 4)):
                FaultyStore.chance = chance
                try:
                    faulty.upload(directory, step)
                    faulty.prune(step, 2)
                except WorldError:
                    failures += 1
                FaultyStore.chance = None
                found = complete(faulty)
                assert max(found, default=0) >= newest
                newest = max(found, default=0)
                for there in found[:1]:
                    target = tmp_path / "fetched"
                    manifest = next(s.manifest for s in faulty.steps() if s.step == there)
                    assert manifest is not None
                    faulty.fetch_step(manifest, target)
                    assert content(target) == content(directory / manifests.folder_name(there))
                    shutil.rmtree(target)
        faulty.upload(directory, 50)
        assert complete(faulty)[0] == 50
        assert failures


def order(directory: Path, tmp_path: Path, url: str = "") -> MirrorOrder:
    where = url or f"file://{tmp_path}/store"
    return MirrorOrder(url=where, directory=str(directory), keep=2, notes=str(tmp_path / "notes"), clock_zero_ns=0)


def settle(uploader: Uploader, *, within_s: float = 10.0) -> None:
    ends_s = time.monotonic() + within_s
    while not uploader.turn(closing=True):
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def notes(tmp_path: Path) -> list[tuple[str, dict[str, object]]]:
    path = tmp_path / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(kind, json.loads(body)) for kind, _, body in (line.partition(" ") for line in lines)]


def test_the_uploader_brings_the_newest_prunes_and_tells(directory: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(directory, step)
    uploader = Uploader(order(directory, tmp_path))
    settle(uploader)
    assert complete(Mirror(ObjectStore(f"file://{tmp_path}/store"))) == [30]  # those before came and went unseen
    assert [(kind, body["step"]) for kind, body in notes(tmp_path)] == [("CheckpointMirrored", 30)]


def test_a_look_from_before_the_end_of_the_job_is_not_the_last_one(directory: Path, tmp_path: Path) -> None:
    uploader = Uploader(order(directory, tmp_path))
    uploader.turn()  # begins to look, and finds nothing
    time.sleep(0.2)
    save(directory, 10)
    settle(uploader)
    assert uploader.mirrored == 10


def test_the_uploader_follows_a_script_that_chose_its_own_directory(directory: Path, tmp_path: Path) -> None:
    save(tmp_path / "own", 10)
    (directory / ELSEWHERE).write_text(f"{tmp_path / 'own'}\n")
    uploader = Uploader(order(directory, tmp_path))
    settle(uploader)
    assert uploader.mirrored == 10


def test_a_store_that_fails_is_told_of_once_and_asked_again_with_backoff(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_upload, "BACKOFF_S", (0.02, 0.05))
    save(directory, 10)
    (tmp_path / "store").write_text("in the way")
    uploader = Uploader(order(directory, tmp_path))
    ends_s = time.monotonic() + 1.0
    while time.monotonic() < ends_s:
        uploader.turn()
        time.sleep(0.005)
    [(kind, body)] = notes(tmp_path)
    assert (kind, body["step"]) == ("CheckpointDelayed", 10)
    (tmp_path / "store").unlink()
    settle(uploader)
    assert uploader.mirrored == 10


@contextlib.contextmanager
def uploading(directory: Path, tmp_path: Path) -> Iterator[MirrorProcess]:
    process = MirrorProcess(order(directory, tmp_path))
    process.ensure()
    try:
        yield process
    finally:
        assert process.close(within_s=30)


def test_after_kill_9_of_the_uploader_at_any_moment_the_mirror_has_a_whole_step_and_never_an_older_one(
    tmp_path: Path, directory: Path
) -> None:
    chance, newest = random.Random(3), 0
    mirror = Mirror(ObjectStore(f"file://{tmp_path}/store"))
    job = json.dumps(asdict(order(directory, tmp_path)))
    for number in range(1, 6):
        save(directory, number * 10, size=4 << 20)
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "everstep.worker.mirror.upload", str(read_end), job], pass_fds=[read_end]
        )
        os.close(read_end)
        store = tmp_path / "store" / manifests.folder_name(number * 10)
        ends_s = time.monotonic() + 20
        while not store.exists() and time.monotonic() < ends_s:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(write_end)
        found = complete(mirror)
        assert max(found, default=0) >= newest
        newest = max(found, default=0)
        there = tmp_path / f"there-{number}"
        step, refused = mirror.fetch(there, newer_than=0)
        assert step == (newest or None)
        assert all("never ended" in reason for _, reason in refused)
    with uploading(directory, tmp_path):
        pass
    assert complete(mirror)[0] == 50
    assert not list(directory.glob(f"{HELD}*"))


def test_an_uploader_that_finds_an_earlier_one_at_work_waits_for_it_even_when_the_run_is_over(
    directory: Path, tmp_path: Path
) -> None:
    save(directory, 10)
    lock = os.open(directory / ".mirror.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # what the earlier one, of a start that was killed, does
    process = MirrorProcess(order(directory, tmp_path))
    assert not process.close(within_s=2.0)
    os.close(lock)
    assert process.close(within_s=30.0)
    assert complete(Mirror(ObjectStore(f"file://{tmp_path}/store"))) == [10]


def test_a_lock_that_a_dead_host_left_on_a_server_is_not_waited_for_without_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror_upload, "_DEAD_AFTER_S", 0.3)
    holder, waiting = mirror_upload._Lock(directory), mirror_upload._Lock(directory)
    holder.take()
    (directory / f"{HELD}step-00000010").mkdir()
    waiting.take()
    assert "is held by an uploader that does nothing; going on without it" in caplog.text
    assert (directory / f"{HELD}step-00000010").exists()  # it may be at work after all


def test_prune_says_what_the_disk_does_not_remove_and_removes_what_a_killed_one_left(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        save(directory, step)
    (directory / ".tmp-old-step-00000010").touch()  # a folder cannot be renamed to a file
    assert main(["checkpoints", str(directory), "prune", "--keep", "2"]) == ExitCode.IO_ERROR
    assert ".tmp-old-step-00000010" in capsys.readouterr().err
    assert manifests.complete_steps(directory) == [30, 20, 10]
    (directory / ".tmp-old-step-00000010").unlink()
    (directory / ".tmp-old-step-00000010" / "half").mkdir(parents=True)
    assert main(["checkpoints", str(directory), "prune", "--keep", "1"]) == ExitCode.DONE
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000030"]


def listing(directory: Path, url: str) -> StorageListing:
    observer = Observer(None)
    found = StorageListing(directory, observer, 1)
    found._mirror_url = url
    return found


def ask(asked: StorageListing, directory: Path, in_memory: int | None) -> list[int]:
    def look() -> list[Manifest]:
        return [manifests.read(directory / manifests.folder_name(s)) for s in manifests.complete_steps(directory)[:1]]

    while (found := asked.ask(look, in_memory)) is None:
        pass
    return [manifest.step for manifest in found]


def test_a_restore_fetches_what_the_disk_lacks_and_asks_no_mirror_when_memory_has_all(
    directory: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    for step in (10, 20):
        save(tmp_path / "first", step)
        Mirror(ObjectStore(url)).upload(tmp_path / "first", step)
    save(directory, 10)
    assert ask(listing(directory, url), directory, in_memory=30) == [10]
    assert ask(listing(directory, url), directory, in_memory=None) == [20]
    assert content(directory / "step-00000020") == content(tmp_path / "first" / "step-00000020")
    shutil.rmtree(tmp_path / "store")
    assert ask(listing(directory, url), directory, in_memory=None) == [20]


def test_a_mirror_that_cannot_be_read_ends_a_start_that_has_nothing_else(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.worker.restoring.storage_listing.BACKOFF_S", (0.01,))
    (tmp_path / "store").write_text("no folder")
    monkeypatch.setattr(ObjectStore, "sizes", lambda *_: (_ for _ in ()).throw(WorldError("it is away")))
    url = f"file://{tmp_path}/store"
    with pytest.raises(ConfigError, match="to start afresh instead, leave out --checkpoint-mirror"):
        ask(listing(directory, url), directory, in_memory=None)
    save(directory, 10)
    assert ask(listing(directory, url), directory, in_memory=None) == [10]


def test_a_url_without_its_plugin_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="nowhere://bucket cannot be used"):
        ObjectStore("nowhere://bucket")


def test_the_command_line_lists_verifies_fetches_and_prunes_a_mirror(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store"
    for step in (10, 20, 30):
        save(directory, step)
        Mirror(ObjectStore(url)).upload(directory, step)
    (tmp_path / "store" / "step-00000030" / "manifest.json").unlink()
    assert main(["checkpoints", url, "list"]) == ExitCode.DONE
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["step", "30", "20", "10"]
    assert "its upload never ended" in listed[1]
    assert "in the mirror" in listed[2]
    assert listed[2].endswith("complete; resumes exactly")
    assert main(["checkpoints", str(directory), "list", "--mirror", url]) == ExitCode.DONE
    assert len(capsys.readouterr().out.splitlines()) == 7
    out = tmp_path / "out"
    assert main(["checkpoints", url, "fetch", "--out", str(out)]) == ExitCode.DONE
    assert content(out / "step-00000020") == content(directory / "step-00000020")
    assert main(["checkpoints", url, "verify", "--step", "20"]) == ExitCode.DONE
    (tmp_path / "store" / "step-00000020" / "__0_0.distcp").write_bytes(b"!" * 5000)
    assert main(["checkpoints", url, "verify", "--step", "20"]) == ExitCode.SCRIPT_BUG
    assert main(["checkpoints", url, "prune", "--keep", "1"]) == ExitCode.DONE
    assert "removed step 10" in capsys.readouterr().out
    assert main(["checkpoints", url, "list", "--step", "10"]) == ExitCode.USAGE
    assert main(["checkpoints", str(directory), "fetch", "--out", str(out)]) == ExitCode.USAGE


def test_at_the_end_a_store_gets_its_time_however_long_ago_it_last_moved(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_upload, "STILL_S", 0.3)
    monkeypatch.setattr(mirror_upload, "BACKOFF_S", (0.01,))
    uploader = Uploader(order(directory, tmp_path))
    time.sleep(0.4)  # a job without a checkpoint, for longer than a store may stand still
    save(directory, 10)
    (tmp_path / "store").write_text("in the way")
    began_s = time.monotonic()
    settle(uploader)
    assert time.monotonic() - began_s >= 0.3
    assert uploader.mirrored < 0


def test_a_disk_that_takes_no_links_is_uploaded_from_in_place(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    save(directory, 10)
    monkeypatch.setattr(os, "link", refuse)
    mirror = Mirror(ObjectStore(f"file://{tmp_path}/store"))
    mirror.upload(directory, 10)
    assert complete(mirror) == [10]
    assert [path.name for path in directory.iterdir()] == ["step-00000010"]
