"""`make bench-checkpoint-peers`: what copies on other hosts cost, in time per transfer and in steps of training.

Two simulated hosts (a memory folder and a replicator each) copy each other's shard over loopback, beside two ranks that
train on the same cores; TLS and plain, at several rates, beside the round's memcpy. Rounds are paired: steps without a
transfer, then with one.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/...` finds its package

import numpy as np

from bench.figures import median, spread
from bench.machine import cpu_s, load1
from everstep.adapters.checkpoints.memory_folder import open_folder, remove_folder
from everstep.adapters.checkpoints.memory_slots import RankSlots, SlotHeader, image_path, rest_path
from everstep.adapters.checkpoints.peer_files import (
    COPIES_NAME,
    CREDENTIALS_NAME,
    PeerRoster,
    read_address,
    write_roster,
)
from everstep.adapters.checkpoints.peer_line import make_credentials
from everstep.adapters.workers.piped_process import PipedProcess
from everstep.policy.checkpoints import SlotState
from everstep.worker.format.seal import seal_of

HOSTS = ("a", "b")
QUIET_STEPS = 8
WITHIN_S = 120.0


class Pair:
    """Two hosts that keep copies for each other."""

    def __init__(self, shard_bytes: int, *, encrypted: bool, bytes_per_s: float) -> None:
        self._content = [np.random.default_rng(n).bytes(shard_bytes) for n in range(2)]
        self._folders = [open_folder(f"bench-{os.getpid()}-{host}") for host in HOSTS]
        self.replicators = []
        for folder in self._folders:
            if folder is self._folders[0]:
                make_credentials(folder.path / CREDENTIALS_NAME)
            else:
                (folder.path / CREDENTIALS_NAME).mkdir(mode=0o700)
                for source in (self._folders[0].path / CREDENTIALS_NAME).iterdir():
                    target = folder.path / CREDENTIALS_NAME / source.name
                    target.touch(mode=0o600)
                    target.write_bytes(source.read_bytes())
            self.replicators.append(PipedProcess("everstep.worker.peers.replicator", [str(folder.path)]))
            self.replicators[-1].ensure()
        self._wait(lambda: all(read_address(folder.path) for folder in self._folders))
        for number, host in enumerate(HOSTS):
            roster = PeerRoster(
                generation=1,
                host=host,
                addresses={h: read_address(f.path) for h, f in zip(HOSTS, self._folders, strict=True)},
                ranks={"a": (0,), "b": (1,)},
                keepers={"a": "b", "b": "a"},
                bytes_per_s=bytes_per_s,
                encrypted=encrypted,
            )
            write_roster(self._folders[number].path, roster)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for replicator, folder in zip(self.replicators, self._folders, strict=True):
            replicator.finish(within_s=10, what="a replicator goes on")
            folder.release()
            remove_folder(folder.path)

    def prepare(self, step: int) -> list[SlotHeader]:
        """Fill a slot of each; nobody knows of it yet."""
        headers = []
        for rank, content in enumerate(self._content):
            folder = self._folders[rank].path
            with image_path(folder, rank, step % 3).open("wb") as file:
                file.write(content)
            rest_path(folder, rank, step % 3).write_bytes(b"")
            headers.append(
                SlotHeader(
                    state=SlotState.COMPLETE,
                    step=step,
                    layout="a" * 32,
                    image_bytes=len(content),
                    image_seal=seal_of(content),
                    attempt=1,
                    facts=b'{"world_size":2}',
                )
            )
        return headers

    def transfer(self, step: int, headers: Sequence[SlotHeader]) -> tuple[float, float]:
        """From the moment that the step is in memory until both hosts have both shards of it, tested."""
        began_s = time.monotonic()
        for rank, header in enumerate(headers):
            RankSlots(self._folders[rank].path, rank).write(step % 3, header)
        copies = [RankSlots(f.path / COPIES_NAME, rank) for f in self._folders for rank in range(2)]
        self._wait(lambda: all(found.find(step) is not None for found in copies))
        return began_s, time.monotonic()

    @staticmethod
    def _wait(condition: Any) -> None:
        ends_s = time.monotonic() + WITHIN_S
        while not condition():
            if time.monotonic() > ends_s:
                raise SystemExit("nothing was copied in time")
            time.sleep(0.005)


def memcpy_s(size_bytes: int) -> float:
    source, target = np.ones(size_bytes // 8), np.ones(size_bytes // 8)
    took_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        np.copyto(target, source)
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


class Ranks:
    """Two ranks that train until they are told to stop; rank 0 writes when each step began and how long it took."""

    def __init__(self, layers: int) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="everstep-bench-")) / "steps"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = []
        for rank in range(2):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment = {
                **os.environ,
                **{key: str(value) for key, value in place.items()},
                "MASTER_ADDR": "127.0.0.1",
            }
            command = [sys.executable, __file__, "--rank", str(self._log), "--layers", str(layers)]
            self._ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def steps(self, from_s: float, to_s: float) -> list[float]:
        """The seconds of each step that lies within."""
        if not self._log.exists():
            return []
        rows = [tuple(map(float, line.split())) for line in self._log.read_text().splitlines() if line.count(" ") == 1]
        return [took_s for began_s, took_s in rows if began_s + took_s > from_s and began_s < to_s]

    def wait_steps(self, count: int) -> list[float]:
        from_s = time.monotonic()
        while len(found := self.steps(from_s, float("inf"))[1:]) < count:  # the first had begun before
            if any(rank.poll() is not None for rank in self._ranks) or time.monotonic() - from_s > WITHIN_S:
                raise SystemExit("the ranks do not train")
            time.sleep(0.05)
        return found


def train(log: Path, layers: int) -> None:
    """One rank, for ever."""
    import torch
    import torch.distributed as dist

    from bench.checkpoint_ranks import Training

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training({"kind": "ddp", "layers": layers})
    with log.open("a", buffering=1) if dist.get_rank() == 0 else open(os.devnull, "a") as file:  # noqa: PTH123
        while True:
            began_s = time.monotonic()
            training.step()
            file.write(f"{began_s} {time.monotonic() - began_s}\n")


def measure(
    shard_bytes: int, rounds: int, *, encrypted: bool, bytes_per_s: float, ranks: Ranks | None
) -> dict[str, Any]:
    rows: dict[str, list[float]] = {
        "transfer_s": [],
        "memcpy_s": [],
        "ratio": [],
        "cpu_s": [],
        "slower": [],
        "lost_s": [],
    }
    with Pair(shard_bytes, encrypted=encrypted, bytes_per_s=bytes_per_s) as pair:
        for step in range(1, rounds + 3):
            headers, copy_s = pair.prepare(step), memcpy_s(shard_bytes)
            quiet = ranks.wait_steps(QUIET_STEPS) if ranks else []
            cpu = sum(cpu_s(replicator.pid) for replicator in pair.replicators)
            began_s, ended_s = pair.transfer(step, headers)
            cpu = sum(cpu_s(replicator.pid) for replicator in pair.replicators) - cpu
            if ranks:
                ranks.wait_steps(1)
            if step <= 2:
                continue  # the pages of both copies are touched
            rows["transfer_s"].append(ended_s - began_s)
            rows["memcpy_s"].append(copy_s)
            rows["ratio"].append((ended_s - began_s) / copy_s)
            rows["cpu_s"].append(cpu)
            if ranks:
                busy, base = ranks.steps(began_s, ended_s), statistics.median(quiet)
                rows["slower"].append(100 * (statistics.mean(busy) / base - 1))
                rows["lost_s"].append(sum(busy) - len(busy) * base)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=360, help="of one rank's shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="*", default=[0, 200, 100], help="MB/s; 0: unlimited")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        train(given.rank, given.layers)
    found = []

    def note(name: str, *, encrypted: bool, rate: float, ranks: Ranks | None) -> None:
        rows = measure(given.megabytes * 10**6, given.rounds, encrypted=encrypted, bytes_per_s=rate * 1e6, ranks=ranks)
        text = f"{name:34}" + "".join(
            f" {key} {median(values):7.3f} [{spread(values)}]" for key, values in rows.items() if values
        )
        print(f"{text}  load {load1()}", flush=True)
        found.append({"name": name, "encrypted": encrypted, "mb_per_s": rate, "training": ranks is not None, **rows})

    for encrypted in (True, False):
        note(f"{'TLS' if encrypted else 'plain'}, alone, unlimited", encrypted=encrypted, rate=0, ranks=None)
    with Ranks(given.layers) as ranks:
        ranks.wait_steps(3)
        for rate in given.rates:
            for encrypted in (True, False):
                name = f"{'TLS' if encrypted else 'plain'}, training, {f'{rate:.0f} MB/s' if rate else 'unlimited'}"
                note(name, encrypted=encrypted, rate=rate, ranks=ranks)
    results = Path(__file__).resolve().parent / "results"
    results.mkdir(exist_ok=True)
    now = datetime.now(UTC)
    about = {"at": now.isoformat(), "cpus": os.cpu_count(), "kernel": platform.release(), "megabytes": given.megabytes}
    (results / "checkpoint_peers.json").write_text(json.dumps({**about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
