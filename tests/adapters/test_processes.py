"""Real processes seen from outside: their states, their ends at once, and a sweep that finds them in any session."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.adapters.polling import python, wait_for

from everstep.adapters.workers.processes import (
    Watch,
    kill_run,
    parent_of,
    processes_of_run,
    read_stat,
    reap,
    send_signal,
)
from everstep.adapters.workers.worker_environment import RUN_VARIABLE
from everstep.domain.evidence import ProcessState

SLEEPER = ["sleep", "600"]


@pytest.fixture
def run() -> Iterator[str]:
    """A name that no other run has; nothing of it lives after the test."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    kill_run(name)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.close()


def of_run(run: str, command: list[str] = SLEEPER, **options: object) -> int:
    child = subprocess.Popen(command, env={**os.environ, RUN_VARIABLE: run}, **options)  # type: ignore[call-overload]
    child.returncode = 0  # the test reaps it
    pid: int = child.pid
    wait_for(lambda: pid in processes_of_run(run), "the process to show its environment")
    return pid


def test_a_process_is_seen_asleep_stopped_and_running_again() -> None:
    with python("import time; print('up', flush=True); time.sleep(600)") as child:
        assert child.stdout.readline() == "up\n"
        wait_for(lambda: read_stat(child.pid).state is ProcessState.SLEEPING, "sleep")
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: read_stat(child.pid).state is ProcessState.STOPPED, "stop")
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: read_stat(child.pid).state is ProcessState.SLEEPING, "sleep again")


def test_a_busy_process_uses_cpu_seconds_and_a_sleeping_one_does_not() -> None:
    with python("while True: pass") as busy:
        wait_for(lambda: read_stat(busy.pid).cpu_s > 0.05, "cpu time")
        assert read_stat(busy.pid).state is ProcessState.RUNNING


def test_a_process_is_gone_as_a_zombie_and_after_it_was_reaped(run: str) -> None:
    pid = of_run(run)
    assert parent_of(pid) == os.getpid()
    assert send_signal(pid, signal.SIGKILL)
    wait_for(lambda: read_stat(pid).state is ProcessState.GONE, "the end")
    assert reap(pid) == -signal.SIGKILL
    assert read_stat(pid).state is ProcessState.GONE
    assert read_stat(pid).cpu_s == 0.0
    assert parent_of(pid) == 0
    assert not send_signal(pid, signal.SIGKILL)
    assert reap(pid) == 0  # nobody's child any more


def test_a_name_with_spaces_and_brackets_does_not_confuse_the_table() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R (b'); print('up', flush=True); import time; time.sleep(9)"
    with python(code) as child:
        child.stdout.readline()
        assert read_stat(child.pid).state in (ProcessState.SLEEPING, ProcessState.RUNNING)
        assert parent_of(child.pid) == os.getpid()


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.abort()", -6)])
def test_an_end_wakes_the_watch_at_once_and_is_told_once_with_its_code(watch: Watch, code: str, status: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", code])
    child.returncode = 0
    watch.add(child.pid)
    watch.wait(30.0)
    assert watch.ended() == {child.pid: status}
    assert watch.ended() == {}


def test_the_watch_does_not_wait_out_its_time_when_a_child_is_killed(watch: Watch, run: str) -> None:
    pid = of_run(run)
    watch.add(pid)
    assert watch.ended() == {}
    started_s = time.monotonic()
    threading.Timer(0.05, send_signal, (pid, signal.SIGKILL)).start()
    watch.wait(30.0)
    assert time.monotonic() - started_s < 5.0
    assert watch.ended() == {pid: -9}


def test_a_wake_up_ends_the_present_wait_or_the_next(watch: Watch) -> None:
    for _ in range(70_000):
        watch.wake()  # more than the pipe holds
    started_s = time.monotonic()
    watch.wait(30.0)
    assert time.monotonic() - started_s < 5.0


def test_only_processes_that_name_the_run_are_found(run: str) -> None:
    pid, other = of_run(run), of_run(f"{run}-other")
    assert processes_of_run(run) == [pid]
    assert processes_of_run(run, besides=[pid]) == []
    kill_run(f"{run}-other")
    assert read_stat(other).state is ProcessState.GONE


def test_the_sweep_kills_in_every_session_and_spares_who_is_named(run: str) -> None:
    mine, session = of_run(run), of_run(run, start_new_session=True)
    orphan_maker = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=2, start_new_session=True).pid)"
    made = subprocess.run(
        [sys.executable, "-c", orphan_maker],
        env={**os.environ, RUN_VARIABLE: run},
        timeout=60,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    orphan, stopped = int(made.stdout), of_run(run)
    send_signal(stopped, signal.SIGSTOP)
    spared = of_run(run)
    assert list(kill_run(run, besides=[spared])) == []
    assert {read_stat(pid).state for pid in (mine, session, orphan, stopped)} == {ProcessState.GONE}
    assert read_stat(spared).state is not ProcessState.GONE


def test_the_sweep_gives_up_on_what_will_not_die_and_names_it(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.adapters.workers.processes._SWEEP_ROUNDS", 3)
    monkeypatch.setattr("everstep.adapters.workers.processes.send_signal", lambda pid, number: True)
    pid = of_run(run)
    assert list(kill_run(run)) == [pid]
    os.kill(pid, signal.SIGKILL)


def test_a_process_that_was_killed_is_ending_until_it_is_reaped() -> None:
    child = subprocess.Popen(SLEEPER)
    assert not read_stat(child.pid).is_ending
    child.kill()
    wait_for(lambda: read_stat(child.pid).state is ProcessState.GONE, "its end")
    assert read_stat(child.pid).is_ending
    child.wait()
