"""Real jobs of two nodes on this machine: ranks and nodes are killed, with the coordinator too, and the job goes on."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.jobs import SCRIPTS, assert_no_orphans, bodies_of, command, environment, run, run_id, wait_for

from everstep.adapters.workers.processes import processes_of_run
from everstep.domain.commands import FinishJob, RecordVerdict
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointMirrored,
    CheckpointRestored,
    HostJoined,
    HostLost,
    RunResumed,
    StepsFinished,
    WorkersStarted,
)
from everstep.domain.verdicts import Trouble
from everstep.worker.format.manifest import complete_steps

pytestmark = pytest.mark.e2e
COUNTED = str(SCRIPTS / "train_counted.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Starts and watches the nodes of one job."""

    def __init__(self, folder: Path, *program: str, flags: Sequence[str] = ("--nnodes", "2"), **extra: str) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.flags, self.program, self.extra = tuple(flags), program, extra
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, program: Sequence[str] = ()) -> subprocess.Popen[str]:
        """One node; its output goes to node-N.log."""
        always = ("--nproc-per-node", "2", "--rdzv-endpoint", self.endpoint, "--run-dir", str(self.run_dir))
        process = subprocess.Popen(
            command("run", *self.flags, *always, *flags, *(program or self.program)),
            stdout=self.log(len(self.processes)).open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**self.extra),
        )
        self.processes.append(process)
        return process

    def log(self, number: int) -> Path:
        return self.folder / f"node-{number}.log"

    def said(self, number: int = -1) -> str:
        return self.log(number % len(self.processes)).read_text()

    def of(self, kind: type[Any]) -> list[Any]:
        return bodies_of(self.run_dir, kind)

    def wait_for_steps(self, attempt: int) -> None:
        """Until both nodes have finished steps of this attempt."""

        def has_trained() -> bool:
            return len({body.host for body in self.of(StepsFinished) if body.attempt == attempt}) == 2

        wait_for(has_trained, f"steps of attempt {attempt}; see {self.folder}", within_s=90)

    def everything(self) -> str:
        return "\n".join(f"--- node {number}\n{self.said(number)}" for number in range(len(self.processes)))

    def codes(self, *processes: subprocess.Popen[str]) -> list[int]:
        try:
            return [process.wait(60) for process in processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.everything()) from None

    def kill(self, process: subprocess.Popen[str], number: int) -> None:
        """kill -9 of a node with all its ranks."""
        mark = f"{run_id(self.run_dir)}@{number}"
        pids = processes_of_run(mark)
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not processes_of_run(mark), "the node's processes to go")


@contextlib.contextmanager
def nodes(folder: Path, *program: str, flags: Sequence[str] = ("--nnodes", "2"), **extra: str) -> Iterator[Nodes]:
    job = Nodes(folder, *program, flags=flags, **extra)
    try:
        yield job
    finally:
        for process in job.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_a_job_goes_on_after_a_rank_a_node_and_the_coordinators_node_are_killed(tmp_path: Path) -> None:
    with nodes(tmp_path, COUNTED, "200", str(tmp_path)) as job:
        first = job.start()
        wait_for(job.run_dir.joinpath("ledger.jsonl").exists, "the coordinator")
        second = job.start()
        job.wait_for_steps(1)
        name = socket.gethostname()
        assert [(body.host, body.place) for body in job.of(HostJoined)] == [(name, 0), (f"{name}.2", None)]

        victim = next(body for body in job.of(WorkersStarted) if body.host == f"{name}.2").pids[1]
        os.kill(victim, signal.SIGKILL)
        job.wait_for_steps(2)
        (verdict,) = job.of(RecordVerdict)
        assert (verdict.verdict.trouble, verdict.verdict.ranks) == (Trouble.DEAD, (3,))

        job.kill(second, 2)
        wait_for(lambda: job.of(HostLost), "the loss to be seen")
        second = job.start()
        job.wait_for_steps(3)
        assert [body.host for body in job.of(HostJoined)][2:] == [f"{name}.2"]
        assert "is lost; waiting up to 300 s" in job.said(0)

        job.kill(first, 1)
        wait_for(lambda: "the coordinator is gone" in job.said(2), "the other node to notice")
        first = job.start()
        job.wait_for_steps(4)
        assert len(job.of(RunResumed)) == 1
        assert job.codes(first, second) == [ExitCode.DONE, ExitCode.DONE], job.everything()
        (end,) = job.of(FinishJob)
        assert [job.said(number).count(end.summary) for number in (2, 3)] == [1, 1]
    for number in (1, 2):
        assert processes_of_run(f"{run_id(job.run_dir)}@{number}") == []
    for rank in range(4):
        done = [int(line) for line in (tmp_path / f"steps.{rank}").read_text().splitlines()]
        assert set(done) == set(range(1, 201))
    assert (job.run_dir / "credentials").stat().st_mode & 0o777 == 0o700
    assert {path.name for path in (job.run_dir / "evidence").rglob("snapshot-1.*")} >= {
        f"snapshot-1.{name}.json",
        f"snapshot-1.{name}.2.json",
    }


def test_sigterm_to_any_node_ends_the_whole_job(tmp_path: Path) -> None:
    with nodes(tmp_path, COUNTED, "2000", str(tmp_path)) as job:
        both = [job.start("--node-rank", str(rank)) for rank in (1, 0)]
        job.wait_for_steps(1)
        assert sorted(body.place for body in job.of(HostJoined)) == [0, 1]
        both[0].send_signal(signal.SIGTERM)
        assert job.codes(*both) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED], job.everything()
        assert "stopped by SIGTERM on " in job.said(0)
    assert_no_orphans(job.run_dir)


def test_two_nodes_on_which_everything_is_gone_go_on_from_the_mirror(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    program = (str(SCRIPTS / "train_slowly.py"), "300", str(tmp_path / "digest"), "0.3")
    assert run(tmp_path / "untouched", "--nproc-per-node", "4", *program, "0.0").code == ExitCode.DONE
    expected = (tmp_path / "digest").read_text()
    flags = ("--nnodes", "2", "--checkpoint-mirror", f"file://{mirror}")
    (first := tmp_path / "first").mkdir()
    with nodes(first, *program, "0.03", flags=flags) as job:
        both = [job.start("--node-rank", str(rank)) for rank in (0, 1)]
        wait_for(lambda: len(job.of(CheckpointMirrored)) >= 2, "two steps in the mirror", within_s=90)
        both[1].send_signal(signal.SIGTERM)
        assert job.codes(*both) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED], job.everything()
    newest = complete_steps(mirror)[0]
    assert complete_steps(job.run_dir / "checkpoints")[0] == newest
    shutil.rmtree(first)
    (second := tmp_path / "second").mkdir()
    with nodes(second, *program, "0.0", flags=flags) as job:
        both = [job.start("--node-rank", str(rank)) for rank in (1, 0)]
        assert job.codes(*both) == [ExitCode.DONE, ExitCode.DONE], job.everything()
        assert [body.step for body in job.of(CheckpointRestored)] == [newest]
        assert "was fetched from file://" in job.everything()
    assert (tmp_path / "digest").read_text() == expected
    assert complete_steps(mirror)[0] == 300


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


def test_too_few_hosts_in_time_end_with_who_is_there(tmp_path: Path) -> None:
    with nodes(tmp_path, "--no-standby", "--host-timeout", "2", COUNTED, "5", str(tmp_path)) as job:
        assert job.codes(job.start()) == [ExitCode.RETRY_ELSEWHERE]
        assert f"only 1 of 2 hosts are here ({socket.gethostname()}) after 2 s" in last_line(job.said())


def test_a_coordinator_that_is_not_there_is_waited_for_so_long(tmp_path: Path) -> None:
    with nodes(tmp_path, "--no-standby", "--host-timeout", "3", COUNTED, "5", str(tmp_path)) as job:
        assert job.codes(job.start("--node-rank", "1")) == [ExitCode.RETRY_HERE]
        assert f"waiting for the coordinator at {job.endpoint}" in job.said()
        assert f"the coordinator at {job.endpoint} was not there within 3 s" in last_line(job.said())
        assert "Traceback" not in job.said()


def test_a_port_in_use_is_told_with_what_to_write(tmp_path: Path) -> None:
    with nodes(tmp_path, "--no-standby", COUNTED, "5", str(tmp_path)) as job, socket.socket() as taken:
        taken.bind(("127.0.0.1", int(job.endpoint.rpartition(":")[2])))
        taken.listen()
        assert job.codes(job.start("--node-rank", "0")) == [ExitCode.USAGE]
        assert "is in use, by another program or job; write another one in --rdzv-endpoint" in last_line(job.said())


def test_nodes_that_were_started_differently_are_told_how(tmp_path: Path) -> None:
    with nodes(tmp_path, "--no-standby", COUNTED, "5", str(tmp_path), flags=()) as job:
        first = job.start("--nnodes", "2")
        wait_for(lambda: "1 here" in job.said(0), "the coordinator")
        others = [job.start("--nnodes", "3"), job.start("--nnodes", "2", program=("--no-standby", COUNTED, "6"))]
        assert job.codes(*others) == [ExitCode.USAGE, ExitCode.USAGE]
        assert "--nnodes is 3 on" in last_line(job.said(1))
        assert f"the command is {COUNTED} 6 on" in last_line(job.said(2))
        first.send_signal(signal.SIGINT)
        assert job.codes(first) == [ExitCode.PREEMPTED]
