"""Linux processes seen from outside: adoption, exits by pidfd, states from /proc, and a sweep that leaves no orphan.

Knows nothing of ranks or jobs: a process is a pid, and belongs to a run when its environment names it.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.workers.worker_environment import RUN_VARIABLE
from everstep.domain.errors import WorldError
from everstep.domain.evidence import ProcessState

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STATES = {
    "R": ProcessState.RUNNING,
    "S": ProcessState.SLEEPING,
    "I": ProcessState.SLEEPING,
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "D": ProcessState.BLOCKED,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
}
_SWEEP_ROUNDS = 100
_SWEEP_PAUSE_S = 0.01
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_EXITING = 0x4
"""PF_EXITING of the kernel's include/linux/sched.h."""


def become_subreaper() -> None:
    """From now on, orphans below this process become its children, so it learns their exit status itself.

    Raises:
        WorldError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise WorldError(f"this kernel has no child subreapers (errno {ctypes.get_errno()}); everstep needs Linux 5.3+")


def die_with_parent() -> None:
    """SIGKILL this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """What /proc/PID/stat says.

    Attributes:
        cpu_s: user and system time of all threads; resolution 10 ms.
        is_ending: it was killed, or leaves: it answers nothing, and giving back gigabytes takes the kernel a while.
    """

    state: ProcessState
    cpu_s: float
    is_ending: bool = False


def read_stat(pid: int) -> ProcessStat:
    """The kernel's word on a process; GONE when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessStat(state=ProcessState.GONE, cpu_s=0.0)
    fields = text.rpartition(")")[2].split()
    state = _STATES.get(fields[0], ProcessState.UNKNOWN)
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return ProcessStat(state=state, cpu_s=cpu_s, is_ending=bool(int(fields[6]) & _EXITING))


def waits_for_lock(pid: int) -> bool | None:
    """Whether the main thread sleeps in a futex, as in a wait for another thread's work; None when not told."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return None
    return "futex" in place if place and place != "0" else None


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; False when it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Watch:
    """Children whose ends are seen at once, through pidfds. `close` lets go of them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}  # pidfd -> pid
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, select.POLLIN)

    def add(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def wake(self) -> None:
        """End a `wait` that goes on in another thread."""
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            return  # enough wake-ups are waiting already

    def wait(self, timeout_s: float) -> None:
        """Sleep until a child ends, `wake` is called or the time is over."""
        for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if descriptor == self._wake_read:
                os.read(self._wake_read, 4096)

    def ended(self) -> dict[int, int]:
        """Children that have ended since the last call: pid → exit code, negative for a signal. Reaps them."""
        codes = {}
        for pidfd, _ in self._poll.poll(0):
            pid = self._pids.get(pidfd)
            if pid is None:
                continue
            self._poll.unregister(pidfd)
            os.close(pidfd)
            del self._pids[pidfd]
            codes[pid] = reap(pid)
        return codes

    def close(self) -> None:
        for descriptor in (*self._pids, self._wake_read, self._wake_write):
            os.close(descriptor)


def reap(pid: int) -> int:
    """Wait for an ended child: its exit code, negative for a signal. Someone else's child that ended gives 0."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status)


def processes_of_run(run: str, *, besides: Collection[int] = ()) -> list[int]:
    """Pids of living processes whose environment at their start named this run, or one start of it.

    Args:
        run: the run's id, or `ID.START` for the processes of one `everstep run` alone.
    """
    whole = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in besides:
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue  # ended meanwhile, or another user's
        if any(item == whole or item.startswith(whole + b".") for item in environment.split(b"\0")):
            found.append(int(entry))
    return found


def kill_run(run: str, *, besides: Collection[int] = ()) -> Sequence[int]:
    """SIGKILL every process of the run until none is left, orphans of orphans too. Returns those that would not die."""
    left: list[int] = []
    for _ in range(_SWEEP_ROUNDS):
        left = [pid for pid in processes_of_run(run, besides=besides) if read_stat(pid).state is not ProcessState.GONE]
        if not left:
            return ()
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(_SWEEP_PAUSE_S)
        for pid in left:
            _reap_ended_child(pid)
    return left


def reap_orphans(*, besides: Collection[int] = ()) -> None:
    """Take leave of ended children that nobody here started: orphans that a subreaper inherited."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in besides:
            _reap_ended_child(int(entry))


def _reap_ended_child(pid: int) -> None:
    if parent_of(pid) == os.getpid() and read_stat(pid).state is ProcessState.GONE:
        reap(pid)


def parent_of(pid: int) -> int:
    """The parent's pid; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])
