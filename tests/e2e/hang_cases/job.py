"""One job for every hang case: `job.py CASE VICTIM`. Thirty ordinary steps, then the case's own body.

The names and bodies follow the table of cases that the analyser is held to; `healthy` ones end by themselves.
"""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import everstep.worker

STEPS_BEFORE = 30
STALL_S = 600.0
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VICTIM = int(sys.argv[2])
X = torch.ones(1024)


def ar(x: torch.Tensor = X, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(x, group=group)
    x.fill_(1.0)


def step() -> None:
    for _ in range(3):
        ar()
    everstep.worker.step()


def stall() -> None:
    time.sleep(STALL_S)


def am_victim() -> bool:
    return RANK == VICTIM


def groups_by(key: Callable[[int], object]) -> dist.ProcessGroup:
    """The new group of ranks that share a key; all ranks create all groups in one order."""
    mine: dist.ProcessGroup | None = None
    for value in dict.fromkeys(key(rank) for rank in range(WORLD)):
        group = dist.new_group([rank for rank in range(WORLD) if key(rank) == value])
        if key(RANK) == value:
            mine = group
    assert mine is not None
    return mine


# --- the reference's cases


def uneven() -> None:
    for _ in range(4 if am_victim() else 5):
        step()
    if am_victim():
        ar(torch.zeros(1))
    step()


def early_exit() -> None:
    for number in range(5):
        if am_victim() and number == 4:
            return
        step()


def nan_raise() -> None:
    for number in range(5):
        if am_victim() and number == 3:
            raise FloatingPointError("the loss is NaN")
        step()


def oom_kill() -> None:
    step()
    if am_victim():
        os.kill(os.getpid(), signal.SIGKILL)
    step()


def sigstop() -> None:
    if am_victim():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    big = torch.ones(60_000_000)
    for _ in range(6):
        dist.all_reduce(big)


def slow_ckpt() -> None:
    if am_victim():
        save_checkpoint()
    dist.barrier()


def save_checkpoint() -> None:
    stall()


def loader() -> None:
    step()
    if am_victim():
        stall()
    step()


def gil() -> None:
    if am_victim():
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # for ever; a sleep would end at the first signal
    step()


def nested() -> None:
    tp, dp = groups_by(lambda rank: rank // 2), groups_by(lambda rank: rank % 2)
    if am_victim():
        stall()
    ar(group=tp)
    ar(group=dp)
    ar()


def order() -> None:
    if am_victim():
        dist.broadcast(X, 0)
    else:
        ar()
    step()


def shape() -> None:
    ar(torch.ones(1000 if am_victim() else 1024))
    step()


def dtype() -> None:
    ar(torch.ones(1024, dtype=torch.float64 if am_victim() else torch.float32))
    step()


def extra() -> None:
    step()
    if am_victim():
        ar(torch.zeros(1))
    step()


def silent_shift() -> None:
    for number in range(3):
        for reduction in range(3):
            if not (am_victim() and number == 1 and reduction == 1):
                ar()
        everstep.worker.step()


def cross_pg() -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if RANK == 0:
        ar(group=first)
        ar(group=second)
    elif RANK == 1:
        ar(group=second)
        ar(group=first)
    dist.barrier()


def new_group() -> None:
    members = [rank for rank in range(WORLD) if rank != VICTIM]
    if not am_victim():
        dist.new_group(members)
    ar(group=dist.new_group(list(range(WORLD))))


def p2p_order() -> None:
    if RANK < 2:
        peer, out = 1 - RANK, torch.ones(8_000_000)
        dist.send(out, peer)
        dist.recv(out, peer)
    dist.barrier()


def p2p_missing() -> None:
    if RANK == 0:
        stall()
    else:
        dist.recv(X, RANK - 1)
    if RANK + 1 < WORLD:
        dist.send(X, RANK + 1)
    dist.barrier()


# --- our own


def mesh_2d() -> None:
    tp, dp = groups_by(lambda rank: rank // 2), groups_by(lambda rank: rank % 2)
    for number in range(3):
        ar(group=tp)
        if am_victim() and number == 1:
            stall()
        ar(group=tp)
        ar(group=dp)


def mesh_3d() -> None:
    tp = groups_by(lambda rank: rank // 2)
    dp = groups_by(lambda rank: (rank // 4, rank % 2))
    last = RANK >= 4
    for number in range(3):
        if last:
            dist.recv(X, RANK - 4)
        ar(group=tp)
        if am_victim() and number == 1:
            stall()
        if not last:
            dist.send(X, RANK + 4)
        ar(group=dp)


def _pipeline(batches: int, at_batch: Callable[[int], None]) -> None:
    for number in range(batches):
        if RANK > 0:
            dist.recv(X, RANK - 1)
        at_batch(number)
        if RANK + 1 < WORLD:
            dist.send(X, RANK + 1)


def pipeline() -> None:
    _pipeline(6, lambda number: stall() if am_victim() and number == 3 else None)
    dist.barrier()


def pipeline_frozen() -> None:
    _pipeline(6, lambda number: os.kill(os.getpid(), signal.SIGSTOP) if am_victim() and number == 3 else None)
    dist.barrier()


def _ring() -> None:
    into = torch.empty(1024)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, X, (RANK + 1) % WORLD), dist.P2POp(dist.irecv, into, (RANK - 1) % WORLD)]
    )
    for work in works:
        work.wait()


def batched() -> None:
    for number in range(4):
        if am_victim() and number == 2:
            stall()
        _ring()
    dist.barrier()


def p2p_cycle() -> None:
    """Everybody receives before it sends: a cycle of all ranks."""
    dist.recv(X, (RANK - 1) % WORLD)
    dist.send(X, (RANK + 1) % WORLD)


def torch_save() -> None:
    """A checkpoint on a file system that does not take the bytes: a pipe that nobody reads."""
    if am_victim():
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/checkpoint.pt")
            reader = os.open(f"{folder}/checkpoint.pt", os.O_RDONLY | os.O_NONBLOCK)
            with Path(f"{folder}/checkpoint.pt").open("wb", buffering=0) as file:
                torch.save(torch.ones(1_000_000), file)
            os.close(reader)
    dist.barrier()


def compiling() -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        if am_victim():
            stall()
        return graph.forward

    ar(torch.compile(lambda x: x * 2, backend=backend)(X))
    ar()


class _Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if am_victim() and index == 5:
            stall()
        return torch.ones(16)


def _train_on(workers: int) -> None:
    for _ in torch.utils.data.DataLoader(_Samples(), batch_size=2, num_workers=workers):
        step()


def data_loader() -> None:
    _train_on(0)


def data_loader_worker() -> None:
    _train_on(1)


def side_group() -> None:
    side = groups_by(lambda rank: rank in (VICTIM, (VICTIM + 1) % WORLD))
    for number in range(3):
        if am_victim() and number == 2:
            stall()
        if RANK in (VICTIM, (VICTIM + 1) % WORLD):
            ar(group=side)
        ar()


def side_mismatch() -> None:
    side = groups_by(lambda rank: rank // 3)
    if RANK < 3:
        if am_victim():
            dist.broadcast(X, 0, group=side)
        else:
            ar(group=side)
    ar()


def wrong_root() -> None:
    dist.broadcast(X, VICTIM if am_victim() else (VICTIM + 1) % WORLD)
    step()


def spin() -> None:
    if am_victim():
        until_s = time.monotonic() + STALL_S
        while time.monotonic() < until_s:
            continue
    step()


def lock() -> None:
    if am_victim():
        mutex = threading.Lock()
        mutex.acquire()
        mutex.acquire(timeout=STALL_S)
    step()


def metric_group() -> None:
    """The first to finish its validation goes on to the loss, in a second group; the others still gather."""
    metrics = dist.new_group(list(range(WORLD)))
    for _ in range(3 if am_victim() else 4):
        dist.all_gather([torch.empty(1024) for _ in range(WORLD)], X, group=metrics)
    ar()


def skipped_group() -> None:
    """One rank goes on without creating the group that the others create."""
    if not am_victim():
        dist.new_group(list(range(WORLD)))
    ar()


def late_group() -> None:
    if am_victim():
        stall()
    ar(group=dist.new_group(list(range(WORLD))))


def unread_message() -> None:
    """One rank sends once more than its neighbour receives."""
    _ring()
    if am_victim():
        dist.send(torch.ones(8_000_000), (RANK + 1) % WORLD)
    dist.barrier()


def unsent_message() -> None:
    """One rank receives but does not send."""
    _ring()
    into = torch.empty(1024)
    works = [dist.irecv(into, (RANK - 1) % WORLD)]
    if not am_victim():
        works.append(dist.isend(X, (RANK + 1) % WORLD))
    for work in works:
        work.wait()
    dist.barrier()


def sharded() -> None:
    """As FSDP does: parameters gathered, gradients scattered."""
    shard, whole = torch.ones(1024 // WORLD), torch.empty(1024)
    for number in range(4):
        dist.all_gather_into_tensor(whole, shard)
        dist.reduce_scatter_tensor(shard, X)
        if am_victim() and number == 2:
            stall()


# --- healthy, or merely slow


def slow() -> None:
    for _ in range(8):
        if am_victim():
            time.sleep(0.12)
        step()


def one_long_step() -> None:
    step()
    if am_victim():
        time.sleep(1.3)
    step()


def ever_slower() -> None:
    for number in range(24):
        time.sleep(0.02 * number)
        step()


def checkpoint_pause() -> None:
    step()
    if am_victim():
        save_for(3.0)
    dist.barrier()
    step()


def save_for(seconds: float) -> None:
    time.sleep(seconds)


def evaluation() -> None:
    step()
    with everstep.worker.phase("evaluating"):
        time.sleep(3.0)
    step()


def evaluate_alone() -> None:
    step()
    if am_victim():
        evaluate(2.5)
    dist.barrier()
    step()


def evaluate(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.05)


def slow_pipeline() -> None:
    _pipeline(10, lambda _: time.sleep(0.1))
    dist.barrier()
    step()


def healthy_mesh() -> None:
    tp, dp = groups_by(lambda rank: rank // 2), groups_by(lambda rank: rank % 2)
    for _ in range(20):
        ar(group=tp)
        ar(group=dp)
        step()


def healthy_ring() -> None:
    for _ in range(20):
        _ring()
        step()


def late_end() -> None:
    """One rank has something to export when the others have ended."""
    step()
    dist.barrier()
    if am_victim():
        time.sleep(3.0)


def main() -> None:
    dist.init_process_group("gloo")
    for _ in range(STEPS_BEFORE):
        step()
        time.sleep(0.01)
    dist.barrier()
    globals()[sys.argv[1]]()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
