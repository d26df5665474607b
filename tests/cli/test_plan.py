"""`everstep plan` as people call it: presets, files, flags, fits, forms, and every kind of mistake."""

import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.report_ledger import write_ledger
from everstep.adapters.ledger_file import LEDGER_NAME, LedgerFile
from everstep.cli.main import main
from everstep.domain.commands import FinishJob, Rung
from everstep.domain.errors import ExitCode
from everstep.domain.events import RunStarted
from everstep.domain.ids import RunId

ROOT = Path(__file__).resolve().parents[2]
SHARED = (ROOT / "../shared/data").resolve()
TRACE = SHARED / "node_faults_stepfun" / "fault_trace.json"
WALL = "2026-11-30T05:44:33.123Z"
SACCT = """\
JobID|State|NNodes|ElapsedRaw|AllocTRES
1|COMPLETED|100|864000|cpu=800,gres/gpu=800,node=100
2|NODE_FAIL|100|86400|cpu=800,gres/gpu=800,node=100
2.batch|NODE_FAIL|1|86400|cpu=8,node=1
3|FAILED|10|86400|cpu=80,gres/gpu=80,node=10
4|NODE_FAIL|100|864000|cpu=800,gres/gpu=800,node=100
5|PENDING|0|0|
"""


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, dict[str, dict[str, object]]] = json.loads(plan(capsys, *arguments, "--json"))
    return found


def value(found: dict[str, dict[str, dict[str, object]]], key: str) -> float:
    figure = found["figures"][key]["value"]
    assert isinstance(figure, int | float)
    return figure


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert out == ""
    assert err.startswith("everstep: ")
    assert err.count("\n") == 1, err
    return err


def test_llama3s_preset_tells_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "llama3-405b")
    assert "16,384 GPUs on 2,048 hosts, 54 days" in text
    for told in ("3.09 h (2.81 to 3.41 h)", "16.7 min", "3.79 per 1000 host-days", "419 failures", "+3.6 points"):
        assert told in text
    assert "Where published figures disagree" in text
    assert "148 of 419 is 35.3 %" in text
    assert "\x1b" not in text


def test_json_has_every_figure_with_its_formula_source_range_and_assumed_inputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "llama3-405b")
    figure = found["figures"]["mtbf_s"]
    assert figure["value"] == pytest.approx(11_135, abs=1)
    assert figure["unit"] == "s"
    assert figure["source"] == "arXiv 2410.21680"
    assert figure["assumed"] == ["count_variance_ratio"]
    assert "checkpoint_pause_s" in str(found["figures"]["effective_share"]["assumed"])
    assert found["inputs"]["detection_s"]["assumed"] is True
    assert found["inputs"]["gpu_count"] == {
        "value": 16_384,
        "source": "arXiv 2407.21783, section 3.3.1",
        "assumed": False,
    }
    assert len(found["contradictions"]) > 5


def test_a_flag_beats_the_file_and_the_file_beats_its_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "llama3-405b"\ngpu_count = "8k"\nrestart_s = "2 min"\nmtbf_s = "6 h"\n')
    found = document(capsys, str(path), "--restart-s", "1min", "--confidence", "90 %")
    assert found["name"] == "mine"
    assert found["inputs"]["gpu_count"]["value"] == 8_000
    assert found["inputs"]["gpu_count"]["source"] == str(path)
    assert found["inputs"]["restart_s"] == {"value": 60.0, "source": "--restart-s 1min", "assumed": False}
    assert found["inputs"]["token_count"]["value"] == 15.6e12
    assert value(found, "mtbf_s") == pytest.approx(6 * 3_600)
    assert found["figures"]["mtbf_s"]["low"] is None


def test_without_a_rate_the_published_range_is_taken_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--gpus", "1024")
    assert "ranges: those of published failure rates" in text
    assert re.search(r"failure rate +3\.79 per 1000 host-days +\(2\.13 to 6\.5\) +\w", text)


def test_sacct_gives_the_rate_with_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(SACCT)
    found = document(capsys, "--gpus", "800", "--fit-sacct", str(path))
    rate = found["figures"]["failures_per_1000_host_days"]
    assert rate["value"] == pytest.approx(2 * 1000 / 2_110)
    assert rate["low"] == pytest.approx(0.2422 * 1000 / 2_110, rel=1e-3)
    assert rate["high"] == pytest.approx(7.2247 * 1000 / 2_110, rel=1e-3)
    assert "2 of 4 jobs" in str(found["inputs"]["failures_per_1000_host_days"]["source"])
    assert "FAILED is not counted (1 of 4 jobs)" in str(found["notes"])


def test_too_little_seen_keeps_the_published_range_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(SACCT.replace("NODE_FAIL", "COMPLETED").replace("|864000|", "|60|") + "broken|line\n6|X\n")
    text = plan(capsys, "--gpus", "800", "--fit-sacct", str(path))
    assert "too little to say more than the published range" in text
    assert "1 broken lines were left out" in text
    assert "ranges: those of published failure rates" in text


def test_a_ledger_gives_the_rate_and_the_measured_delays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tmp_path, 30_000)
    found = document(capsys, "--gpus", "1024", "--fit-ledger", str(tmp_path))
    for key in ("detection_s", "restart_s", "restore_s", "checkpoint_pause_s"):
        assert found["inputs"][key]["assumed"] is False
        assert re.match(r"mean of \d+ (recoveries|checkpoints) in 1 ledger", str(found["inputs"][key]["source"]))
    assert "unexpected interruptions" in str(found["inputs"]["failures_per_1000_host_days"]["source"])
    low, high = (found["figures"]["mtbf_s"][end] for end in ("low", "high"))
    assert isinstance(low, float)
    assert isinstance(high, float)
    assert low < value(found, "mtbf_s") < high


def test_a_ledger_without_a_failure_says_so_and_an_empty_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = RunStarted(at_s=0.0, run=RunId("r"), everstep="0", command=("x",), world_size=2, host_count=1)
    ended = FinishJob(at_s=60.0, exit_code=ExitCode.DONE, rung=Rung.ASK_A_PERSON, summary="well", detail="")
    with LedgerFile(tmp_path / "calm") as ledger:
        ledger.append([started, ended], wall=WALL, durable=True)
    text = plan(capsys, "--gpus", "8", "--fit-ledger", str(tmp_path / "calm"))
    assert "no recovery in these ledgers" in text
    assert "the failure rate is not taken from it" in text
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / LEDGER_NAME).touch()
    assert "the ledger is empty" in refused(capsys, "--gpus", "8", "--fit-ledger", str(tmp_path / "empty"))
    with LedgerFile(tmp_path / "instant") as ledger:
        ledger.append([started], wall=WALL, durable=True)
    assert "spans no time" in refused(capsys, "--gpus", "8", "--fit-ledger", str(tmp_path / "instant"))


@pytest.mark.skipif(not TRACE.exists(), reason="StepFun's fault trace is not beside this checkout")
def test_stepfuns_trace_gives_its_published_rate_repair_and_spread(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--gpus", "368", "--gpus-per-host", "1", "--fit-trace", str(TRACE), "--trace-host-count", "400")
    found = document(capsys, *arguments, "--trace-days", "348")
    assert value(found, "failures_per_1000_host_days") == pytest.approx(4.195, abs=0.0005)
    assert found["inputs"]["replacement_s"]["value"] == pytest.approx(132.8 * 3_600, rel=0.001)
    assert found["inputs"]["down_variance_ratio"]["value"] == pytest.approx(5.79, abs=0.01)
    assert found["inputs"]["lemon_failure_share"]["value"] == pytest.approx(0.245, abs=0.0005)
    assert "31 or fewer in 99 % of the time" in str(found["notes"])
    assert value(found, "spare_count") > value(found, "poisson_spare_count") + 10


def test_a_small_trace_is_read_and_a_broken_one_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "lost"}
    events = [
        {"node_id": "a", "event_time": 1.0, "event_type": "fault_start", "fault_type": kind},
        {"node_id": "a", "event_time": 3.0, "event_type": "fault_end", "fault_type": kind},
        {"node_id": "b", "event_time": 9.0, "event_type": "fault_start", "fault_type": kind},
        {"node_id": "c", "event_time": 10.0, "event_type": "fault_start", "fault_type": kind},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    found = document(capsys, "--gpus", "80", "--fit-trace", str(path), "--trace-host-count", "10")
    assert value(found, "failures_per_1000_host_days") == pytest.approx(30.0)
    assert found["inputs"]["replacement_s"]["value"] == pytest.approx(86_400)
    base = ("--gpus", "80", "--fit-trace", str(path))
    assert "--trace-host-count is missing" in refused(capsys, *base)
    assert "3 hosts had faults, and 2 were watched" in refused(capsys, *base, "--trace-host-count", "2")
    assert "whole number" in refused(capsys, *base, "--trace-host-count", "2.5")
    assert "above 0" in refused(capsys, *base, "--trace-host-count", "9", "--trace-days", "0")
    for text, word in (
        ("[]", "holds no fault"),
        ("{", "is not JSON"),
        ('[{"node_id": 1}]', "entry 1"),
        ("[3]", "entry 1"),
    ):
        path.write_text(text)
        assert word in refused(capsys, *base, "--trace-host-count", "9")


def test_the_page_is_one_file_with_three_plots_and_nothing_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    text = plan(
        capsys, "llama3-405b", "--html", str(page), "--spare-host-count", "20", "--checkpoint-interval-s", "20min"
    )
    assert f"the plots are in {page}" in text
    html = page.read_text()
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script", html)
    plots = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(plots) == 3
    for plot in plots:
        tree = ET.fromstring(plot)
        lines = [node for node in tree.iter() if node.tag.endswith("polyline")]
        assert len(lines) >= 2
        for line in lines:
            points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
            assert len(points) > 10
            assert all(0 <= x <= 720 and 0 <= y <= 360 for x, y in points)
    assert "this plan" in html
    assert "an estimate, not a measurement" in html
    assert "everstep: --html" in refused_io(capsys, "llama3-405b", "--html", str(tmp_path / "no" / "x.html"))


def refused_io(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == ExitCode.IO_ERROR
    return capsys.readouterr().err


def test_two_plans_are_told_side_by_side_with_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "today.toml", tmp_path / "soon.toml"
    first.write_text('preset = "llama3-405b"\n')
    second.write_text('preset = "llama3-405b"\nrestart_s = 30\ncheckpoint_pause_s = 1\n')
    text = plan(capsys, "--compare", str(first), str(second))
    assert re.search(r"Inputs +today +soon +change", text)
    assert re.search(r"effective training time +90\.3 % +96\.7 % +\+6\.4 points", text)
    assert "failure rate" not in text
    found = json.loads(plan(capsys, "--compare", str(first), str(second), "--json", "--gpus", "8k"))
    assert [one["inputs"]["gpu_count"]["value"] for one in found["plans"]] == [8_000, 8_000]
    assert re.search(r"hosts +12,500 hosts +2,048 hosts +-83.6 %", plan(capsys, "--compare", "xai-100k", str(first)))
    assert "leave out the rest" in refused(capsys, "xai-100k", "--compare", str(first), str(second))
    coloured = plan(capsys, "--compare", str(first), str(second), "--color", "always")
    assert "\x1b" in coloured
    assert "+6.4 points" in coloured


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("gpu_count is missing", "--gpu-count", "llama3-405b")),
        (("--gpus", "0"), ("gpu_count is 0", "1 or more")),
        (("--gpus", "many"), ("gpu_count is 'many'", "a number")),
        (("--gpus", "16", "--failures-per-1000-host-days", "-3"), ("failures_per_1000_host_days is -3", "above 0")),
        (("llama3-405b", "--checkpoint-interval-s", "60 d"), ("checkpoint_interval_s", "longer than the run", "54")),
        (("llama3-405b", "--spare-host-count", "3000"), ("spare_host_count is 3,000", "2,048")),
        (("llama3-406b",), ("llama3-406b is no preset and no file", "did you mean llama3-405b?")),
        (("--gpus", "8", "--restart", "5"), ("unknown flag --restart", "did you mean --restart-s?")),
        (("--gpus", "8", "--gpu-per-host", "4"), ("unknown flag --gpu-per-host", "--gpus-per-host")),
        (("--gpus", "8", "--restart-s", "5 GB"), ("restart_s is '5 GB'", "'5 min'")),
        (("--gpus", "8", "--mtbf-s", "5h", "--gpu-days-per-failure", "3"), ("all say the failure rate",)),
        (("--gpus", "8", "--mtbf-s", "5h", "--fit-sacct", "x"), ("--fit-sacct and --mtbf-s", "one of them")),
        (("--gpus", "8", "--fit-trace", "y", "--fit-sacct", "x"), ("--fit-sacct and --fit-trace", "one of them")),
        (("--gpus", "8", "--fit-sacct", "nowhere.txt"), ("nowhere.txt: No such file", "sacct -P")),
        (("--gpus", "8", "--fit-trace", "no.json", "--trace-host-count", "9"), ("no.json: No such file",)),
        (("--gpus", "8", "--fit-ledger", "nowhere"), ("nowhere does not exist",)),
        (("--gpus", "8", "--confidence", "95"), ("0.5 to below 1",)),
        (("nowhere.toml",), ("nowhere.toml: No such file", "gpu_count = 16384")),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key_and_what_is_allowed(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, *arguments)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu_count = ", ("is no TOML", "gpu_count = 16384")),
        ("gpu_cont = 3", ("unknown key gpu_cont", "did you mean gpu_count?")),
        ("gpu_count = 8\nrestart = 300", ("unknown key restart", "did you mean restart_s?")),
        ("gpu_count = 8\nzzz = 300", ("unknown key zzz", "--help")),
        ("gpu_count = 8\n[restart_s]\nx = 1", ("restart_s is a table",)),
        ("gpu_count = 8\nrestart_s = true", ("restart_s is True", "'5 min'")),
        ("gpu_count = 8\nrestart_s = '5'\nname = 3", ("name is 3", "text")),
        ("gpu_count = 8\nrestart_s = 2024-01-01", ("restart_s is",)),
        ("preset = 'llama4'", ("preset is 'llama4'", "llama3-405b")),
        ("gpu_count = 8\nconfidence = 2", ("confidence is 2",)),
        ("gpu_count = 8\nmtbf_s = '5 h'\ngpu_days_per_failure = 5", ("gpu_days_per_failure and mtbf_s",)),
        ("gpu_count = 8\nobserved_host_days = 5", ("failure_count is missing",)),
    ],
)
def test_a_mistake_in_a_file_names_the_file_or_the_key(
    text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    sentence = refused(capsys, str(path))
    for word in words:
        assert word in sentence
    path.write_bytes(b"gpu_count = \xff")
    assert "is no TOML" in refused(capsys, str(path))


def test_colours_are_for_a_terminal_alone_and_formulas_for_a_wide_one(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "everstep", "plan", "xai-100k"]
    parent, child = pty.openpty()
    shown = b""
    with subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, env=environment, cwd=ROOT) as process:
        os.close(child)
        while chunk := read(parent):
            shown += chunk
        assert process.wait() == 0
    os.close(parent)
    assert b"\x1b[" in shown
    assert b"Formulas and sources: on 130 columns" in shown
    piped = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert "\x1b" not in piped.stdout
    assert "M = 1 ÷ (hosts × r)" in piped.stdout
    coloured = plan(capsys, "xai-100k", "--color", "always", "--ramp-limit-w-per-s", "1 MW/s")
    assert "\x1b" in coloured


def read(parent: int) -> bytes:
    try:
        return os.read(parent, 65_536)
    except OSError:
        return b""


def test_a_closed_pipe_is_no_error() -> None:
    shell = f"{sys.executable} -m everstep plan llama3-405b | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_rate_that_was_never_seen_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calm.toml"
    path.write_text("gpu_count = 64\nfailure_count = 0\nobserved_host_days = 50000\n")
    found = document(capsys, str(path))
    assert found["figures"]["mtbf_s"]["high"] is None
    assert math.isfinite(value(found, "mtbf_s"))
    assert "never" in plan(capsys, str(path))


def test_the_readmes_excerpt_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```text\n(llama3-405b: .*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    told = set(plan(capsys, "llama3-405b").splitlines())
    assert [line for line in block[1].splitlines() if line not in told | {"…"}] == []


def test_the_pages_toml_and_python_run_as_they_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    toml, python = (re.search(rf"```{name}\n(.*?)```", page, flags=re.DOTALL) for name in ("toml", "python"))
    assert toml is not None
    assert python is not None
    (tmp_path / "mine.toml").write_text(toml[1])
    assert "32,768 GPUs on 4,096 hosts" in plan(capsys, str(tmp_path / "mine.toml"))
    done = subprocess.run([sys.executable, "-c", python[1]], capture_output=True, text=True, check=True, cwd=ROOT)
    assert re.match(r"0\.\d+ 0\.\d+ 0\.\d+ t ÷ ", done.stdout)
