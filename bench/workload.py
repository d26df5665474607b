"""The training script of the benchmark: a small model on DDP and gloo that tells its life in one event log.

It knows nothing of launchers; the same file runs under `everstep run` and torchrun. Faults that must happen on a line
of the script itself are caused by a file named after the rank in BENCH_TRIGGERS.
"""

import json
import os
import time
from pathlib import Path

_FOREVER_S = 10_000_000
_log_fd = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def mark(event: str, **fields: object) -> None:
    """One line of the event log, written at once: every rank appends to the same file."""
    record = {"t": time.monotonic(), "event": event, "pid": os.getpid(), "rank": int(os.environ["RANK"]), **fields}
    os.write(_log_fd, (json.dumps(record) + "\n").encode())


mark("proc_start", zero_ns=json.loads(os.environ.get("EVERSTEP_WORKER", "{}")).get("clock_zero_ns", 0))

import argparse  # noqa: E402 - the first event comes before every import that takes time
import ctypes  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

mark("imported")


def stall_with_the_lock() -> None:
    """Never return, in C code that keeps Python's lock."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.usleep(900_000_000)  # stalls here: gil


def stall_asleep() -> None:
    """Never come to the next collective."""
    time.sleep(_FOREVER_S)  # stalls here: sleep


STALLS = {"gil": stall_with_the_lock, "sleep": stall_asleep}


def obey(trigger: Path) -> None:
    """Cause the fault that the benchmark asks for, once."""
    if trigger.exists():
        kind = trigger.read_text()
        trigger.unlink()
        mark("fault", kind=kind)
        STALLS[kind]()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16),
    )  # fmt: skip


def restore(model: nn.Module, path: Path) -> int:
    """The step to go on from; 0 without a checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    return int(state["step"])


def save(model: nn.Module, step: int, path: Path) -> None:
    fresh = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "step": step}, fresh)
    fresh.rename(path)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 256)), torch.randint(16, (8,))).backward()
    optimizer.step()


def compute(matrix: torch.Tensor, times: int) -> None:
    """Real work instead of a pause: so many products."""
    for _ in range(times):
        torch.mm(matrix, matrix)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.05, help="each step is padded to this")
    parser.add_argument("--work", type=int, default=0, help="matrix products per step, in place of padding")
    parser.add_argument("--checkpoint", type=Path, default=None)
    args = parser.parse_args()
    trigger = Path(os.environ["BENCH_TRIGGERS"]) / os.environ["RANK"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mark("pg_ready")
    bare = make_model()
    step = restore(bare, args.checkpoint) if args.checkpoint else 0
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    matrix = torch.randn(256, 256)
    mark("restored", step=step)
    while step < args.steps:
        began_s = time.monotonic()
        obey(trigger)
        compute(matrix, args.work)
        train_step(model, optimizer)
        step += 1
        if args.checkpoint and step % 10 == 0 and dist.get_rank() == 0:
            save(bare, step, args.checkpoint)
        if not args.work:
            time.sleep(max(0.0, began_s + args.step_s - time.monotonic()))
        mark("step", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
