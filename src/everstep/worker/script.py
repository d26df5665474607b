"""Runs the user's script as `__main__` under the observer, and leaves a record of the exception that ends it.

Knows nothing of how the process came to be: a cold `python -m everstep.worker` and a fork of the zygote end here alike.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib.util
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from everstep.adapters.evidence.operation_ring import RingWriter
from everstep.adapters.workers.devices import gpu_count
from everstep.adapters.workers.worker_environment import WorkerPaths
from everstep.domain.phases import Phase
from everstep.worker.observer import Observer, current

_STACKS_MODE = 0o600
_GROUP_LOOK_S = 0.002
_GROUP_LOOK_SHARE = 0.02
"""Of the time that has passed, so that a script without a group costs nothing."""
_GROUP_WITHIN_S = 120.0
_keep_alive: list[object] = []
"""The stack file must live as long as the process."""


def observe() -> Observer:
    """Start the observer: page, step hook, worker server, stack dumps. Without `everstep run` it does nothing."""
    observer = current()
    paths = observer.paths
    faulthandler.enable()
    if paths is None:
        return observer
    if paths.stacks and paths.stack_signal:
        early = Path(f"{paths.stacks}.early")
        stacks = os.fdopen(os.open(early, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _STACKS_MODE), "w")
        signal.signal(paths.stack_signal, signal.SIG_IGN)  # what holds again once the ending interpreter unregisters
        faulthandler.register(paths.stack_signal, file=stacks, all_threads=True, chain=False)
        early.rename(paths.stacks)  # from now on the agent may send the signal, which would have killed us before
        _keep_alive.append(stacks)
    if importlib.util.find_spec("torch") is not None:
        _observe_torch(observer, paths)
    observer.notes.part("imported")
    if "torch.distributed" in sys.modules:
        threading.Thread(target=_note_group, args=(observer,), name="everstep-group", daemon=True).start()
    return observer


def _note_group(observer: Observer) -> None:
    """Say when the script's process group stands: nothing in PyTorch tells, so look often, and only at first."""
    import torch.distributed as dist

    began_s = time.monotonic()
    while dist.is_available() and not {"attached", "first_step"} & observer.notes.parts:
        if dist.is_initialized():
            observer.notes.part("group_ready")
            return
        passed_s = time.monotonic() - began_s
        if passed_s > _GROUP_WITHIN_S:
            return
        time.sleep(max(_GROUP_LOOK_S, passed_s * _GROUP_LOOK_SHARE))


def _observe_torch(observer: Observer, paths: WorkerPaths) -> None:
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda _optimizer, _args, _kwargs: observer.optimizer_stepped())
    if dist.is_available() and paths.ring and not gpu_count():
        from everstep.worker.recorder import OperationRecorder

        recorder = OperationRecorder(RingWriter(Path(paths.ring)))
        recorder.install()
        observer.at_step_end = recorder.refresh
        _keep_alive.append(recorder)
    if paths.server and dist.is_available():
        from torch._C import _distributed_c10d as c10d

        with _silent_stderr():  # the server greets with a warning line per rank
            server = c10d._WorkerServer(paths.server)
        ctypes.pythonapi.Py_IncRef(
            ctypes.py_object(server)
        )  # never destroyed: it would say three warning lines at exit


@contextlib.contextmanager
def _silent_stderr():  # type: ignore[no-untyped-def]
    sys.stderr.flush()
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def run_script(arguments: Sequence[str], *, module: bool) -> int:
    """Run `script.py args` (or `module args`) as `__main__` and return the exit code it asks for.

    An exception is recorded for the agent, its traceback is printed as Python would, and the process ends with 1.
    """
    observer = current()
    sys.argv = list(arguments)
    try:
        if module:
            sys.path.insert(0, "")
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            _run_file(arguments[0])
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as error:  # outermost frame
        _record(error, observer.paths)
        _leave_at_once(observer)
    finally:
        observer.enter(Phase.ENDING)
    return 0


def _leave_at_once(observer: Observer) -> NoReturn:
    """End a failed script after its exit handlers, without the interpreter's own teardown.

    That takes most of a second with torch loaded, joins threads that may hang, and the job waits for the exit.
    """
    observer.enter(Phase.ENDING)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _run_file(script: str) -> None:
    """Like `python script`, with a `__main__` that lives until the process ends (`runpy` would clear it earlier)."""
    path = Path(script)
    sys.path.insert(0, str(path.resolve().parent))
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    main.__spec__ = None
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), script, "exec"), main.__dict__)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _record(error: BaseException, paths: WorkerPaths | None) -> None:
    at_ns = time.monotonic_ns()
    summary = traceback.TracebackException.from_exception(error)
    _drop_own_frames(summary)
    text = "".join(summary.format())
    if paths is not None and paths.error:
        _write_record(error, summary, text, at_ns=at_ns, file=paths.error)
    with contextlib.suppress(OSError):  # the log's disk may be full, which may be the very error
        sys.stderr.write(text)
        sys.stderr.flush()


def _write_record(
    error: BaseException, summary: traceback.TracebackException, text: str, *, at_ns: int, file: str
) -> None:
    record = {
        "type": type(error).__name__,
        "message": _printable(str(error)),
        "where": _where(summary, error),
        "at_ns": at_ns,
        "traceback": _printable(text),
    }
    with contextlib.suppress(OSError):  # the exit itself still tells; a full disk must not hide the user's own error
        Path(f"{file}.tmp").write_bytes(msgspec.json.encode(record))
        Path(f"{file}.tmp").rename(file)


def _printable(text: str) -> str:
    """Without lone surrogates, which are no UTF-8."""
    return text.encode(errors="replace").decode()


def _drop_own_frames(summary: traceback.TracebackException) -> None:
    """Leave out the frames between the interpreter's start and the script."""
    own = {str(Path(__file__).with_name(name)) for name in ("script.py", "zygote.py", "__main__.py")}
    leading = 0
    for frame in summary.stack:
        if not (frame.filename in own or frame.filename.startswith("<frozen ")):
            break
        leading += 1
    del summary.stack[:leading]


def _where(summary: traceback.TracebackException, error: BaseException) -> str:
    """The innermost line that is the user's own rather than a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno} in <module>"
    frames = list(summary.stack)
    own = [frame for frame in frames if "/site-packages/" not in frame.filename and "/lib/python" not in frame.filename]
    for frame in reversed(own or frames):
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""
