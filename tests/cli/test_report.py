"""`everstep report` as people call it: forms, mistakes, pipes, terminals, and runs that are still going."""

import argparse
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report_ledger import write_ledger
from everstep.adapters.ledger_file import LEDGER_NAME
from everstep.cli.report import add_parser, run
from everstep.domain.errors import ConfigError, EvidenceError

SCRIPT = "import sys; from tests.cli.test_report import report; sys.exit(report(*sys.argv[1:]))"
ROOT = Path(__file__).resolve().parents[2]


def report(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="everstep")
    add_parser(parser.add_subparsers(dest="command"))
    return run(parser.parse_args(["report", *arguments]))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve thousand entries, with incidents."""
    folder = tmp_path_factory.mktemp("run")
    write_ledger(folder, 12_000)
    return folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert report(*arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_run_directory_and_its_ledger_file_give_the_same_report(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, str(run_dir))
    assert text == shown(capsys, str(run_dir / LEDGER_NAME))
    assert "EFFECTIVE TRAINING TIME" in text
    assert "Llama 3" in text
    assert "a0001-1" in text
    assert "\x1b" not in text


def test_json_and_csv_are_what_they_say(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, str(run_dir), "--json"))
    assert document["runs"][0]["entry_count"] == 12_000
    head, row = shown(capsys, str(run_dir), "--csv").splitlines()
    assert head.startswith("name,run,")
    assert row.startswith(str(run_dir))
    assert len(shown(capsys, str(run_dir), "--csv", "--table", "incidents").splitlines()) == 1 + len(
        document["runs"][0]["incidents"]
    )


def test_one_incident_can_be_told_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(run_dir), "--incident", "a0001-1")
    assert text.startswith("a0001-1  ")
    assert "the job has recovered" in text
    assert json.loads(shown(capsys, str(run_dir), "--incident", "a0001-1", "--json"))["id"] == "a0001-1"


def test_an_unknown_incident_lists_the_known_ones(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--incident x: there is no such incident; known: a0001-1"):
        report(str(run_dir), "--incident", "x")
    with pytest.raises(ConfigError, match="2 of these runs have one"):
        report(str(run_dir), str(run_dir), "--incident", "a0001-1")


def test_flags_that_do_not_go_together_say_what_to_write(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="add --csv"):
        report(str(run_dir), "--table", "incidents")
    with pytest.raises(ConfigError, match="use --json"):
        report(str(run_dir), "--csv", "--incident", "a0001-1")


def test_many_runs_are_summed_up(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(run_dir), str(run_dir))
    assert "2 runs" in text
    assert "\ntotal " in text


def test_a_run_that_is_still_going_is_reported_up_to_its_last_whole_entry(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LEDGER_NAME).write_bytes((run_dir / LEDGER_NAME).read_bytes()[:500_000])
    text = shown(capsys, str(tmp_path))
    assert "still running, or cut off: no end in the ledger" in text
    assert "EFFECTIVE TRAINING TIME" in text


def test_a_missing_path_an_empty_ledger_and_a_newer_one_each_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: give a run directory"):
        report(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds no ledger\.jsonl"):
        report(str(tmp_path))
    (tmp_path / LEDGER_NAME).write_bytes(b"")
    with pytest.raises(EvidenceError, match="the ledger is empty"):
        report(str(tmp_path))
    (tmp_path / LEDGER_NAME).write_bytes(b'{"v":9,"n":1,"at_s":0.0,"wall":"","type":"RunStarted","body":{}}\n')
    with pytest.raises(EvidenceError, match="upgrade everstep"):
        report(str(tmp_path))


def test_colour_can_be_forced_into_a_pipe(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(run_dir), "--color", "always")
    assert "\x1b[" in text
    assert "EFFECTIVE TRAINING TIME" in text
    assert "\x1b[" in shown(capsys, str(run_dir), "--color", "always", "--incident", "a0001-1")
    assert "\x1b[" in shown(capsys, str(run_dir), str(run_dir), "--color", "always")


@pytest.mark.parametrize(("colour", "is_coloured"), [("auto", True), ("never", False)])
def test_a_terminal_gets_colours_unless_they_are_refused(run_dir: Path, colour: str, is_coloured: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-c", SCRIPT, str(run_dir), "--color", colour]
    with subprocess.Popen(command, stdout=theirs, cwd=ROOT, env=environment) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # the other end was closed
            os.close(ours)
    assert process.returncode == 0
    assert b"EFFECTIVE TRAINING TIME" in seen
    assert (b"\x1b[" in seen) == is_coloured


def test_a_reader_that_has_seen_enough_is_no_error(run_dir: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(run_dir), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_the_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report("--help")
    assert "everstep report everstep-runs/*" in capsys.readouterr().out
