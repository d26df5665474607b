"""The flags of `everstep run`: torchrun's own in both spellings, and every mistake told in one sentence."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cli.main import parser
from everstep.cli.run_arguments import EXAMPLES, RunPlan, plan_run
from everstep.domain.causes import FaultKind
from everstep.domain.errors import ConfigError, ExitCode

NOBODY = 65534
TWO = ("--nnodes=2", "--rdzv-endpoint=host0:1234", "--run-dir=runs/a")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a script and a folder, on a machine without GPUs."""
    (tmp_path / "train.py").write_text("print('x')\n")
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def plan(*arguments: str) -> RunPlan:
    return plan_run(parser().parse_args(["run", *arguments]))


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments)
    assert caught.value.exit_code is ExitCode.USAGE
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("arguments", "flag", "what_to_write"),
    [
        (["--nnodes", "two"], "--nnodes 'two'", "write a number from 1, or MIN:MAX"),
        (["--nnodes", "3:2"], "--nnodes '3:2'", "write a number from 1, or MIN:MAX"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint", "write HOST:PORT"),
        (["--nnodes", "1:4"], "--nnodes 1:4 needs --rdzv-endpoint", "write HOST:PORT"),
        (["--node-rank", "1"], "--node-rank 1", "write --nnodes N"),
        ([*TWO, "--node-rank", "2"], "--node-rank 2", "write 0 to 1"),
        ([*TWO, "--standalone"], "--standalone", "leave one of them out"),
        ([*TWO, "--host-timeout", "0"], "--host-timeout 0", "seconds above 0"),
        (["--nnodes=2", "--rdzv-endpoint=a b"], "--rdzv-endpoint 'a b'", "write HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=a:99999"], "--rdzv-endpoint 'a:99999'", "write HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=0.0.0.0:1"], "--rdzv-endpoint 0.0.0.0:1", "by which all hosts reach"),
        (["--nnodes=2", "--rdzv-endpoint=node..7"], "--rdzv-endpoint 'node..7'", "write another one"),
        (["--nnodes=2", "--rdzv-endpoint=0"], "--rdzv-endpoint 0:29400", "by which all hosts reach"),
        (["--nnodes=2", "--rdzv-endpoint=[0:0:0:0:0:0:0:0]:1"], "--rdzv-endpoint", "by which all hosts reach"),
        ([*TWO, "--local-addr=0.0.0.0"], "--local-addr 0.0.0.0", "by which other hosts reach this one"),
        ([*TWO, "--local-addr=[::]"], "--local-addr ::", "by which other hosts reach this one"),
        (["--nnodes=2", "--rdzv-endpoint=a"], "--nnodes 2 needs --run-dir", "or --rdzv-id ID"),
        (["--nproc-per-node", "0"], "--nproc-per-node '0'", "write a number from 1, auto, cpu or gpu"),
        (["--nproc-per-node", "-2"], "--nproc-per-node '-2'", "write a number from 1"),
        (["--nproc-per-node", "abc"], "--nproc-per-node 'abc'", "write a number from 1, auto, cpu or gpu"),
        (["--nproc-per-node", "²"], "--nproc-per-node '²'", "write a number from 1"),
        (["--nproc-per-node", "100000"], "--nproc-per-node 100000", "or fewer"),
        (["--nproc-per-node", "gpu"], "--nproc-per-node gpu", "write a number or cpu"),
        (["--max-restarts", "-1"], "--max-restarts -1", "leave it out"),
        (["--redirects", "7"], "--redirects '7'", "write 0, 1 (stdout)"),
        (["--redirects", "0:9"], "--redirects '0:9'", "or 0:3,1:2 by rank"),
        (["--tee", "all"], "--tee 'all'", "write 0, 1 (stdout)"),
        (["--local-ranks-filter", "0;1"], "--local-ranks-filter '0;1'", "write numbers, as in 0,2"),
        (["--inject", "kill"], "--inject 'kill'", "write KIND:rank=R,step=S"),
        (["--inject", "melt:rank=0,step=1"], "--inject 'melt:rank=0,step=1'", "where KIND is one of kill, freeze"),
        (["--inject", "kill:rank=1,step=4"], "--inject 'kill:rank=1,step=4'", "the last one is 0"),
        (["--inject", "kill:rank=0"], "--inject 'kill:rank=0'", "write KIND:rank=R,step=S"),
        (["--grace", "-1"], "--grace", "seconds from 0"),
        (["--hang-floor", "0"], "--hang-floor", "above 0"),
        (["--hang-floor", "nan"], "--hang-floor", "above 0"),
    ],
)
def test_a_wrong_value_is_told_with_its_flag_and_what_to_write(
    arguments: list[str], flag: str, what_to_write: str
) -> None:
    text = refusal(*arguments, "train.py")
    assert flag in text
    assert what_to_write in text


def test_a_script_that_is_not_there_is_told_with_where_it_was_looked_for(folder: Path) -> None:
    assert f"there is no script 'gone.py' here ({folder})" in refusal("gone.py")
    assert "with -m give a module name" in refusal("package")
    assert "with -m give a module name" not in refusal("gone.py")


def refusal_to_nobody(script: str) -> str:
    """What a user without rights is told. Root may read everything, so a fork becomes somebody else first."""
    read_end, write_end = os.pipe()
    parser()  # imports all that it needs while it still may
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(PermissionError):
            os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            plan(script)
        except BaseException as error:  # outermost frame
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def test_a_script_that_cannot_be_read_is_told_with_its_permissions(folder: Path) -> None:
    folder.chmod(0o755)
    Path("train.py").chmod(0)
    assert "ConfigError: the script 'train.py' can't be read; check its permissions" in refusal_to_nobody("train.py")


def test_a_script_in_a_folder_that_may_not_be_entered_is_a_mistake_too(folder: Path) -> None:
    folder.chmod(0o755)
    Path("package").chmod(0)
    assert "ConfigError: there is no script 'package/train.py' here" in refusal_to_nobody("package/train.py")
    Path("package").chmod(0o755)


def test_a_module_is_no_command() -> None:
    assert "-m and --no-python exclude each other" in refusal("-m", "--no-python", "train")


@pytest.mark.parametrize(
    ("flag", "value", "attribute", "parsed"),
    [
        ("--nproc-per-node", "3", "worker_count", 3),
        ("--master-addr", "10.0.0.1", "address", "10.0.0.1"),
        ("--master-port", "29501", "port", 29501),
        ("--rdzv-id", "job7", "rdzv_id", "job7"),
        ("--log-dir", "logs", "log_dir", Path("logs")),
    ],
)
def test_torchruns_flags_are_understood_in_both_spellings(
    flag: str, value: str, attribute: str, parsed: object
) -> None:
    underscored = "--" + flag[2:].replace("-", "_")
    for spelling in ([flag, value], [underscored, value], [f"{flag}={value}"], [f"{underscored}={value}"]):
        assert getattr(plan(*spelling, "train.py"), attribute) == parsed


def test_a_rack_is_what_was_typed_or_else_what_slurm_says_is_around_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def rack(*arguments: str) -> str:
        hosts = plan(*TWO, *arguments, "train.py").hosts
        assert hosts is not None
        return hosts.rack

    assert rack() == ""
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "node7.cluster")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "node")
    assert rack() == ""
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.leaf3.node7.cluster")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    assert rack() == "core.leaf3"
    assert rack("--rack", "row 4") == "row 4"


def test_a_command_line_for_torchrun_is_a_command_line_for_everstep() -> None:
    found = plan(
        "--standalone",
        "--nnodes=1:1",
        "--nproc_per_node=2",
        "--max_restarts=3",
        "--rdzv_backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--rdzv-conf=timeout=900",
        "--monitor-interval=0.1",
        "--start-method=spawn",
        "--role=trainer",
        "-r=3",
        "-t",
        "0:1,1:2",
        "--local-ranks-filter=0,1",
        "train.py",
        "--lr",
        "3e-4",
        "--nproc-per-node=9",
    )
    assert found.program.arguments == ("train.py", "--lr", "3e-4", "--nproc-per-node=9")
    assert (found.worker_count, found.recovery.restarts.restart_count_max) == (2, 3)
    assert found.logs.redirects.everywhere == 3
    assert (found.logs.tee.of(0), found.logs.tee.of(1), found.logs.tee.of(2)) == (1, 2, 0)
    assert found.logs.ranks == {0, 1}
    assert any("--monitor-interval has no meaning here" in notice for notice in found.notices)


def test_without_flags_one_worker_runs_and_a_new_folder_is_named_after_the_script() -> None:
    first, second = plan("train.py"), plan("train.py")
    assert first.worker_count == 1
    assert first.run_dir.parts[0] == "everstep-runs"
    assert first.run_dir.name.startswith("train-")
    assert first.run_dir != second.run_dir
    assert first.log_dir == first.run_dir / "logs"
    assert not first.run_dir.exists()  # nothing is made before everything was checked
    assert first.recovery.restarts.restart_count_max is None


def test_modules_and_commands_are_not_looked_for_on_disk() -> None:
    module, command = plan("-m", "my.module", "--x"), plan("--no-python", "/bin/true")
    assert (module.program.module, module.program.arguments) == (True, ("my.module", "--x"))
    assert (command.program.python, command.standby) == (False, False)
    assert any("there is no observer" in notice for notice in command.notices)


def test_faults_are_numbered_in_their_order() -> None:
    faults = plan(
        "--nproc-per-node=2", "--inject=freeze:rank=1,step=9", "--inject=kill:rank=0,after=1.5s", "train.py"
    ).faults
    assert [(fault.number, fault.kind, fault.rank, fault.step, fault.after_s) for fault in faults] == [
        (1, FaultKind.FREEZE, 1, 9, None),
        (2, FaultKind.KILL, 0, None, 1.5),
    ]


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_can_be_asked_for(kind: FaultKind) -> None:
    assert plan(f"--inject={kind}:rank=0,after=3", "train.py").faults[0].kind is kind


@pytest.mark.parametrize(
    ("arguments", "endpoint", "run_dir"),
    [
        (TWO, "host0:1234", "runs/a"),
        (("--nnodes=2", "--rdzv-endpoint=host0", "--rdzv_id=job/7"), "host0:29400", "everstep-runs/job_7"),
        (("--nnodes=2", "--rdzv-endpoint=[::1]:5", "--run-dir=a"), "[::1]:5", "a"),
        (("--nnodes=2", "--node-rank=0", "--master-addr=h", "--run-dir=a"), "h:29500", "a"),
        (("--nnodes=2", "--node_rank=1", "--master_addr=h", "--master_port=7", "--run-dir=a"), "h:7", "a"),
    ],
)
def test_several_hosts_meet_where_torchruns_flags_say(arguments: list[str], endpoint: str, run_dir: str) -> None:
    found = plan(*arguments, "train.py")
    assert found.hosts is not None
    assert (str(found.hosts.endpoint), str(found.run_dir)) == (endpoint, run_dir)
    assert found.port == 0
    assert found.recovery.spares.waits_for_hosts
    assert found.recovery.spares.wait_s == 300.0


def test_more_hosts_than_train_are_spares_and_faults_reach_all_ranks() -> None:
    found = plan(*TWO[1:], "--nnodes=2:3", "--nproc-per-node=2", "--inject=kill:rank=3,step=4", "train.py")
    assert found.hosts is not None
    assert (found.hosts.need, found.hosts.host_count_max) == (2, 3)


def test_one_host_waits_for_nobody() -> None:
    found = plan("train.py")
    assert found.hosts is None
    assert not found.recovery.spares.waits_for_hosts
    assert found.address == "127.0.0.1"


def test_the_examples_are_understood() -> None:
    for line in EXAMPLES.splitlines():
        if "gpu" not in line and line.strip().startswith("everstep run"):
            words = line.split("     ")[0].split()
            assert plan(*words[2:]).worker_count >= 1


@given(text=st.text(max_size=12))
@settings(max_examples=30, deadline=None)
def test_whatever_is_written_for_a_count_or_a_stream_is_understood_or_refused_in_words(text: str) -> None:
    for flag in ("--nproc-per-node", "--tee", "--local-ranks-filter", "--inject", "--nnodes"):
        try:
            plan(f"{flag}={text}", "train.py")
        except ConfigError as error:
            told = str(error)
            assert f"{flag} " in told or flag == "--nnodes"
