"""A progress page tells what its rank did, also when the rank is stopped, killed in the middle of a word, or gone."""

import mmap
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.polling import python, wait_for

from everstep.adapters.workers.processes import read_stat
from everstep.adapters.workers.progress_page import MARK_COUNT, PAGE_BYTES, PageReader, PageWriter, create_page
from everstep.domain.causes import FaultKind
from everstep.domain.errors import EvidenceError, WorldError
from everstep.domain.evidence import ProcessState
from everstep.domain.phases import Phase

ENDLESS_WRITER = """
import sys, time
from pathlib import Path
from everstep.adapters.workers.progress_page import PageWriter
page = PageWriter(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    page.log_loss(float(step))
    page.finish_step(step)
    time.sleep(0.0001)
"""


def seconds(monotonic_ns: int) -> float:
    return monotonic_ns / 1e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    page = tmp_path / "3.page"
    create_page(page, rank=3, world_size=8, attempt=2)
    return page


@pytest.fixture
def reader(path: Path) -> PageReader:
    return PageReader(path, to_run_s=seconds)


def test_an_unopened_page_is_its_ranks_and_says_that_nobody_observes(path: Path, reader: PageReader) -> None:
    view = reader.view()
    assert (view.rank, view.phase, view.step, view.loss, view.marks) == (3, Phase.UNOBSERVED, 0, None, ())
    assert not reader.observed()
    assert abs(view.changed_at_s - time.monotonic()) < 5.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_written_is_read_in_its_order(path: Path, reader: PageReader) -> None:
    before_s = time.monotonic()
    writer = PageWriter(path)
    assert reader.observed()
    writer.enter(Phase.RESTORING)
    writer.enter(Phase.RESTORING)  # no news
    writer.enter(Phase.WARMING_UP)
    writer.log_loss(2.5)
    writer.finish_step(101)
    writer.enter(Phase.SAVING)
    view = reader.view()
    assert [(mark.phase, mark.step, mark.is_step) for mark in view.marks] == [
        (Phase.STARTING, 0, False),
        (Phase.RESTORING, 0, False),
        (Phase.WARMING_UP, 0, False),
        (Phase.TRAINING, 101, True),
        (Phase.SAVING, 101, False),
    ]
    assert (view.phase, view.step, view.loss) == (Phase.SAVING, 101, 2.5)
    times = [before_s, *(mark.at_s for mark in view.marks), time.monotonic()]
    assert times == sorted(times)
    assert view.changed_at_s == view.marks[-1].at_s
    assert (writer.step, writer.phase) == (101, Phase.SAVING)


def test_marks_are_told_once_and_a_look_without_them_leaves_them(path: Path, reader: PageReader) -> None:
    writer = PageWriter(path)
    writer.finish_step(1)
    assert reader.view_without_marks().marks == ()
    assert len(reader.view().marks) == 2
    assert reader.view().marks == ()
    writer.finish_step(2)
    assert [mark.step for mark in reader.view().marks] == [2]


def test_a_beat_is_a_sign_of_life_and_no_mark(path: Path, reader: PageReader) -> None:
    writer = PageWriter(path)
    before = reader.view()
    writer.beat()
    after = reader.view()
    assert after.changed_at_s > before.changed_at_s
    assert after.marks == ()


def test_a_script_that_resumes_says_where_without_a_step(path: Path, reader: PageReader) -> None:
    writer = PageWriter(path)
    reader.view()
    writer.start_at(100)
    assert (reader.view().step, reader.view().marks) == (100, ())


@given(batches=st.lists(st.integers(0, 2 * MARK_COUNT), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_when_the_ring_overflows_the_newest_marks_are_kept_in_order(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "page"
    create_page(path, rank=0, world_size=1, attempt=1)
    writer, reader = PageWriter(path), PageReader(path, to_run_s=seconds)
    reader.view()
    step = 0
    for count in batches:
        for _ in range(count):
            step += 1
            writer.finish_step(step)
        steps = [mark.step for mark in reader.view().marks]
        kept = min(count, MARK_COUNT - 1)
        assert steps == list(range(step - kept + 1, step + 1))
    reader.close()


def tear(path: Path, *, at_byte: int) -> None:
    """Leave the page as a writer does that ended after `at_byte` bytes of the state: struct zeroes it, then fills."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), PAGE_BYTES) as memory:
        memory[24] |= 1  # the sequence number is odd while the writer is at it
        state = memory[32:80]
        memory[32:80] = state[:at_byte] + bytes(48 - at_byte)


@pytest.mark.parametrize("at_byte", [0, 1, 8, 9, 12, 16, 17, 24, 33, 41, 47])
def test_a_page_that_its_writer_left_in_the_middle_of_a_word_still_tells_what_was_known(
    path: Path, reader: PageReader, at_byte: int
) -> None:
    writer = PageWriter(path)
    for step in range(1, 400):
        writer.log_loss(0.5)
        writer.finish_step(step)
    before = reader.view()
    tear(path, at_byte=at_byte)
    after = reader.view()
    assert (after.step, after.phase, after.changed_at_s) == (399, Phase.TRAINING, before.changed_at_s)
    assert after.marks == ()
    assert reader.observed()
    assert reader.view().marks == ()  # and the marks are not told a second time


def test_a_page_that_is_torn_at_the_first_look_can_be_read(path: Path) -> None:
    writer = PageWriter(path)
    writer.finish_step(1)
    tear(path, at_byte=12)
    assert PageReader(path, to_run_s=seconds).view().step == 1


def test_the_page_of_a_writer_that_is_killed_in_the_middle_of_writing_can_be_read(tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / f"{number}.page"
        create_page(path, rank=0, world_size=1, attempt=1)
        reader = PageReader(path, to_run_s=seconds)
        pid = os.fork()
        if pid == 0:
            writer = PageWriter(path)
            for step in range(1, 10**9):
                writer.finish_step(step)
                if step == 500 + 37 * number:
                    os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        view = reader.view()
        assert view.step == 500 + 37 * number
        assert [mark.step for mark in view.marks if mark.is_step] == list(range(1, view.step + 1))


def test_a_stopped_and_then_killed_writer_can_be_read_all_the_time(path: Path, reader: PageReader) -> None:
    with python(ENDLESS_WRITER, str(path)) as child:
        wait_for(lambda: reader.view().step > 500, "the writer to write")
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: read_stat(child.pid).state is ProcessState.STOPPED, "the writer to stop")
        stopped = reader.view()
        assert stopped.step > 500
        assert reader.view_without_marks().step == stopped.step
        child.send_signal(signal.SIGKILL)
        child.wait()
    dead = reader.view()
    assert dead.step == stopped.step
    assert dead.changed_at_s == stopped.changed_at_s
    assert dead.marks == ()


def test_a_busy_writer_never_shows_a_step_back_or_a_mark_twice(path: Path, reader: PageReader) -> None:
    with python(ENDLESS_WRITER, str(path)):
        wait_for(reader.observed, "the writer to start")
        last_step, last_mark, last_changed_s = 0, 0, 0.0
        deadline_s = time.monotonic() + 0.5
        while time.monotonic() < deadline_s:
            view = reader.view()
            steps = [mark.step for mark in view.marks if mark.is_step]
            assert view.step >= last_step
            assert view.changed_at_s >= last_changed_s
            assert steps == sorted(set(steps))
            assert not steps or steps[0] > last_mark
            last_step, last_changed_s = view.step, view.changed_at_s
            last_mark = steps[-1] if steps else last_mark


@pytest.mark.parametrize("kind", FaultKind)
def test_an_order_is_obeyed_once(path: Path, reader: PageReader, kind: FaultKind) -> None:
    writer = PageWriter(path)
    assert writer.new_order() is None
    reader.order(kind)
    assert writer.new_order() is kind
    assert writer.new_order() is None
    reader.order(kind)
    assert writer.new_order() is kind


def test_an_order_from_before_the_writer_came_is_not_obeyed(path: Path, reader: PageReader) -> None:
    reader.order(FaultKind.EXIT)
    assert PageWriter(path).new_order() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"EVSTEP01"),
        lambda path: path.write_bytes(b"SOMETHIN" + bytes(PAGE_BYTES)),
        lambda path: path.mkdir(),
    ],
    ids=["missing", "empty", "short", "wrong magic", "a folder"],
)
def test_what_is_no_page_is_refused_in_words(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "page"
    make(path)
    with pytest.raises(EvidenceError, match="is no progress page"):
        PageReader(path, to_run_s=seconds)


def test_full_shared_memory_fails_when_the_page_is_made_and_not_in_the_worker(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from everstep.adapters.workers.progress_page import create_page\n"
        "create_page(Path(sys.argv[1]), rank=0, world_size=1, attempt=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path / "page")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES // 2,) * 2),
        timeout=60,
    )
    assert done.returncode == 1
    assert "WorldError: cannot make the progress page" in done.stderr


def test_a_page_in_a_folder_that_is_gone_fails_in_words(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"cannot make the progress page .*: No such file"):
        create_page(tmp_path / "gone" / "page", rank=0, world_size=1, attempt=1)


def test_the_raw_page_is_its_header(path: Path, reader: PageReader) -> None:
    PageWriter(path)
    assert reader.raw()[:8] == b"EVSTEP01"
    assert len(reader.raw()) == 128
