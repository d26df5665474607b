"""The demo itself, short: real ranks, a real SIGKILL and SIGSTOP, and weights that come out the same."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
EVERSTEP = [sys.executable, "-m", "everstep.cli.main", "demo"]


def test_a_short_demo_recovers_from_a_kill_and_a_freeze_with_identical_weights(tmp_path: Path) -> None:
    flags = ["--minutes", "0.15", "--faults", "kill,freeze", "--workers", "3", "--json"]
    ran = subprocess.run(
        [*EVERSTEP, *flags, "--run-dir", str(tmp_path / "demo")], capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stderr
    end = json.loads(ran.stdout)
    assert end["identical"]
    assert end["untouched"]["weights_sha256"] == end["faulted"]["weights_sha256"]
    assert end["injected_fault_count"] == end["planned_fault_count"] == 2
    assert end["named_fault_count"] == 2
    assert sorted(recovery["trouble"] for recovery in end["recoveries"]) == ["dead", "frozen"]
    assert "fault 2 of 2: freeze" in ran.stderr


def test_ctrl_c_ends_the_demo_with_the_code_for_it(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*EVERSTEP, "--workers", "2", "--run-dir", str(tmp_path / "demo")],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    for line in demo.stderr:
        if "2 of 3" in line:
            break
    demo.send_signal(signal.SIGINT)
    demo.stderr.read()
    assert demo.wait(timeout=60) == 14
