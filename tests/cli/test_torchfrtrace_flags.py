"""torchfrtrace's users change one word: the real torchfrtrace and `everstep diagnose` on one folder, with one line."""

import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.policy.dumping import collective, dump, one_missing

from everstep.cli.main import main

ALL = {"0": (0, 1, 2, 3)}
EVERSTEP = (sys.executable, "-m", "everstep", "diagnose")
TORCHFRTRACE = (str(Path(sys.executable).parent / "torchfrtrace"),)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Rank 2 never enters number 3. NCCL's names, and a file of another group that -p keeps out."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    for rank, entries in enumerate(one_missing(ranks=4, missing=2)):
        raw = dump(entries, ALL)
        (folder / f"comm_lib_trace_rank_{rank}").write_bytes(pickle.dumps(raw, protocol=2))
    (folder / "older_1").write_bytes(pickle.dumps(dump([collective(7)], ALL), protocol=2))
    return folder


def said(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags", [(), ("--allow-incomplete-ranks", "--mismatch_cap", "3", "-v")], ids=["usual", "with-its-flags"]
)
def test_the_same_line_names_the_same_rank(dumps: Path, flags: tuple[str, ...]) -> None:
    line = (str(dumps), "-p", "comm_lib_trace_rank_", *flags)
    code, theirs = said(*TORCHFRTRACE, *line)
    assert code == 0, theirs
    assert "missing ranks: {2}" in theirs
    code, ours = said(*EVERSTEP, *line)
    assert code == 0, ours
    assert "NEVER_ENTERED: Rank 2 never entered" in ours
    assert ours.count("without meaning here") == bool(flags)


def test_entries_of_chosen_ranks_are_printed_as_there(dumps: Path) -> None:
    line = (str(dumps), "-p", "comm_lib_trace_rank_", "-j", "--selected-ranks", "1", "2")
    code, ours = said(*EVERSTEP, *line)
    assert code == 0, ours
    assert ours.count("nccl:all_reduce") == 5
    if find_spec("tabulate"):  # without it torchfrtrace ends in a NameError here
        code, theirs = said(*TORCHFRTRACE, *line)
        assert code == 0, theirs
        assert theirs.count("all_reduce(") == 5
    assert {row.split()[0] for row in ours.splitlines()[1:]} == {"1", "2"}


def test_entries_have_their_groups_and_stacks(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["diagnose", str(dumps), "-p", "comm_lib_trace_rank_", "-j"]
    assert main([*shared, "--selected-ranks", "0", "--print_stack_trace", "--pg-filters", "GROUP0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["0", "3", "0", "(GROUP0)", "3", "nccl:all_reduce", "[[17]]", "Float", "scheduled"]
    assert lines[-1].strip() == "/job/train.py:12 in step"
    assert main([*shared, "--pg-filters", "elsewhere"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-o", "x.pickle"], "use --json"),
        (["--transform-ft", "--group-world-size", "4"], "one torchft replica group at a time"),
        (["--selected-ranks", "1"], "choose what -j prints"),
        (["-p", "nothing_"], "with 'nothing_' in its name"),
    ],
)
def test_what_only_torchfrtrace_does_is_told_in_a_sentence(
    dumps: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(dumps), *flags]) == 64
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_damaged_file_does_not_hide_the_others_entries(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dumps / "comm_lib_trace_rank_1").write_bytes(b"\x80\x02torn")
    assert main(["diagnose", str(dumps), "-p", "comm_lib_trace_rank_", "-j"]) == 0
    told = capsys.readouterr()
    assert "comm_lib_trace_rank_1 could not be used" in told.err
    assert {row.split()[0] for row in told.out.splitlines()[1:]} == {"0", "2", "3"}
