"""The warm standby: a process that has imported everything, touched nothing that a fork would break, and forks.

A fork of it becomes rank r of attempt a in milliseconds, where a cold interpreter spends seconds in imports
(`import torch`, and again at the first optimizer, which pulls in torch._dynamo).

The rules, measured in checkpointing.md section 5: one thread at every fork, no parallel region, no backward, no process
group, no CUDA. The zygote checks itself before each fork and refuses when one is broken.

Orders come as JSON datagrams on the socket given by number, with the worker's stdout and stderr as descriptors;
the answer is the worker's pid. Each worker is orphaned on purpose: it becomes a child of the agent, which is a
subreaper and so learns every exit status itself.
"""

import contextlib
import gc
import importlib
import io
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.adapters.processes import die_with_parent

_PRELOADS = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What a fork shall become.

    Attributes:
        environment: variables to set, on top of the zygote's own.
        arguments: script or module and its arguments.
        module: run with `-m`'s meaning.
        observe: start the observer; False for the store.
        parent: pid of the agent, which must have adopted the fork before it goes on.
    """

    environment: dict[str, str]
    arguments: list[str]
    module: bool
    observe: bool
    parent: int


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
            if str(Path("/proc/self/fd", descriptor).readlink()).startswith("/dev/nvidia"):
                return "an import has touched CUDA"
    return ""


def main(arguments: list[str]) -> int:
    """`zygote FD [MODULE…]`: import, say ready, fork on order until the socket closes. In a fork: run the script."""
    die_with_parent()
    line = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's affair
    started_s = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not start CUDA
    problems = preload([*_PRELOADS, *arguments[1:]])
    _touch_optimizer()
    gc.collect()
    gc.freeze()
    os.waitpid(_fork_nothing(), 0)  # a BLAS thread pool ends at the first fork; count after it
    line.send(
        msgspec.json.encode({"hazard": fork_hazard(), "took_s": time.monotonic() - started_s, "problems": problems})
    )
    order = _serve(line)
    if order is None:
        return 0
    return _become(order)


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
                _settle(order, middle_pid)
                _take_output(descriptors, stdout=descriptors[2 * number], stderr=descriptors[2 * number + 1])
                return order
            os.write(write_end, f"{pid}\n".encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(middle, 0)
    with os.fdopen(read_end) as pids:
        line.send(msgspec.json.encode({"pids": [int(pid) for pid in pids]}))
    return None


def _settle(order: ForkOrder, middle_pid: int) -> None:
    """In the fork: wait for adoption, die with the agent, own session, own signals, fresh randomness."""
    deadline_s = time.monotonic() + _ORPHANED_WITHIN_S
    while os.getppid() == middle_pid and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    die_with_parent()
    if os.getppid() != order.parent:
        os._exit(1)
    os.setsid()
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
