"""Ranks agree on one step to stop after; a training that ends no step is left to the signal, and forks to theirs."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everstep.adapters.checkpoints.stop_page import StopPage, is_broken, mark_broken
from everstep.worker.stopping import Stopping


def pages(folder: Path, count: int) -> list[Stopping]:
    return [
        Stopping(StopPage(folder, attempt=1, world_size=count), rank, folder)
        for rank in range(count)
    ]  # fmt: skip


def test_all_stop_after_the_step_that_the_foremost_is_in(tmp_path: Path) -> None:
    ranks = pages(tmp_path, 3)
    assert [rank.due(4) for rank in ranks] == [False] * 3
    assert [ranks[2].due(5), ranks[1].due(5)] == [False, False]
    StopPage(tmp_path, attempt=1, world_size=3).ask(1)
    assert [ranks[0].due(5), ranks[0].due(6), ranks[1].due(6), ranks[2].due(6)] == [False, True, True, True]
    assert [rank.begin_save(6) for rank in ranks] == [True] * 3
    assert ranks[2].due(7)
    assert not ranks[2].begin_save(7)  # too far ahead to save the same step: it only leaves


def test_one_rank_alone_stops_where_it_is(tmp_path: Path) -> None:
    [rank] = pages(tmp_path, 1)
    assert not rank.due(4)
    StopPage(tmp_path, attempt=1, world_size=1).ask(0)
    assert rank.due(5)


def test_another_attempt_has_a_page_of_its_own(tmp_path: Path) -> None:
    StopPage(tmp_path, attempt=1, world_size=2).ask(1)
    assert not StopPage(tmp_path, attempt=2, world_size=2).anyone_asked()


def test_the_mark_of_a_broken_attempt_is_seen(tmp_path: Path) -> None:
    assert not is_broken(tmp_path)
    mark_broken(tmp_path)
    assert is_broken(tmp_path)


PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    from everstep.adapters.checkpoints.stop_page import StopPage, mark_broken
    from everstep.worker.stopping import Stopping

    folder, case = Path(sys.argv[1]), sys.argv[2]
    if case == "handled":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    stopping = Stopping(StopPage(folder, attempt=1, world_size=1), 0, folder)
    assert stopping.watch() == (case != "handled")
    if case != "no step":
        stopping.due(1)
    if case == "fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(7)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        os._exit(0)
    if case == "broken":
        mark_broken(folder)
    print("ready", flush=True)
    if case == "healthy":
        for step in range(2, 1000):
            time.sleep(0.01)
            if stopping.due(step):
                stopping.begin_save(step)
                print("saved", flush=True)
                stopping.leave()
    time.sleep(20)
"""


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        ("healthy", -signal.SIGTERM, "saved\n"),
        ("no step", -signal.SIGTERM, ""),
        ("broken", -signal.SIGTERM, ""),
        ("hangs", -signal.SIGTERM, ""),
        ("handled", 5, ""),
    ],
)
def test_sigterm_ends_a_training_that_is(case: str, code: int, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), case]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == code
        assert process.stdout.read() == said


def test_sigterm_ends_a_fork_as_ever(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), "fork"]
    assert subprocess.run(command, timeout=30, check=False, env=os.environ).returncode == 0
