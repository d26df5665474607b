"""Whatever happens to a save or to its files, one complete checkpoint is there, and a damaged one is never used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.adapters.workers.progress_page import PageReader, create_page
from everstep.domain.phases import Phase
from everstep.worker.format import manifest as manifests

ALONE = {"kind": "alone", "world": 1}
EVERY_3 = {"save_every_steps": 3, "keep": 3}
PATIENCE_S = 20
SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(__file__).parents[2] / "src"


def truncate(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def flip_one_bit(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def change_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"thread_count": 1', '"thread_count": 2'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "__0_0.distcp has {half} bytes, expected {size}"),
        (flip_one_bit, "__0_0.distcp was changed after it was written: a checksum is another between byte"),
        (lose_a_file, "__0_0.distcp is missing, expected {size} bytes"),
        (lose_the_manifest, "step-00000009 has no manifest.json, so its save never finished"),
        (change_the_manifest, "manifest.json was changed after it was written"),
    ],
)
def test_a_damaged_checkpoint_is_refused_for_the_one_before(
    damage: Callable[[Path], None], reason: str, lab: Any
) -> None:
    first = lab.train("first", **ALONE, until=9, attach=EVERY_3)
    newest = lab.directory / "step-00000009"
    size = (newest / "__0_0.distcp").stat().st_size
    damage(newest)
    second = lab.train("second", **ALONE, until=9, attach=EVERY_3)
    assert lab.restored_step("second") == 6
    (told,) = lab.refusals("second")
    assert reason.format(size=size, half=size // 2) in told
    assert second == [first[0][6:]]
    assert manifests.complete_steps(lab.directory) == [9, 6, 3]


def test_damage_that_one_rank_sees_makes_all_ranks_take_the_one_before(lab: Any) -> None:
    spec = {"kind": "ddp", "world": 2, "attach": EVERY_3}
    first = lab.train("first", **spec, until=9)
    path = lab.directory / "step-00000009" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    assert lab.train("second", **spec, until=9) == [rank[6:] for rank in first]
    assert "__1_0.distcp" in lab.refusals("second")[0]


def test_when_all_are_damaged_the_run_starts_afresh(lab: Any) -> None:
    first = lab.train("first", **ALONE, until=6, attach=EVERY_3)
    for folder in lab.directory.glob("step-*"):
        truncate(folder)
    assert lab.train("second", **ALONE, until=6, attach=EVERY_3) == first
    assert len(lab.refusals("second")) == 2


def test_when_the_only_one_turns_out_damaged_while_it_is_read_nothing_is_trained_on_it(lab: Any) -> None:
    first = lab.train("first", **ALONE, until=3)
    flip_one_bit(lab.directory / "step-00000003")
    assert lab.train("second", **ALONE, until=3, code=1) == [[]]
    assert "found damaged while it was read into the model" in lab.errors("second")
    assert lab.train("third", **ALONE, until=3) == first


@pytest.mark.parametrize("watched", [1, 3 << 20, 8 << 20, "manifest.json", "next"])
def test_a_kill_in_the_middle_of_a_save_leaves_a_complete_checkpoint(watched: int | str, lab: Any) -> None:
    spec = {"kind": "fsdp", "world": 2, "width": 1500, "attach": {"save_every_steps": 1}}
    pids = lab.start("first", **spec, until=1000)
    deadline_s = time.monotonic() + PATIENCE_S
    while not save_has_reached(watched, lab.directory):
        assert time.monotonic() < deadline_s, lab.errors("first")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert lab.wait() == [-9, -9]
    newest = manifests.complete_steps(lab.directory)[0]
    resumed = lab.train("second", **spec, until=newest + 1)
    assert lab.restored_step("second") == newest
    assert lab.refusals("second") == []
    assert [[line["step"] for line in rank] for rank in resumed] == [[newest + 1]] * 2
    assert sorted(path.name for path in lab.directory.iterdir()) == [
        manifests.folder_name(newest),
        manifests.folder_name(newest + 1),
    ]


def save_has_reached(what: int | str, directory: Path) -> bool:
    """Whether a save after the first stands where the test wants it killed."""
    if not (directory / "step-00000001").exists():
        return False
    for temporary in directory.glob(".tmp-step-*"):
        if what == "next":
            return True
        try:
            if isinstance(what, int):
                return (temporary / "__0_0.distcp").stat().st_size >= what
            return (temporary / what).exists()
        except FileNotFoundError:
            continue
    return False


@pytest.mark.parametrize(("kind", "rank"), [("fsdp", 1), ("ddp", 0)])
def test_a_full_disk_does_not_stop_training(kind: str, rank: int, lab: Any) -> None:
    spec = {"kind": kind, "world": 2, "width": 600, "attach": {"save_every_steps": 2}}
    whole = lab.train("whole", **spec, until=6, directory=str(lab.folder / "other"))
    full = lab.train("full", **spec, until=6, file_limit=1 << 20, file_limit_ranks=[rank])
    assert full == whole
    assert list(lab.directory.iterdir()) == []
    assert lab.errors("full").count("training goes on") == 1
    assert "the final state, step 6, is on no disk" in lab.errors("full")
    assert [f"__{rank}_0.distcp: File too large" in reason for reason in lab.failed_saves("full")] == [True] * 3


def test_a_newer_format_is_refused_with_what_to_do(lab: Any) -> None:
    lab.train("first", **ALONE, until=3)
    path = lab.directory / "step-00000003" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    lab.train("second", **ALONE, until=6, code=1)
    assert "format 99 and this everstep reads up to 2: upgrade everstep" in lab.errors("second")


def test_another_model_is_refused_with_what_differs(lab: Any) -> None:
    lab.train("first", **ALONE, until=3)
    lab.train("second", **ALONE, until=6, width=25, code=1)
    assert "(1, 25)" in lab.errors("second")
    assert "ConfigError" in lab.errors("second")


def test_a_directory_that_cannot_be_written_is_told_before_training(lab: Any) -> None:
    lab.directory.write_text("a file")
    assert lab.train("first", **ALONE, until=3, code=1) == [[]]
    assert "cannot be written" in lab.errors("first")


def test_old_checkpoints_and_leftovers_of_dead_attempts_go_and_the_newest_stay(lab: Any) -> None:
    leftover = lab.directory / ".tmp-step-00000002-a0000"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"torn")
    lab.train("first", **ALONE, until=10, attach={"save_every_steps": 3})
    assert sorted(path.name for path in lab.directory.iterdir()) == ["step-00000009", "step-00000010"]
    saved = [body for kind, body in lab.notes("first") if kind == "CheckpointSaved"]
    assert [body["step"] for body in saved] == [3, 6, 9, 10]
    files = [path for path in (lab.directory / "step-00000010").iterdir() if path.name != "manifest.json"]
    assert saved[-1]["size_bytes"] == sum(path.stat().st_size for path in files)


def test_the_copied_folder_of_a_checkpoint_is_a_checkpoint(lab: Any) -> None:
    first = lab.train("first", **ALONE, until=6, attach=EVERY_3)
    other = lab.folder / "other"
    shutil.copytree(lab.directory / "step-00000003", other / "step-00000003")
    assert lab.train("second", **ALONE, until=6, attach=EVERY_3, directory=str(other)) == [first[0][3:]]


def test_the_progress_page_shows_the_phases_in_order_and_counts_over_attempts(lab: Any) -> None:
    spec = {"kind": "ddp", "world": 3, "attach": {"save_every_steps": 4}}
    lab.train("first", **spec, until=4)
    pages = [lab.folder / f"page-{rank}" for rank in range(3)]
    for rank, page in enumerate(pages):
        create_page(page, rank=rank, world_size=3, attempt=2)
    lab.train("second", **spec, until=6, pages=[str(page) for page in pages])
    view = PageReader(pages[0], to_run_s=lambda ns: ns / 1e9).view()
    phases = [mark.phase for mark in view.marks]
    changes = [phase for phase, before in zip(phases, [None, *phases], strict=False) if phase is not before]
    before_training = [Phase.STARTING, Phase.RESTORING, Phase.STARTING, Phase.RESTORING, Phase.STARTING]
    assert changes == [*before_training, Phase.WARMING_UP, Phase.TRAINING, Phase.SAVING, Phase.TRAINING]
    assert view.step == 6
    assert [mark.step for mark in view.marks if mark.is_step] == [5, 6]


def test_wrong_uses_get_a_sentence_and_save_works_inside_and_outside_of_the_loop(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(SCRIPTS / "misuse.py"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
