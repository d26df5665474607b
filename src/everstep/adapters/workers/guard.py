"""The guard: a small process that outlives `everstep run` by a moment and kills what that left behind.

Also after kill -9.

It holds the reading end of a pipe; when the last writer is gone, the run is over, however it ended. Parent-death
signals alone do not reach what workers started themselves, such as data loader processes in their own sessions.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from everstep.adapters.workers.processes import kill_run
from everstep.adapters.workers.worker_environment import RUN_VARIABLE

_NOT_FOR_THE_GUARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """Starts the guard and keeps the pipe's writing end. `close` lets it sweep and end.

    Args:
        run: the run's id.
        scratch: the run's folder in shared memory, which goes with it.
    """

    def __init__(self, *, run: str, scratch: Path) -> None:
        read_end, self._write_end = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_GUARD)  # inherited, until it ignores them
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everstep.adapters.workers.guard", str(read_end), run, str(scratch)],
                pass_fds=[read_end],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Tell the guard that the run is over and wait until it has swept."""
        os.close(self._write_end)
        self._process.wait()


def main(arguments: list[str]) -> int:
    """`guard FD RUN SCRATCH`: wait for the end of the run, then sweep."""
    for number in _NOT_FOR_THE_GUARD:
        signal.signal(number, signal.SIG_IGN)
    pipe, run, scratch = int(arguments[0]), arguments[1], Path(arguments[2])
    while os.read(pipe, 1):
        pass
    kill_run(run)
    shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
