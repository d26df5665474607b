"""`make bench-checkpoint`: what saves and restores cost beside PyTorch's own ways, as multiples of the round's memcpy.

Sizes are given by flags and told in the results; ratios are of the same round on the same machine.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # so that `python bench/checkpoint.py` finds its package

from bench.checkpoint_restart import measure_restart
from bench.figures import Bar, Outcome, bar_json, median, spread, table
from bench.machine import load1
from everstep.adapters.checkpoints.memory_folder import MemoryFolder, open_folder
from everstep.adapters.checkpoints.saver_process import SaverProcess

HERE = Path(__file__).resolve().parent
OTHERS = ("torch.save", "dcp.save", "dcp.async_save thread", "dcp.async_save process", "torch_checkpointing")
"""What people use; the last one only where it is installed: `pip install torch_checkpointing==0.1.1`."""
OURS = ("everstep in line", "everstep overlapped")
SMALL_BYTES = 0.1e9
"""Below this a save's stall is Python rather than bytes."""
LAUNCH_WITHIN_S = 600.0


class Bench:
    """One folder on disk and one in shared memory for all launches of a measurement. `with` cleans up."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self._memory: MemoryFolder | None = None
        self._saver: SaverProcess | None = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_memory()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def memory(self) -> Path:
        if self._memory is None:
            self._memory = open_folder(f"bench-{os.getpid()}")
            self._saver = SaverProcess(self._memory)
        return self._memory.path

    def drop_memory(self) -> None:
        if self._saver is not None:
            self._saver.close(within_s=60.0)
        self._memory = self._saver = None

    def launch(self, world: int, **spec: Any) -> list[dict[str, float]]:
        """Run all ranks to their end; what rank 0 measured."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        directory = Path(spec.get("directory") or self.folder / "checkpoints")
        directory.mkdir(exist_ok=True)
        whole = {**spec, "result": str(result), "directory": str(directory), "memory": str(self.memory)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [self._start(world, rank, port, whole) for rank in range(world)]
        ends_s = time.monotonic() + LAUNCH_WITHIN_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < ends_s:
            if self._saver is not None:
                self._saver.ensure()
            if any(rank.poll() not in (None, 0) for rank in ranks):
                break
            time.sleep(0.05)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
        if "directory" not in spec:
            shutil.rmtree(directory, ignore_errors=True)
        return list(json.loads(result.read_text()))

    def _start(self, world: int, rank: int, port: int, spec: dict[str, Any]) -> "subprocess.Popen[bytes]":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "checkpoint_ranks.py"), json.dumps(spec)]
        return subprocess.Popen(command, env=environment, cwd=HERE.parent)


def plain_write_s(folder: Path, size_bytes: int) -> float:
    """A plain sequential write of so many bytes, and fsync."""
    piece = os.urandom(8 << 20)
    path = folder / "plain"
    began_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size_bytes // len(piece))):
            file.write(piece)
        os.fsync(file.fileno())
    took_s = time.perf_counter() - began_s
    path.unlink()
    return took_s


def ratios(rows: Sequence[dict[str, float]], over: str, under: str) -> list[float]:
    return [row[over] / row[under] for row in rows]


def measure_saves(kind: str, world: int, layers: int, rounds: int) -> Outcome:
    """Stall, cost and time until durable of every method; each round's memcpy and plain write beside it."""
    found: dict[str, list[dict[str, float]]] = {}
    has_extra = importlib.util.find_spec("torch_checkpointing") is not None
    for method in (*(name for name in OTHERS if has_extra or name != "torch_checkpointing"), *OURS):
        with Bench() as bench:
            rows = bench.launch(world, measure="saves", method=method, kind=kind, layers=layers, rounds=rounds)
            found[method] = rows[1:]  # the first save pays for buffers
            total = int(rows[0]["bytes"]) * (world if kind == "fsdp2" else 1)
            for row in found[method]:
                row["first_stall_s"] = rows[0]["stall_s"]
                row["plain_write_s"] = plain_write_s(bench.folder, total)
        print(f"{kind} ×{world} {method}: {text_of(found[method])}", file=sys.stderr)
    name = f"{kind}{world}"
    flat: list[dict[str, object]] = [
        {"kind": kind, "world": world, "method": method, **row} for method, rows in found.items() for row in rows
    ]
    notes = tuple(f"{name}, {method}: {text_of(rows)}" for method, rows in found.items())
    return Outcome(bars=tuple(save_bars(name, found)), rows=flat, notes=notes)


def save_bars(name: str, found: dict[str, list[dict[str, float]]]) -> Iterator[Bar]:
    """Costs are in memcpys of their own rounds before they are compared: methods are measured one after another."""
    overlapped, thread = found["everstep overlapped"], found["dcp.async_save thread"]
    size_bytes = overlapped[0]["bytes"]
    stall = ratios(overlapped, "stall_s", "memcpy_s")
    limit = 0.1 if size_bytes < SMALL_BYTES else 0.03
    size = f"{size_bytes / 1e9:.2f} GB/rank, "
    yield Bar(name=f"stall_{name}", value=median(stall), unit="memcpy", limit=limit, spread=size + spread(stall))
    cheapest = min(median(ratios(found[other], "cost_s", "memcpy_s")) or 0.0 for other in found if other not in OURS)
    usual = median(ratios(thread, "cost_s", "memcpy_s")) or 0.0
    for method in OURS:
        cost = ratios(found[method], "cost_s", "memcpy_s")
        way = method.removeprefix("everstep ").replace(" ", "_")
        for what, under, most in (("of dcp.async_save", usual, 0.4), ("of the cheapest other", cheapest, 1.0)):
            shares = [one / max(1e-9, under) for one in cost]
            title = f"cost_{name}_{way}" + ("" if most < 1 else "_beside_all")
            yield Bar(name=title, value=median(shares), unit=what, limit=most, spread=spread(shares))
    durable = ratios(overlapped, "durable_alone_s", "plain_write_s")
    yield Bar(name=f"durable_{name}", value=median(durable), unit="plain writes", limit=1.5, spread=spread(durable))


def text_of(rows: Sequence[dict[str, float]]) -> str:
    def middle(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    stall, cost = ratios(rows, "stall_s", "memcpy_s"), ratios(rows, "cost_s", "memcpy_s")
    return (
        f"stall {middle('stall_s'):.4f} s = {spread(stall)} memcpy, the first {middle('first_stall_s'):.2f} s; durable "
        f"after {middle('durable_s'):.2f} s ({middle('durable_alone_s'):.2f} s without training); "
        f"cost {middle('cost_s'):.2f} s = {spread(cost)} memcpy (step {middle('step_s'):.3f} s, load {load1()})"
    )


def measure_pace(world: int, layers: int, rounds: int, steps: int) -> Outcome:
    with Bench() as bench:
        rows = bench.launch(world, measure="pace", kind="ddp", layers=layers, rounds=rounds, steps=steps, step_s=0.5)
    slower = [100 * (row["with_s"] / row["without_s"] - 1) for row in rows]
    size = f"{rows[0]['bytes'] / world / 1e6:.0f} MB copied by each of {world} ranks, "
    bar = Bar(name="memory_every_step", value=median(slower), unit="%", limit=2.0, spread=size + spread(slower))
    return Outcome(bars=(bar,), rows=[dict(row) for row in rows])


def measure_restore(kind: str, world: int, layers: int, rounds: int) -> Outcome:
    """From memory over a warm copy, from disk over reading its files; with the optimizer's memory there and not.

    From memory also as a process does that was not forked ahead and reads the slots.
    """
    with Bench() as bench:
        directory = str(bench.folder / "kept")
        options: dict[str, Any] = {"kind": kind, "layers": layers, "directory": directory}
        bench.launch(world, measure="saves", method="everstep in line", rounds=2, **options)
        found = {
            (source, fresh): bench.launch(
                world,
                measure="restore",
                source=source.split()[0],
                is_mapped=source == "memory mapped",
                is_fresh=fresh,
                rounds=rounds,
                **options,
            )
            for source in ("memory mapped", "memory", "disk")
            for fresh in (False, True)
        }
    name, size = f"{kind}{world}", f"{found['memory', False][0]['bytes'] / 1e9:.2f} GB/rank, "
    warm = ratios(found["memory mapped", False], "restore_s", "memcpy_s")
    cold = ratios(found["disk", False], "restore_s", "cold_read_s")
    bars = (
        Bar(name=f"restore_memory_{name}", value=median(warm), unit="memcpy", limit=1.8, spread=size + spread(warm)),
        Bar(name=f"restore_disk_{name}", value=median(cold), unit="cold reads", limit=1.5, spread=size + spread(cold)),
    )
    fresh = ratios(found["memory mapped", True], "restore_s", "memcpy_s")
    read, fresh_read = (ratios(found["memory", is_fresh], "restore_s", "memcpy_s") for is_fresh in (False, True))
    fresh_disk = ratios(found["disk", True], "restore_s", "cold_read_s")
    least = ratios(found["memory", False], "plain_read_s", "memcpy_s")
    notes = (
        f"restore_memory_{name}, with fresh pages for the optimizer: {spread(fresh)} memcpy",
        f"restore_memory_{name}, the slots read instead of mapped before: {spread(read)} memcpy",
        f"restore_memory_{name}, read, with fresh pages for the optimizer: {spread(fresh_read)} memcpy",
        f"restore_memory_{name}, reading the same bytes without any test: {spread(least)} memcpy",
        f"restore_disk_{name}, with fresh pages for the optimizer: {spread(fresh_disk)} cold reads",
    )
    rows = [{"source": source, "fresh": fresh, **row} for (source, fresh), rows in found.items() for row in rows]
    return Outcome(bars=bars, rows=rows, notes=notes)


def measurements(args: argparse.Namespace) -> dict[str, Callable[[], Outcome]]:
    layers, rounds = args.layers, args.rounds
    return {
        "ddp2": lambda: measure_saves("ddp", 2, layers, rounds),
        "fsdp2": lambda: measure_saves("fsdp2", 2, layers, rounds),
        "ddp4": lambda: measure_saves("ddp", 4, max(1, layers // 3), rounds),
        "pace": lambda: measure_pace(2, 2, 5, args.steps),
        "restore_ddp2": lambda: measure_restore("ddp", 2, layers, rounds),
        "restore_fsdp2": lambda: measure_restore("fsdp2", 2, layers, rounds),
        "restart2": lambda: measure_restart(world=2, layers=layers, kills=args.kills),
        "restart4": lambda: measure_restart(world=4, layers=max(1, layers // 3), kills=args.kills),
    }


def main() -> int:
    """Returns 0 when every bar is met, 1 when one is missed, 2 for a wrong name."""
    parser = argparse.ArgumentParser(description="Measure saves, restores and restarts; results go to bench/results.")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="measure these only")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="85 MB of state each (12: 1.02 GB)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="saves for each method, the first dropped")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of half a second in a round of pace")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="kills of all ranks")
    args = parser.parse_args()
    todo = measurements(args)
    names = args.only.split(",") if args.only else list(todo)
    if unknown := [name for name in names if name not in todo]:
        print(f"--only {','.join(unknown)}: unknown; the names are {', '.join(todo)}", file=sys.stderr)
        return 2
    began, outcomes = datetime.now(UTC), {}
    for name in names:
        print(f"== {name} (load {load1()})", file=sys.stderr)
        try:
            outcomes[name] = todo[name]()
        except Exception as error:  # outermost frame
            text = f"{name} broke off: {type(error).__name__}: {error}"
            print(text, file=sys.stderr)
            outcomes[name] = Outcome(bars=(Bar(name=name, value=None, unit="", limit=0, spread=text),))
        print(table(outcomes[name].bars), file=sys.stderr)  # an interrupted run has told what it has
    bars = [bar for outcome in outcomes.values() for bar in outcome.bars]
    print(table(bars))
    for outcome in outcomes.values():
        print("\n".join(outcome.notes))
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    content = {
        "began": began.isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "load_at_end": load1()},
        "arguments": vars(args),
        "bars": [bar_json(bar) for bar in bars],
        "notes": [note for outcome in outcomes.values() for note in outcome.notes],
        "rows": {name: list(outcome.rows) for name, outcome in outcomes.items()},
    }
    (results / "checkpoint.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(bar.is_met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
