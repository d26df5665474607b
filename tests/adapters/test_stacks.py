"""Stacks by signal: the main thread of a real dump, real children that answer, and those that cannot."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.adapters.polling import python, wait_for

from everstep.adapters.evidence.stacks import STACK_SIGNAL, dump_stacks, main_thread
from everstep.adapters.workers.processes import read_stat
from everstep.adapters.workers.progress_page import create_page
from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.evidence import ProcessState

REGISTERED = f"""
import faulthandler, sys, threading, time
out = open(sys.argv[1], "a")
faulthandler.register({int(STACK_SIGNAL)}, file=out, all_threads=True, chain=False)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def stuck_in_here():
    print("up", flush=True)
    time.sleep(600)
stuck_in_here()
"""


def test_the_main_thread_is_found_in_a_real_dump_of_several_threads(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other_thread() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=other_thread, daemon=True)
    thread.start()
    entered.wait()
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        text = file.read()
    leave.set()
    thread.join()
    assert "other_thread" in text
    frames = main_thread(text)
    assert frames[0].function == "test_the_main_thread_is_found_in_a_real_dump_of_several_threads"
    assert frames[0].file == __file__
    assert "other_thread" not in {frame.function for frame in frames}


def test_text_without_frames_gives_none() -> None:
    assert main_thread("") == ()
    assert main_thread("Thread 0x1 (most recent call first):\n  <no Python frame>\n") == ()
    assert main_thread("half a wor") == ()


def test_a_registered_child_answers_and_every_time_with_the_new_dump_only(tmp_path: Path) -> None:
    path = tmp_path / "0.stacks"
    with python(REGISTERED, str(path)) as child:
        child.stdout.readline()
        for _ in range(2):
            text = dump_stacks({child.pid: path}, timeout_s=20.0)[child.pid]
            functions = [frame.function for frame in main_thread(text)]
            assert functions == ["stuck_in_here", "<module>"]
            assert text.count("stuck_in_here") == 1


def test_a_stopped_child_gives_no_answer_and_holds_up_nobody_else(tmp_path: Path) -> None:
    well, stopped = tmp_path / "0.stacks", tmp_path / "1.stacks"
    with python(REGISTERED, str(well)) as one, python(REGISTERED, str(stopped)) as two:
        one.stdout.readline()
        two.stdout.readline()
        two.send_signal(signal.SIGSTOP)
        wait_for(lambda: read_stat(two.pid).state is ProcessState.STOPPED, "stop")
        texts = dump_stacks({one.pid: well, two.pid: stopped}, timeout_s=0.5)
    assert texts[two.pid] == ""
    assert main_thread(texts[one.pid])[0].function == "stuck_in_here"


def test_a_process_that_is_gone_or_has_no_file_gives_no_answer(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    started_s = time.monotonic()
    assert dump_stacks({gone.pid: tmp_path / "none"}, timeout_s=0.1) == {gone.pid: ""}
    assert time.monotonic() - started_s < 5.0
    assert dump_stacks({}, timeout_s=60.0) == {}


def test_a_process_that_did_not_register_is_not_sent_the_signal_that_would_kill_it(tmp_path: Path) -> None:
    with python("import time; print('up', flush=True); time.sleep(600)") as child:
        child.stdout.readline()
        assert dump_stacks({child.pid: tmp_path / "none"}, timeout_s=0.05) == {child.pid: ""}
        assert child.poll() is None
        assert read_stat(child.pid).state is not ProcessState.GONE


def test_a_worker_that_is_asked_before_it_has_registered_lives_and_answers_later(tmp_path: Path) -> None:
    page, stacks = tmp_path / "0.page", tmp_path / "0.stacks"
    create_page(page, rank=0, world_size=1, attempt=1)
    paths = WorkerPaths(run="r", attempt=1, rank=0, page=str(page), stacks=str(stacks), stack_signal=int(STACK_SIGNAL))
    code = (
        "import faulthandler, importlib.util, os, sys\n"
        "from pathlib import Path\n"
        "from everstep.adapters.evidence.stacks import dump_stacks\n"
        "from everstep.worker import script\n"
        "def asked():\n"
        "    return dump_stacks({os.getpid(): Path(sys.argv[1])}, timeout_s=0.2)[os.getpid()]\n"
        "registers, texts = faulthandler.register, []\n"
        "def register(*arguments, **options):\n"
        "    texts.append(asked())\n"
        "    registers(*arguments, **options)\n"
        "importlib.util.find_spec = lambda name: None\n"  # torch has no part in this
        "faulthandler.register = register\n"
        "script.observe()\n"
        "print(repr(texts), 'asked' in asked())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(stacks)],
        env={**os.environ, **paths.to_environment()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "[''] True\n"), done.stderr


def test_a_worker_that_is_asked_while_its_interpreter_is_gone_already_keeps_its_exit_code(tmp_path: Path) -> None:
    page, stacks = tmp_path / "0.page", tmp_path / "0.stacks"
    create_page(page, rank=0, world_size=1, attempt=1)
    paths = WorkerPaths(run="r", attempt=1, rank=0, page=str(page), stacks=str(stacks), stack_signal=int(STACK_SIGNAL))
    code = (
        "import ctypes, importlib.util, sys\n"
        "from everstep.worker import script\n"
        "importlib.util.find_spec = lambda name: None\n"  # torch has no part in this
        "script.observe()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(libc.sleep, None)\n"  # glibc then calls sleep(3) when Python has ended, as for code 3
        "sys.exit(3)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **paths.to_environment()}) as worker:
        wait_for(stacks.exists, "the observer")
        wait_for(lambda: not catches(worker.pid, STACK_SIGNAL), "the end of the interpreter")
        os.kill(worker.pid, STACK_SIGNAL)
        assert worker.wait(timeout=30) == 3


def catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
