"""`everstep run` as a drop-in for torchrun: scripts, flags, environment, output, ends."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tests.e2e.jobs import (
    SCRIPTS,
    assert_no_orphans,
    bodies,
    command,
    environment,
    latest_workers,
    run,
    started,
    wait_for,
)

from everstep.domain.commands import FinishJob
from everstep.domain.errors import ExitCode
from everstep.domain.events import StepsFinished, WorkersStarted

pytestmark = pytest.mark.e2e
DDP = str(SCRIPTS / "train_ddp.py")


def test_an_unchanged_ddp_script_runs_and_its_steps_are_counted(tmp_path: Path) -> None:
    done = run(tmp_path, "--standalone", "--nproc-per-node", "4", DDP, "30", "0.01")
    assert done.code == ExitCode.DONE, done.err
    assert "finished 30 steps, restart 0" in done.out
    assert max(steps.last_step for steps in done.bodies(StepsFinished)) == 30
    assert done.bodies(WorkersStarted)[0].warm


def test_an_unchanged_fsdp2_script_survives_a_kill(tmp_path: Path) -> None:
    done = run(
        tmp_path, "--nproc-per-node", "2", "--inject", "kill:rank=1,step=10", str(SCRIPTS / "train_fsdp2.py"), "20"
    )
    assert done.code == ExitCode.DONE, done.err
    assert done.verdict().verdict.ranks == (1,)
    assert "fsdp2 finished" in done.out


def test_the_script_gets_torchruns_environment(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc_per_node=2", "--rdzv-id", "job7", "--max-restarts=3", str(SCRIPTS / "environment.py"))
    assert done.code == ExitCode.DONE, done.err
    seen = json.loads(done.out)
    assert seen["TORCHELASTIC_RUN_ID"] == "job7"
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["GROUP_WORLD_SIZE"]) == (
        "0",
        "2",
        "2",
        "1",
    )
    assert (seen["TORCHELASTIC_RESTART_COUNT"], seen["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "3")
    assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert int(seen["MASTER_PORT"]) > 0
    assert all(value is not None for value in seen.values()), seen


def test_a_module_runs_with_m(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "1", "-m", "platform")
    assert done.code == ExitCode.DONE, done.err
    assert "Linux" in done.out


def test_any_command_runs_with_no_python(tmp_path: Path) -> None:
    done = run(tmp_path, "--no-python", "--nproc-per-node", "2", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"')
    assert done.code == ExitCode.DONE, done.err
    assert sorted(done.out.split("\n"))[1:] == ["rank 0 of 2", "rank 1 of 2"]


def test_a_cold_start_works_without_a_standby(tmp_path: Path) -> None:
    done = run(tmp_path, "--no-standby", "--nproc-per-node", "2", DDP, "5", "0.01")
    assert done.code == ExitCode.DONE, done.err
    assert not done.bodies(WorkersStarted)[0].warm


def test_a_preload_that_makes_forks_unsafe_leads_to_a_cold_start(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    done = run(
        tmp_path / "run", "--preload", "starts_a_thread", "--nproc-per-node", "2", DDP, "5", PYTHONPATH=str(tmp_path)
    )
    assert done.code == ExitCode.DONE, done.err
    assert not done.bodies(WorkersStarted)[0].warm


def test_output_goes_where_redirects_tee_and_filter_say(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text('"""Says one line."""\nimport os\nprint("hello from", os.environ["RANK"])\n')
    teed = run(tmp_path / "a", "--nproc-per-node", "2", "--tee", "3", "--local-ranks-filter", "1", str(script))
    assert teed.out == "[default1]:hello from 1\n"
    quiet = run(tmp_path / "b", "--nproc-per-node", "2", "--redirects", "1", str(script))
    assert quiet.out == ""
    log = tmp_path / "b" / "logs" / "attempt-0001" / "rank-1.stdout.log"
    assert log.read_text() == "hello from 1\n"


def test_flags_without_a_meaning_are_accepted_and_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, "--monitor-interval", "5", "--start-method", "spawn", str(SCRIPTS / "environment.py"))
    assert done.code == ExitCode.DONE, done.err
    assert done.err.count("--monitor-interval has no meaning here") == 1
    assert done.err.count("--start-method has no meaning here") == 1


def test_a_script_that_ends_at_once_is_done(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    assert run(tmp_path / "run", "--nproc-per-node", "4", str(script)).code == ExitCode.DONE


def test_ranks_that_end_seconds_apart_are_a_clean_finish(tmp_path: Path) -> None:
    script = tmp_path / "apart.py"
    script.write_text('import os, time\ntime.sleep(2.5 * int(os.environ["RANK"]))\n')
    done = run(tmp_path / "run", "--nproc-per-node", "2", str(script))
    assert done.code == ExitCode.DONE, done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, "--nproc-per-node", "2", str(SCRIPTS / "children.py")) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        job.send_signal(number)
        assert job.wait(20) == ExitCode.PREEMPTED
    assert_no_orphans(tmp_path)


def test_no_orphan_remains_when_everstep_itself_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "--nproc-per-node", "2", str(SCRIPTS / "children.py")) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        workers = latest_workers(tmp_path)
        assert workers is not None
        os.kill(workers.pids[0], signal.SIGSTOP)  # a frozen worker must go as well
        job.send_signal(signal.SIGKILL)
        job.wait(10)
        assert_no_orphans(tmp_path)


def test_a_killed_coordinators_run_is_continued_by_saying_it_again(tmp_path: Path) -> None:
    arguments = ("--nproc-per-node", "2", DDP, "60", "0.05")
    with started(tmp_path, *arguments) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        job.send_signal(signal.SIGKILL)
        job.wait(10)
    assert_no_orphans(tmp_path)
    with (tmp_path / "ledger.jsonl").open("ab") as ledger:
        ledger.write(b'{"v":1,"n":99,"at_s":1.0,"wall":"2026')  # as a cut in the middle of a line leaves it
    done = run(tmp_path, *arguments)
    assert done.code == ExitCode.DONE, done.err
    assert [started.attempt for started in done.bodies(WorkersStarted)] == [1, 2]
    again = run(tmp_path, *arguments)
    assert again.code == ExitCode.DONE
    assert "done already" in again.err


def test_two_coordinators_cannot_share_a_run(tmp_path: Path) -> None:
    with started(tmp_path, "--nproc-per-node", "1", str(SCRIPTS / "children.py")) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        second = run_expecting_no_end(tmp_path)
        assert second[0] == ExitCode.USAGE
        assert "is using" in second[1]
        job.send_signal(signal.SIGTERM)
        job.wait(20)


def run_expecting_no_end(run_dir: Path) -> tuple[int, str]:
    done = subprocess.run(
        command("run", "--run-dir", str(run_dir), DDP, "5"),
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(),
        check=False,
    )
    return done.returncode, done.stderr


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(tmp_path, "--master-port", str(port), "--nproc-per-node", "2", DDP, "5")
    assert done.code == ExitCode.USAGE
    assert f"port {port}" in done.err
    assert "--master-port" in done.err


def test_a_free_fixed_port_is_used_again_by_the_next_attempt(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run(
        tmp_path,
        "--master-port",
        str(port),
        "--nproc-per-node",
        "2",
        "--inject",
        "kill:rank=0,step=5",
        DDP,
        "15",
        "0.02",
    )
    assert done.code == ExitCode.DONE, done.err
    assert len(done.bodies(WorkersStarted)) == 2


def test_everything_listens_on_loopback_only(tmp_path: Path) -> None:
    with started(tmp_path, "--nproc-per-node", "1", str(SCRIPTS / "children.py")) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        mine = {inode for pid in descendants(job.pid) for inode in sockets_of(pid)}
        listening = [line.split() for line in lines if line.split()[3] == "0A" and line.split()[9] in mine]
        assert listening, "the store listens somewhere"
        assert all(fields[1].startswith("0100007F:") for fields in listening), listening
        job.send_signal(signal.SIGTERM)
        job.wait(20)


def descendants(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        found.append(parent)
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            queue += [int(child) for child in task.read_text().split()]
    return found


def sockets_of(pid: int) -> list[str]:
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            links.append(target[8:-1])
    return links


def test_shared_memory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("everstep-*"))
    with started(tmp_path, "--nproc-per-node", "1", str(SCRIPTS / "children.py")) as job:
        wait_for(lambda: latest_workers(tmp_path), "workers")
        new = set(Path("/dev/shm").glob("everstep-*")) - before
        assert new
        assert all(folder.stat().st_mode & 0o077 == 0 for folder in new)
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == ExitCode.PREEMPTED
    assert not any(folder.exists() for folder in new)
    end = [body for body in bodies(tmp_path) if isinstance(body, FinishJob)]
    assert end[0].exit_code is ExitCode.PREEMPTED


def test_virtual_local_rank_gives_each_worker_one_device(tmp_path: Path) -> None:
    script = tmp_path / "devices.py"
    script.write_text('import os\nprint(os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)\n')
    done = run(tmp_path / "run", "--nproc-per-node", "2", "--virtual-local-rank", str(script))
    assert sorted(done.out.splitlines()) == ["0 0", "0 1"]


def test_a_script_without_an_optimizer_counts_its_own_steps_from_where_it_resumes(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import everstep.worker\neverstep.worker.start_at(500)\nfor _ in range(5):\n    everstep.worker.step()\n"
    )
    done = run(tmp_path / "run", "--nproc-per-node", "2", str(script))
    assert done.code == ExitCode.DONE, done.err
    steps = done.bodies(StepsFinished)
    assert (steps[0].first_step, steps[-1].last_step) == (501, 505)


IMPORTS = """
import sys
{first}
import torch.distributed.checkpoint
import wave
before = {{"wave", "torch.distributed.checkpoint"}} <= set(WARM)
print("foreseen" if before else "imported here")
"""


def script_with_imports(folder: Path, first: str) -> Path:
    (folder / "warm.py").write_text("import sys\nWARM = set(sys.modules)\n")
    (folder / "train.py").write_text(IMPORTS.format(first=first + "\nfrom warm import WARM"))
    return folder / "train.py"


def test_the_standby_has_the_scripts_imports_and_not_its_modules(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--nproc-per-node", "2", str(script_with_imports(tmp_path, "")))
    assert done.code == ExitCode.DONE, done.err
    assert done.out.count("foreseen") == 2
    assert done.bodies(WorkersStarted)[0].warm


def test_a_script_whose_imports_make_forks_unsafe_still_starts_warm(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    script = script_with_imports(tmp_path, "import starts_a_thread")
    done = run(tmp_path / "run", "--nproc-per-node", "2", str(script), PYTHONPATH=str(tmp_path / "site-packages"))
    assert done.code == ExitCode.DONE, done.err
    assert done.out.count("imported here") == 2
    assert done.bodies(WorkersStarted)[0].warm
    assert "after importing starts_a_thread it has 2 threads" in done.err
