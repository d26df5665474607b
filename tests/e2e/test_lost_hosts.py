"""Real jobs of two hosts that lose one with all its memory: the same command again goes on from the other's copies."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, bodies, command, command_lines, environment, run, run_id, wait_for
from tests.worker.peer_hosts import complete

from everstep.adapters.checkpoints.memory_folder import SHARED_MEMORY
from everstep.adapters.checkpoints.peer_files import COPIES_NAME
from everstep.adapters.workers.processes import processes_of_run
from everstep.domain.errors import EverstepError
from everstep.domain.events import CheckpointRestored, CheckpointSaved

pytestmark = pytest.mark.e2e
SCRIPT = str(SCRIPTS / "train_hosts.py")
ENDS_WITHIN_S = 90


@dataclass
class Node:
    """One `everstep run` of a job of two."""

    job: "Job"
    number: int
    process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.job.command, "--node-rank", str(self.number), *self.job.program],
            stdout=self.job.log(self.number).open("a"),
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )

    @property
    def memory(self) -> Path:
        """Its folder in shared memory, by its replicator; raises StopIteration where there is none yet."""
        assert self.process is not None
        beside = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in Path(beside).read_text().split()]
        replicator = next(found for found in commands if b"everstep.worker.peers.replicator" in found)
        return Path(replicator[4].decode())

    def lose(self) -> None:
        """The host is gone with all that it had."""
        assert self.process is not None
        memory = self.memory
        name = f"{run_id(self.job.run_dir)}@{memory.name.rpartition('@')[2]}"
        self.process.kill()
        for pid in {*processes_of_run(name), *processes_of(memory)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not processes_of(memory), "the node's processes to go")
        shutil.rmtree(memory)


@dataclass
class Job:
    """A job of two hosts on this machine, two ranks on each; others are spares."""

    run_dir: Path
    count: int
    program: list[str]
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.command = command(
            *("run", "--nnodes", f"2:{self.count}", "--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--run-dir", str(self.run_dir)),
        )
        self.nodes = [Node(self, number) for number in range(self.count)]

    def log(self, number: int) -> Path:
        return self.run_dir.parent / f"node-{number}.log"

    def logs(self) -> str:
        return "".join(self.log(n).read_text() for n in range(self.count) if self.log(n).exists())

    def first_on_disk(self) -> list[int]:
        """What was durable before anything was restored."""
        events = list(bodies(self.run_dir))
        at = next(n for n, body in enumerate(events) if isinstance(body, CheckpointRestored))
        return [body.step for body in events[:at] if isinstance(body, CheckpointSaved)]

    def restored(self) -> list[CheckpointRestored]:
        return [body for body in bodies(self.run_dir) if isinstance(body, CheckpointRestored)]

    def replicated(self, keeper: Node, shards: tuple[int, ...]) -> int:
        """The newest step of which a node holds copies of these shards."""
        with contextlib.suppress(EverstepError, OSError, StopIteration):  # the job has hardly begun
            held = [{v.step for v in complete(keeper.memory / COPIES_NAME, shard)} for shard in shards]
            return max(set.intersection(*held), default=0)
        return 0

    def end(self) -> None:
        for node in self.nodes:
            assert node.process is not None
            assert node.process.wait(ENDS_WITHIN_S) == 0, self.logs()


def processes_of(memory: Path) -> list[int]:
    """Saver and replicator, which carry no mark."""
    return [pid for pid, line in command_lines() if str(memory).encode() in line]


@contextlib.contextmanager
def started(run_dir: Path, count: int, *program: str) -> Iterator[Job]:
    job = Job(run_dir, count, list(program))
    nodes = tuple(job.nodes)
    try:
        for node in nodes[:2]:
            node.start()
        wait_for(lambda: "2 here" in job.logs(), f"two hosts; {job.logs()}", within_s=60)
        for node in nodes[2:]:
            node.start()
        yield job
    finally:
        for node in nodes:
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
                node.process.wait()


Reference = Callable[[str], str]
PACE = "100", "0.03"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The digest of the weights after the same training on one host that nothing touched."""
    known: dict[str, str] = {}

    def digest_of(kind: str) -> str:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            done = run(folder / "run", "--nproc-per-node", "4", SCRIPT, kind, *PACE, str(folder / "whole.txt"))
            assert done.code == 0, done.err
            known[kind] = (folder / "whole.txt").read_text()
        return known[kind]

    return digest_of


CASES = {
    "ddp, the other host, which comes back": ("ddp", 1, 2),
    "ddp, the other host, in whose place a spare is": ("ddp", 1, 3),
    "fsdp2, the host of rank 0 and of the coordinator": ("fsdp2", 0, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_host_that_is_lost_with_all_its_memory_costs_the_steps_since_its_last_copy(
    case: str, tmp_path: Path, whole: Reference
) -> None:
    kind, lost, count = CASES[case]
    expected = whole(kind)
    with started(tmp_path / "job", count, SCRIPT, kind, *PACE, str(tmp_path / "job.txt")) as job:
        gone, left = job.nodes[lost], job.nodes[1 - lost]
        shards = 2 * lost, 2 * lost + 1
        wait_for(lambda: job.replicated(left, shards) >= 20, f"copies; {job.logs()}", within_s=90)
        held = job.replicated(left, shards)
        gone.lose()
        lost_at_s = time.monotonic()
        if count == 2:
            gone.start()
        else:
            job.nodes.remove(gone)
        wait_for(job.restored, f"a restore; {job.logs()}", within_s=60)
        back_s = time.monotonic() - lost_at_s
        restored, trained = job.restored()[0], (tmp_path / "job.steps").read_text().count("0")
        print(f"{case}: {trained - restored.step} steps lost, {back_s:.1f} s until restored")
        assert restored.path == "memory"
        assert restored.step >= held > max(job.first_on_disk(), default=0)
        job.end()
    assert (tmp_path / "job.txt").read_text() == expected
    assert job.logs().count("resuming: True") == 1
    assert list(SHARED_MEMORY.glob(f"everstep-memory-*{run_id(job.run_dir)}*")) == []
