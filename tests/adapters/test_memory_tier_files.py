"""The memory tier's pages read back as written, torn ones read as torn, and folders live as long as their runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.adapters.checkpoints import memory_folder
from everstep.adapters.checkpoints.memory_slots import (
    RankSlots,
    SavePages,
    SavePlan,
    SaverWord,
    SlotHeader,
    ranks_present,
)
from everstep.domain.errors import WorldError
from everstep.policy.checkpoints import SlotState
from everstep.policy.staging import Course, Way

HEADER = SlotHeader(
    state=SlotState.COMPLETE,
    step=1 << 40,
    layout="ab" * 16,
    image_bytes=1 << 33,
    rest_bytes=77,
    image_seal=1,
    rest_seal=0xFFFFFFFF,
    attempt=3,
    facts=b'{"a": 1}',
)


def every(stride: int, way: Way = Way.TRIAL) -> Course:
    return Course(stride=stride, way=way)


def test_a_header_reads_back_from_another_mapping(tmp_path: Path) -> None:
    RankSlots(tmp_path, 4).write(2, HEADER)
    other = RankSlots(tmp_path, 4)
    assert other.read(2) == HEADER
    assert other.read(0) == SlotHeader()
    assert other.find(HEADER.step) == 2
    assert other.find(7) is None
    assert ranks_present(tmp_path) == [4]
    assert (tmp_path / "rank-00004.headers").stat().st_mode & 0o777 == 0o600


def test_any_changed_bit_of_a_header_makes_it_no_complete_one(tmp_path: Path) -> None:
    slots = RankSlots(tmp_path, 0)
    slots.write(1, HEADER)
    path = tmp_path / "rank-00000.headers"
    content = path.read_bytes()
    used = len(HEADER.pack()) + len(HEADER.facts)
    for bit in range(8 * used):
        damaged = bytearray(content)
        damaged[4096 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert slots.read(1).state is not SlotState.COMPLETE, bit
    path.write_bytes(content)
    assert slots.read(1) == HEADER


def test_the_plan_and_the_savers_word_survive_a_writer_that_died_in_the_middle(tmp_path: Path) -> None:
    pages = SavePages(tmp_path)
    assert pages.plan() == SavePlan()
    plan = SavePlan(from_step=4, course=every(3), later_from=40, later=every(5, Way.OVERLAPPED), world_size=2)
    word = SaverWord(pinned=4, durable=3, size_bytes=9, took_s=0.5, saves=1, failures=2, failed=1, pid=7)
    pages.write_plan(plan)
    pages.write_word(word)
    with (tmp_path / "plan").open("r+b") as file:
        file.write(b"\xff" * 9)
    assert SavePages(tmp_path).plan() == plan
    assert SavePages(tmp_path).word() == word


def test_a_new_stride_counts_from_where_it_begins() -> None:
    plan = SavePlan(from_step=4, course=every(3), later_from=12, later=every(5), world_size=2)
    assert [step for step in range(30) if plan.due(step)] == [4, 7, 10, 12, 17, 22, 27]
    off = SavePlan(from_step=4, course=every(3), later_from=12, later=every(0), world_size=2)
    assert [off.is_off(11), off.is_off(12), off.due(15)] == [False, True, False]


def test_a_folder_is_taken_over_by_its_own_run_and_removed_for_another(tmp_path: Path) -> None:
    first = memory_folder.open_folder("one", parent=tmp_path)
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "kept").touch()
    first.release()
    again = memory_folder.open_folder("one", parent=tmp_path)
    assert (again.path / "kept").exists()
    again.release()
    memory_folder.open_folder("two", parent=tmp_path).release()
    assert not first.path.exists()


def test_a_folder_stays_while_a_saver_or_its_run_holds_it(tmp_path: Path) -> None:
    folder = memory_folder.open_folder("one", parent=tmp_path)
    saver = memory_folder.share_lock(folder.path)
    assert saver is not None
    folder.release()
    other = memory_folder.open_folder("two", parent=tmp_path)
    assert folder.path.exists()
    with pytest.raises(WorldError, match="still in use"):
        memory_folder.open_folder("one", parent=tmp_path, patience_s=0.1)
    os.close(saver)
    other.release()


def test_the_folder_of_a_run_that_was_killed_is_cleaned_up_by_the_next_start(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib; from everstep.adapters.checkpoints.memory_folder import open_folder;"
        f"f = open_folder('dead', parent=pathlib.Path({str(tmp_path)!r})); (f.path / 'big').touch();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert (memory_folder.folder_of("dead", tmp_path) / "big").exists()
    memory_folder.open_folder("next", parent=tmp_path).release()
    assert not memory_folder.folder_of("dead", tmp_path).exists()


def test_no_shared_memory_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="cannot be used"):
        memory_folder.open_folder("one", parent=tmp_path / "gone")


def test_a_reader_beside_a_busy_writer_never_reads_nothing(tmp_path: Path) -> None:
    """Ranks that read another plan than the others would wait for them for ever."""
    code = (
        "import sys, pathlib; from everstep.adapters.checkpoints.memory_slots import SavePages, SavePlan\n"
        "pages = SavePages(pathlib.Path(sys.argv[1]))\n"
        "from everstep.policy.staging import Course, Way\n"
        "def every(n): return Course(stride=n, way=Way.TRIAL)\n"
        "pages.write_plan(SavePlan(from_step=1, course=every(1))); print('ready', flush=True)\n"
        "for n in range(20000):\n"
        "    pages.write_plan(SavePlan(from_step=n, course=every(1 + n)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        pages, seen = SavePages(tmp_path), set()
        while writer.poll() is None:
            plan = pages.plan()
            assert plan.course.stride in (plan.from_step + 1, 1)
            seen.add(plan.course.stride)
    assert seen
