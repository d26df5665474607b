"""`everstep simulate`: what it prints, what it writes, and what it says to a wrong flag, key or file."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.cli.main import main
from everstep.domain.errors import ExitCode

SMALL = ["--set", "gpus=512", "--set", "agents=2", "--set", "days=2", "--set", "per_1000_host_days=100"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_one_table_one_plot_and_the_origin_of_every_delay(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "llama3", *SMALL, "--compare", "everstep", "--compare", "torchrun")
    assert out.startswith("Simulated: 512 GPUs on 64 hosts and 16 spares for 2 days (1 seed)")
    for label in ("with everstep", "torchrun, 600 s", "torchrun, 1800 s"):
        assert out.count(label) >= 2  # in the table and in the plot
    assert "make bench, 4 ranks on 2 cores" in out
    assert "Everything here is simulated" in out


def test_the_same_command_prints_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "llama3", *SMALL) == shown(capsys, "llama3", *SMALL)


def test_a_sweep_has_a_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = ["--sweep", "checkpoint_interval_s=120,600", "--sweep", "spares=0,4"]
    document = json.loads(shown(capsys, "llama3", *SMALL, *sweeps, "--jobs", "1", "--json"))
    assert document["simulated"] is True
    assert [row["label"] for row in document["rows"]] == [
        "checkpoint_interval_s=120, spares=0",
        "checkpoint_interval_s=120, spares=4",
        "checkpoint_interval_s=600, spares=0",
        "checkpoint_interval_s=600, spares=4",
    ]
    for row in document["rows"]:
        assert sum(row["parts_share"].values()) == pytest.approx(1.0)
        assert row["runs"][0]["unexpected_count"] == sum(row["runs"][0]["causes"].values())


def test_seeds_on_several_processes_give_what_one_process_gives(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["llama3", *SMALL, "--seeds", "4", "--json"]
    alone, together = (json.loads(shown(capsys, *flags, "--jobs", jobs)) for jobs in ("1", "2"))
    assert alone == together
    assert alone["rows"][0]["effective_share"]["half_width"] > 0
    assert [run["seed"] for run in alone["rows"][0]["runs"]] == [0, 1, 2, 3]


def test_the_ledger_is_one_that_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(shown(capsys, "llama3", *SMALL, "--ledger", str(tmp_path / "run"), "--json"))
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["effective_training_share"] == pytest.approx(out["rows"][0]["effective_share"]["mean"], abs=1e-9)
    assert main(["simulate", "llama3", *SMALL, "--ledger", str(tmp_path / "run")]) == ExitCode.USAGE
    assert "there is a ledger already" in capsys.readouterr().err


def test_a_file_starts_from_a_preset_and_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "mine.toml"
    scenario.write_text('preset = "100k"\ngpus = 800\ndays = 1\nspares = 2\nlemon_share = 0.1\nlemon_factor = 9\n')
    page = tmp_path / "page.html"
    assert "mine " in shown(capsys, str(scenario), "--html", str(page))
    written = page.read_text()
    assert "<svg" in written
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")  # needs nothing from outside
    assert "Where the delays come from" in written


def test_a_short_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    kind = {"Level": "Hardware Failure", "Class": "GPU", "Desc": ""}
    events = [
        {"node_id": node, "event_time": days, "event_type": f"fault_{end}", "fault_type": kind}
        for node, days, end in (("a", 0.2, "start"), ("b", 0.3, "start"), ("b", 0.4, "end"), ("a", 0.5, "end"))
    ]
    trace.write_text(json.dumps([*events, {**events[0], "event_time": 1.0}]))
    document = json.loads(shown(capsys, "stepfun", "--trace", str(trace), "--set", "spares=32", "--json"))
    (run,) = document["rows"][0]["runs"]
    assert 0 < run["unexpected_count"] <= 3
    assert run["available_share"] > 0.99


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "no such scenario; give llama3, 100k, stepfun, or a file ending with .toml"),
        (["llama3", "--seeds", "0"], "--seeds takes a number of at least 1"),
        (["llama3", "--set", "gpus=0"], "gpus = 0: it must be more than 0"),
        (["llama3", "--set", "gpus=100"], "a multiple of gpus_per_host = 8 is expected"),
        (["llama3", "--set", "per_1000_host_days=-1"], "per_1000_host_days = -1: it can't be negative"),
        (["llama3", "--set", "per_1000_host_days=1e6"], "is it per 1000 days of one host?"),
        (["llama3", "--set", "checkpoint_interval_s=9e6"], "longer than the run of 54 days"),
        (["llama3", "--set", "spares=5000"], "more than the 2048 hosts of the job"),
        (["llama3", "--set", "spares=inf"], "a number is expected"),
        (["llama3", "--set", "spares=2.5"], "a whole number is expected"),
        (["llama3", "--set", "days=3h"], "'3h' is no number; write it without a unit"),
        (["llama3", "--set", "interval=3"], "interval: there is no such key; known keys are agents,"),
        (["llama3", "--set", "days"], "expected KEY=VALUE"),
        (["llama3", "--set", "lemon_share=12"], "a share from 0 to 1 is expected"),
        (["llama3", "--sweep", "spares=1,,2"], "'' is no number"),
        (["llama3", "--sweep", "spares=" + ",".join(["1"] * 201)], "at most 200 are played at once"),
        (["stepfun"], "add --trace fault_trace.json"),
    ],
)
def test_a_wrong_flag_is_told_in_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    ("name", "text", "flag", "said"),
    [
        ("x.toml", "gpus = = 3", None, "no valid TOML"),
        ("x.toml", "preset = 'moon'", None, "preset = 'moon'; allowed are llama3, 100k, stepfun"),
        ("x.toml", "[delays]\nspawn = 3", None, "[delays] is a table; keys stand at the top level"),
        ("x.toml", "gpus = '16k'", None, "x.toml: gpus = '16k': a number is expected, without a unit"),
        ("x.json", "", "--trace", "no JSON"),
        ("x.json", "[]", "--trace", "the fault trace is empty"),
        ("x.json", "{}", "--delays", "has no recovery of everstep's"),
    ],
)
def test_a_malformed_file_is_told_in_one_sentence(
    name: str, text: str, flag: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    arguments = [str(path)] if flag is None else ["llama3", flag, str(path)]
    assert main(["simulate", *arguments]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_colour_changes_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["llama3", *SMALL, "--compare", "everstep"]
    plain, coloured = (shown(capsys, *flags, "--color", when) for when in ("never", "always"))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_ctrl_c_and_a_killed_process_end_it_at_once_with_a_sentence() -> None:
    command = [sys.executable, "-m", "everstep", "simulate", "llama3", "--seeds", "40", "--jobs", "2"]
    for by, code, said in (
        (signal.SIGINT, ExitCode.PREEMPTED, "Ctrl-C"),
        (signal.SIGKILL, ExitCode.IO_ERROR, "--jobs 1"),
    ):
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            children = workers_of(process.pid)
            os.kill(process.pid if by is signal.SIGINT else children[0], by)
            _, error = process.communicate(timeout=40)
        assert process.returncode == code, error
        assert said in error
        assert "Traceback" not in error


def workers_of(pid: int) -> list[int]:
    """The processes of the pool, as soon as both are there and at work."""
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        with contextlib.suppress(OSError):
            found = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            spawned = [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
            if len(spawned) == 2 and all(cpu_ticks(child) > 50 for child in spawned):
                return spawned
        time.sleep(0.05)
    pytest.fail("no two processes came to work within 30 s")


def cpu_ticks(pid: int) -> int:
    """Imports take fewer ticks than this test waits for."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
