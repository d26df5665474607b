"""The warm standby: a process that has imported everything, touched nothing that a fork would break, and forks.

A fork of it becomes rank r of attempt a in milliseconds, where a cold interpreter spends seconds in imports
(`import torch`, and again at the first optimizer, which pulls in torch._dynamo). It does so at once, or is told to wait
(`waiting.py`) and becomes rank r of an attempt that is not there yet.

The rules, measured in checkpointing.md section 5: one thread at every fork, no parallel region, no backward, no process
group, no CUDA. The zygote checks itself before each fork and refuses when one is broken.

What the script imports at its top is imported by an heir, a fork of the zygote (`script_imports.py`). If that starts a
thread, touches a GPU, draws random numbers, fails or takes too long, the heir is dropped and the zygote serves itself;
else the heir serves and the zygote only waits for its end.

Orders come as JSON datagrams on the socket given by number, with the worker's stdout and stderr as descriptors;
the answer is the worker's pid. Each worker is orphaned on purpose: it becomes a child of the agent, which is a
subreaper and so learns every exit status itself.
"""

import contextlib
import gc
import hashlib
import importlib
import io
import os
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from everstep.adapters.workers.processes import die_with_parent
from everstep.worker.script_imports import import_wanted, imports_of_module, imports_of_script
from everstep.worker.waiting import Waiting, wait_for_order

_PRELOADS = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
    "everstep.worker.script",
    "everstep.worker.attachment",
)
_MESSAGE_BYTES = 1 << 20
_DESCRIPTOR_COUNT = 64
_ORPHANED_WITHIN_S = 5.0
_SCRIPT_IMPORTED_WITHIN_S = 120.0
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/infiniband/")
"""What must not be open at a fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """What to import beside PyTorch.

    Attributes:
        modules: by name.
        script: script or module whose imports to foresee; empty for none.
        is_module: it is a module, as in `-m`.
    """

    modules: list[str]
    script: str = ""
    is_module: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heir:
    """How the script's imports went.

    Attributes:
        pid: who serves; 0 when the heir was dropped, and then why.
        count: modules that the script names and that could be imported.
    """

    pid: int = 0
    problem: str = ""
    count: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What a fork shall become.

    Attributes:
        environment: variables to set, on top of the zygote's own.
        arguments: script or module and its arguments.
        module: run with `-m`'s meaning.
        observe: start the observer; False for the store.
        parent: pid of the agent, which must have adopted the fork before it goes on.
        waits: it becomes what a later order says; its line to the agent comes in the place of its stdout.
    """

    environment: dict[str, str]
    arguments: list[str]
    module: bool
    observe: bool
    parent: int
    waits: Waiting | None = None


def preload(names: Sequence[str]) -> list[str]:
    """Import what workers will need. Returns a sentence for each module that could not be imported."""
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f"cannot preload {name}: {error}")
    return problems


def _touch_optimizer() -> None:
    """Run the lazy parts of optimizers and modules once; no backward, no random number, no second thread."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def fork_hazard() -> str:
    """Why this process must not fork now; empty when it may."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if (device := str(Path("/proc/self/fd", descriptor).readlink())).startswith(_DEVICES):
                return f"an import has opened {device}"
    return ""


def main(arguments: list[str]) -> int:
    """`zygote FD IMPORTS`: import, say ready, fork on order until the socket closes. In a fork: run the script."""
    die_with_parent()
    line = socket.socket(fileno=int(arguments[0]))
    imports = msgspec.json.decode(arguments[1], type=Imports)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's affair
    started_s = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not start CUDA
    problems = preload([*_PRELOADS, *imports.modules])
    _touch_optimizer()
    hazard = _make_ready()
    heir = _Heir()
    if imports.script and not hazard:
        found = _fork_heir(imports)
        if found is None:
            return _live(line)
        heir = found
    took_s = time.monotonic() - started_s
    line.send(msgspec.json.encode({"hazard": hazard, "took_s": took_s, "problems": problems, "heir": heir}))
    if heir.pid:
        os.waitpid(heir.pid, 0)
        return 0
    return _live(line)


def _live(line: socket.socket) -> int:
    order = _serve(line)
    return 0 if order is None else _become(order)


def _make_ready() -> str:
    """Before forks: what is here now stays, and is never copied for the collector's sake. Returns the hazard."""
    gc.collect()
    gc.freeze()
    os.waitpid(_fork_nothing(), 0)  # a BLAS thread pool ends at the first fork; count after it
    return fork_hazard()


def _fork_heir(imports: Imports) -> _Heir | None:
    """Fork a process that has the script's imports too. Returns None in it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        die_with_parent()
        os.dup2(2, 1)  # what an import prints is not the script's output
        word = _import_script(imports)
        os.write(write_end, msgspec.json.encode(word))
        os.close(write_end)
        return None
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        came = select.select([answer], [], [], _SCRIPT_IMPORTED_WITHIN_S)[0]
        text = answer.read() if came else b""
    if not came:
        word = _Heir(problem=f"they take more than {_SCRIPT_IMPORTED_WITHIN_S:.0f} s")
    else:
        word = msgspec.json.decode(text, type=_Heir) if text else _Heir(problem="one of them ends the process")
    if not word.problem:
        return replace(word, pid=pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return word


def _import_script(imports: Imports) -> _Heir:
    started_s, luck, count = time.monotonic(), _luck(), 0
    wanted = imports_of_module(imports.script) if imports.is_module else imports_of_script(Path(imports.script))
    here = sys.path.pop(0) if sys.path[:1] == [str(Path.cwd())] else None  # what lies here is the user's own
    for item in wanted:
        try:
            count += import_wanted(item)
        except BaseException as error:  # outermost frame of foreign code
            return _Heir(problem=f"importing {item.module} raises {type(error).__name__}: {error}"[:500])
        if fork_hazard() and (hazard := _make_ready()):
            return _Heir(problem=f"after importing {item.module} {hazard}")
    if here is not None:
        sys.path.insert(0, here)
    if luck != _luck():
        return _Heir(problem="one of them draws or seeds random numbers")
    if hazard := _make_ready():
        return _Heir(problem=hazard)
    return _Heir(count=count, took_s=time.monotonic() - started_s)


def _luck() -> str:
    """A digest of the random states that forks get anew."""
    import random

    states = [repr(random.getstate()).encode()]
    if (torch := sys.modules.get("torch")) is not None:
        states.append(bytes(torch.get_rng_state().tolist()))
    if (numpy := sys.modules.get("numpy.random")) is not None:
        states.append(repr(numpy.get_state()).encode())
    return hashlib.blake2b(b"".join(states)).hexdigest()


def _fork_nothing() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def _serve(line: socket.socket) -> ForkOrder | None:
    """Answer orders. Returns None in the zygote when the agent is gone, and the order in each fork."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, _DESCRIPTOR_COUNT)
        if not message:
            return None
        orders = msgspec.json.decode(message, type=list[ForkOrder])
        if hazard := fork_hazard():
            line.send(msgspec.json.encode({"error": f"the standby cannot fork safely: {hazard}"}))
        else:
            order = _fork(line, orders, descriptors)
            if order is not None:
                return order
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(line: socket.socket, orders: list[ForkOrder], descriptors: list[int]) -> ForkOrder | None:
    """Fork one worker for each order through one short-lived middle process."""
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(read_end)
        middle_pid = os.getpid()
        for number, order in enumerate(orders):
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                line.close()
                _await_adoption(order, middle_pid)
                return _settled(order, descriptors, number)
            os.write(write_end, f"{pid}\n".encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(middle, 0)
    with os.fdopen(read_end) as pids:
        line.send(msgspec.json.encode({"pids": [int(pid) for pid in pids]}))
    return None


def _settled(order: ForkOrder, descriptors: list[int], number: int) -> ForkOrder:
    """In the fork: wait if it shall, then be what the order says. `number`: whose descriptors are this fork's."""
    stdout, stderr = descriptors[2 * number : 2 * number + 2]
    if order.waits is not None:
        with socket.socket(fileno=os.dup(stdout)) as line:
            for descriptor in descriptors:
                os.close(descriptor)
            message, descriptors = wait_for_order(line, order.waits)
        order, (stdout, stderr) = msgspec.json.decode(message, type=ForkOrder), descriptors
    _settle(order)
    _take_output(descriptors, stdout=stdout, stderr=stderr)
    return order


def _await_adoption(order: ForkOrder, middle_pid: int) -> None:
    """In the fork: from now on it dies with the agent, and has a session of its own."""
    deadline_s = time.monotonic() + _ORPHANED_WITHIN_S
    while os.getppid() == middle_pid and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    die_with_parent()
    if os.getppid() != order.parent:
        os._exit(1)
    os.setsid()


def _settle(order: ForkOrder) -> None:
    """In the fork: own signals, the environment, fresh randomness."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(order.environment)
    _reseed()


def _take_output(descriptors: list[int], *, stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            line_buffering=True
        )  # the log is a file; a killed rank must not take its last lines along


def _reseed() -> None:
    """A fresh interpreter seeds itself from the system; forks of one process must not share their luck."""
    import random

    random.seed()
    for name in ("numpy.random", "torch"):
        module: types.ModuleType | None = sys.modules.get(name)
        if module is not None:
            module.seed() if name == "numpy.random" else module.default_generator.seed()


def _become(order: ForkOrder) -> int:
    from everstep.worker.script import observe, run_script

    if order.observe:
        observe()
    return run_script(order.arguments, module=order.module)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
