"""One rank of the checkpoint benchmark: trains a block model and saves it in one way; writes what it measured as JSON.

Started by bench/checkpoint.py once for each method, so that one method's buffers do not count against another.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.policy.staging import Course, Way

WIDTH = 768
WITHIN_S = 180.0
TURN_STEPS = 10


class Block(nn.Module):
    """As many parameters as a transformer block of this width: 28 MB in single precision, 85 MB with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(3 * WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(torch.tanh(self.mix(self.norm(x))))
        return x + self.down(torch.relu(self.up(x)))


class Training:
    """The model, its optimizer and a step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(*(Block() for _ in range(spec["layers"])))
        if spec["kind"] == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in plain:
                fully_shard(block, mesh=mesh)
            self.model: nn.Module = fully_shard(plain, mesh=mesh)
        else:
            self.model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(16, WIDTH)
        self.lock: Callable[[], AbstractContextManager[Any]] = nullcontext  # what a method wants around the optimizer

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        with self.lock():
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """What people save: the state dicts of PyTorch."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def local_bytes(training: Training) -> int:
    from everstep.worker.state import local

    with torch.no_grad():
        tensors = [*training.model.parameters(), *(t for s in training.optimizer.state.values() for t in s.values())]
        return sum(local(t).numel() * local(t).element_size() for t in tensors)


Method = tuple[Callable[[int], None], Callable[[int], bool]]  # save a step; is it durable?


def torch_save(training: Training, directory: Path, _: Any) -> Method:
    """Rank 0 writes (with shards: every rank), synced."""

    def save(step: int) -> None:
        rank = dist.get_rank()
        if rank == 0 or not isinstance(training.model, DistributedDataParallel):
            with (directory / f"{step}-{rank}.pt").open("wb") as file:
                torch.save({"m": training.model.state_dict(), "o": training.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    return save, lambda _: True


def dcp_save(training: Training, directory: Path, _: Any) -> Method:
    import torch.distributed.checkpoint as dcp

    return lambda step: dcp.save(training.state(), checkpoint_id=directory / str(step)) and None, lambda _: True


def dcp_async(training: Training, directory: Path, _: Any, *, kind: str) -> Method:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    group = dist.new_group(backend="gloo")
    futures: dict[int, Any] = {}

    def save(step: int) -> None:
        futures[step] = dcp.async_save(
            training.state(),
            checkpoint_id=directory / str(step),
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )

    return save, lambda step: bool(futures[step].done())


def torch_checkpointing_async(training: Training, directory: Path, _: Any) -> Method:
    """Not synced to disk: its "durable" is "written". Direct I/O is off, since it fails on ext4 (version 0.1.1)."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    training.lock = manager.lock
    futures: dict[int, Any] = {}

    def save(step: int) -> None:
        payload = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        futures[step] = manager.save(str(directory / str(step)), payload)

    return save, lambda step: bool(futures[step].done())


def everstep_memory(training: Training, directory: Path, spec: dict[str, Any], *, way: Way = Way.TRIAL) -> Method:
    from everstep.adapters.checkpoints.memory_slots import SavePages, SavePlan
    from everstep.worker.data import randomness
    from everstep.worker.observer import current
    from everstep.worker.ranks import Ranks
    from everstep.worker.saving.memory_tier import MemoryTier, draft_of
    from everstep.worker.saving.schedule import SaveConfig
    from everstep.worker.state import Sharing, TrainingState

    state = TrainingState(model=training.model, optimizer=training.optimizer, scheduler=None, extra={})
    memory, ranks = Path(spec["memory"]), Ranks()
    tier = MemoryTier(memory, ranks, current(), SaveConfig(every_steps=spec.get("every_steps", 1)))
    tier.note_step()
    state.begin_body()
    training.step()
    tier.open(state, directory, 1)
    assert tier.is_on(1), "no room for the slots"
    pages, replicated = SavePages(memory), state.sharing is Sharing.REPLICATED
    dist.barrier()  # else a slower rank, still opening, could put the first plan back in its place
    if way is not Way.TRIAL and ranks.leads:
        pages.write_plan(SavePlan(from_step=1, course=Course(stride=1, way=way), world_size=ranks.world_size))
    dist.barrier()

    def save(step: int) -> None:
        own = {"random": randomness.capture(), "data": None}
        tier.note_step()
        tier.save(step, own, draft_of(step, ranks.world_size, 1, (), replicated))

    return save, lambda step: pages.word().durable >= step


METHODS: dict[str, Callable[[Training, Path, Any], Method]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    "dcp.async_save thread": partial(dcp_async, kind="thread"),
    "dcp.async_save process": partial(dcp_async, kind="process"),
    "torch_checkpointing": torch_checkpointing_async,
    "everstep": everstep_memory,
    "everstep in line": partial(everstep_memory, way=Way.IN_LINE),
    "everstep overlapped": partial(everstep_memory, way=Way.OVERLAPPED),
}


def memcpy_s(bytes_: int) -> float:
    """One warm copy of so many bytes, by all ranks at once: four copies of a quarter."""
    source, target = torch.ones(bytes_ // 16), torch.ones(bytes_ // 16)
    target.copy_(source)
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return worst(time.perf_counter() - began_s)


def worst(value: float) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def timed(work: Callable[[], object]) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    work()
    return worst(time.perf_counter() - began_s)


def measure_saves(spec: dict[str, Any], training: Training, directory: Path) -> list[dict[str, float]]:
    save, is_durable = METHODS[spec["method"]](training, directory, spec)
    size, rows = local_bytes(training), []
    for number in range(2, 2 + spec["rounds"]):
        step_s = statistics.median(timed(training.step) for _ in range(5))
        copy_s = memcpy_s(size)
        stall_s = timed(lambda number=number: save(number))  # type: ignore[misc]
        began_s, extra_s, steps = time.perf_counter(), 0.0, 0
        while worst(float(not is_durable(number))) and time.perf_counter() - began_s < WITHIN_S:
            extra_s += timed(training.step) - step_s
            steps += 1
        rows.append(
            {
                "stall_s": stall_s, "memcpy_s": copy_s, "step_s": step_s, "steps_until_durable": steps,
                "durable_s": stall_s + time.perf_counter() - began_s, "cost_s": stall_s + max(0.0, extra_s),
                "bytes": size,
            }
        )  # fmt: skip
    for number, row in enumerate(rows, 2 + spec["rounds"]):  # once more without training, to see durability alone
        dist.barrier()
        began_s = time.perf_counter()
        save(number)
        while not is_durable(number) and time.perf_counter() - began_s < WITHIN_S:
            time.sleep(0.005)
        row["durable_alone_s"] = worst(time.perf_counter() - began_s)
    return rows


def measure_pace(spec: dict[str, Any], training: Training, directory: Path) -> list[dict[str, float]]:
    """Steps padded to a fixed length, in turns without and with a save to memory at every one.

    Turns are short, so that both see the same load. The first step of a turn is not counted: a copy that began in the
    turn before may end in it.
    """
    save, _ = everstep_memory(training, directory, {**spec, "every_steps": None})
    rows, number = [], 1
    for _ in range(spec["rounds"]):
        taken_s = {"without_s": 0.0, "with_s": 0.0}
        for turn in range(2 * max(1, spec["steps"] // TURN_STEPS)):
            name = "with_s" if turn % 2 else "without_s"
            dist.barrier()
            for step in range(TURN_STEPS + 1):
                number += 1
                began_s = time.perf_counter()
                training.step()
                time.sleep(max(0.0, began_s + spec["step_s"] - time.perf_counter()))
                if name == "with_s":
                    save(number)
                if step:
                    taken_s[name] += time.perf_counter() - began_s
        rows.append({"bytes": local_bytes(training), **{name: worst(value) for name, value in taken_s.items()}})
    return rows


def measure_restore(spec: dict[str, Any], training: Training, directory: Path) -> list[dict[str, float]]:
    """What an attempt does to come back: elect, read and test into live tensors, hand over.

    `is_fresh`: the optimizer has no state yet, as in a new process; else its memory is there. `is_mapped`: the slots
    were mapped before, as in a process that `everstep run` has forked ahead.
    """
    from everstep.worker.observer import current
    from everstep.worker.ranks import Ranks
    from everstep.worker.restoring import slot_maps
    from everstep.worker.restoring.restore import Restoring
    from everstep.worker.state import TrainingState

    ranks, rows = Ranks(), []
    training.step()
    size = local_bytes(training)
    state = TrainingState(model=training.model, optimizer=training.optimizer, scheduler=None, extra={})
    memory = Path(spec["memory"]) if spec["source"] == "memory" else None
    mine = "*" if spec["kind"] == "ddp" else f"__{dist.get_rank()}_0"
    files = sorted(next(directory.glob("step-*")).glob(f"{mine}.distcp")) if memory is None else []
    slots = slots_of(memory, spec["kind"]) if memory is not None else []
    target = bytearray(sum(path.stat().st_size for path in slots))
    slot_maps.release_later = lambda: None  # type: ignore[assignment]  # as if each round were the only one
    if memory is not None and spec.get("is_mapped"):
        slot_maps.map_slots(memory, dist.get_rank())
        while slot_maps.populate_some():
            pass

    def restore() -> None:
        assert Restoring(state, directory, memory, ranks, current(), 1).run() is not None

    for _ in range(spec["rounds"]):
        row = {"memcpy_s": memcpy_s(size), "bytes": float(size)}
        if memory is None:
            drop_from_cache(files)
            row["cold_read_s"] = timed(lambda: read_plainly(files))
            drop_from_cache(files)
        else:
            row["plain_read_s"] = timed(lambda: read_to(target, slots))
        if spec["is_fresh"]:
            training.optimizer.state.clear()
            gc.collect()  # the fresh memory of the round before lies in circles of references
        row["restore_s"] = timed(restore)
        rows.append(row)
    return rows


def slots_of(memory: Path, kind: str) -> list[Path]:
    """The files in memory that a restore reads, of the newest step: all ranks' with DDP, else this rank's."""
    from everstep.adapters.checkpoints.memory_slots import RankSlots, image_path
    from everstep.policy.checkpoints import committed_steps

    headers = [RankSlots(memory, rank) for rank in range(dist.get_world_size())]
    step = committed_steps([found.slots() for found in headers])[0]
    ranks = range(len(headers)) if kind == "ddp" else [dist.get_rank()]
    return [image_path(memory, rank, slot) for rank in ranks if (slot := headers[rank].find(step)) is not None]


def read_to(target: bytearray, files: list[Path]) -> None:
    """Read into memory that is warm, without a test: the least that any way of reading costs here."""
    view, at = memoryview(target), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view[at : at + (1 << 19)]):
                at += count


def drop_from_cache(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def read_plainly(files: list[Path]) -> None:
    """One after the other, into a buffer that is used again."""
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory = Path(spec["directory"])
    training = Training(spec)
    training.step()
    measure = {"saves": measure_saves, "pace": measure_pace, "restore": measure_restore}[spec["measure"]]
    rows = measure(spec, training, directory)
    if dist.get_rank() == 0:
        Path(spec["result"]).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # the libraries' threads and processes are of no more use


if __name__ == "__main__":
    main()
