"""The ledger on a real disk: numbers, locks, torn lines, full disks and newer formats."""

import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.adapters.ledger_file import LEDGER_NAME, LedgerFile, ledger_path, read_entries
from everstep.domain.commands import FinishJob
from everstep.domain.errors import ConfigError, EvidenceError, ExitCode, WorldError
from everstep.domain.events import RunStarted, StopRequested
from everstep.domain.ids import RunId

WALL = "2026-11-30T05:44:33.123Z"
STARTED = RunStarted(at_s=0.0, run=RunId("r"), everstep="0", command=("train.py",), world_size=2, host_count=1)


def asked(number: int) -> StopRequested:
    return StopRequested(at_s=float(number), by=f"test {number} ü")


def write(run_dir: Path, count: int) -> Path:
    with LedgerFile(run_dir) as ledger:
        ledger.append([STARTED, *map(asked, range(1, count))], wall=WALL, durable=True)
    return run_dir / LEDGER_NAME


def test_what_was_appended_is_read_back_in_order_with_numbers_without_a_gap(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with LedgerFile(tmp_path) as ledger:
        ledger.append([asked(3)], wall=WALL, durable=False)
        ledger.append([], wall=WALL, durable=True)
        assert [entry.number for entry in ledger.read()] == [1, 2, 3]  # those from before it was opened
    entries = list(read_entries(tmp_path / LEDGER_NAME))
    assert [(entry.number, entry.body) for entry in entries] == list(enumerate([STARTED, *map(asked, (1, 2, 3))], 1))
    assert {entry.wall for entry in entries} == {WALL}


def test_the_file_is_for_its_owner_only_and_the_folder_is_made(tmp_path: Path) -> None:
    path = write(tmp_path / "runs" / "one", 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_last_line_is_cut_at_every_byte_and_appending_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    whole = path.read_bytes()
    last_line_at = whole[:-1].rindex(b"\n") + 1
    for length in range(last_line_at, len(whole)):
        path.write_bytes(whole[:length])
        assert [entry.number for entry in read_entries(path)] == [1, 2], f"torn at byte {length}"
        with LedgerFile(tmp_path) as ledger:
            assert path.read_bytes() == whole[:last_line_at], f"torn at byte {length}"
            ledger.append([asked(2)], wall=WALL, durable=True)
        assert path.read_bytes() == whole, f"torn at byte {length}"


def test_zeros_that_a_power_loss_leaves_at_the_end_are_a_torn_line(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    whole = path.read_bytes()
    for tail in (b"\0" * 4096, b"\0" * 100 + b"\n"):
        path.write_bytes(whole + tail)
        with LedgerFile(tmp_path) as ledger:
            assert len(ledger.read()) == 2
        assert path.read_bytes() == whole


def test_a_bad_line_before_the_last_is_refused_with_its_file_and_number(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl, line 2: not a ledger entry"):
        LedgerFile(tmp_path)
    assert path.read_bytes().startswith(lines[0] + lines[1][:20])  # nothing was cut
    with pytest.raises(EvidenceError, match="line 2"):
        list(read_entries(path))


def test_a_missing_line_is_noticed_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2] + lines[3])
    with pytest.raises(EvidenceError, match=r"line 2: holds entry 3, so lines are missing"):
        list(read_entries(path))


def test_a_newer_format_is_refused_with_a_word_about_upgrading_and_never_cut(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    newer = path.read_bytes() + b'{"v":2,"n":3,"at_s":1.0,"wall":"","type":"Other","body":{}}\n'
    path.write_bytes(newer)
    with pytest.raises(EvidenceError, match=r"line 3: written in ledger format 2.*upgrade everstep"):
        LedgerFile(tmp_path)
    with pytest.raises(EvidenceError, match="upgrade"):
        list(read_entries(path))
    assert path.read_bytes() == newer


def test_unknown_fields_of_a_newer_minor_version_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    path.write_bytes(path.read_bytes() + b'{"v":1,"n":2,"at_s":1.0,"wall":"","type":"StopRequested","new":1,'
                     b'"body":{"at_s":1.0,"by":"x","more":[2]}}\n')  # fmt: skip
    assert [type(entry.body) for entry in read_entries(path)] == [RunStarted, StopRequested]


def test_two_coordinators_cannot_share_a_run_and_the_second_is_told_who_has_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from everstep.adapters.ledger_file import LedgerFile\n"
        "with LedgerFile(Path(sys.argv[1])): print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"another `everstep run` \(pid ({other.pid}|unknown)\) is using"):
            LedgerFile(tmp_path)
        assert list(read_entries(tmp_path / LEDGER_NAME)) == []  # a view needs no lock
        other.communicate(timeout=30)
    with LedgerFile(tmp_path) as ledger:
        assert ledger.read() == ()


def test_a_file_that_may_not_grow_gives_a_sentence_and_leaves_whole_entries_only(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from everstep.adapters.ledger_file import LedgerFile\n"
        "from everstep.domain.errors import WorldError; from everstep.domain.events import StopRequested\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with LedgerFile(Path(sys.argv[1])) as ledger:\n"
        "    for number in range(50):\n"
        "        try: ledger.append([StopRequested(at_s=float(number), by='x')] * 3, wall='w', durable=True)\n"
        "        except WorldError as error: print(number, error, error.retryable); break\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    appended, sentence = result.stdout.split(maxsplit=1)
    assert "cannot write" in sentence
    assert "ulimit -f" in sentence
    path = tmp_path / LEDGER_NAME
    assert path.read_bytes().endswith(b"\n")  # the partial line was truncated away
    assert len(list(read_entries(path))) == 3 * int(appended) > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_world_error_that_may_pass(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path)
    end = FinishJob(at_s=1.0, exit_code=ExitCode.DONE, rung=None, summary="")
    real = ledger._fd
    with ledger, Path("/dev/full").open("wb", buffering=0) as full:
        ledger._fd = full.fileno()
        with pytest.raises(WorldError, match=r"the disk is full: free some space") as caught:
            ledger.append([end], wall=WALL, durable=True)
        ledger._fd = real
        ledger.append([end], wall=WALL, durable=True)  # after there is room again
    assert caught.value.retryable
    assert [entry.number for entry in read_entries(ledger.path)] == [1]


def test_a_place_that_cannot_be_written_gives_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorldError, match="cannot open"):
        LedgerFile(tmp_path / "file")


def test_a_missing_ledger_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: give a run directory"):
        ledger_path(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"holds no ledger\.jsonl"):
        ledger_path(tmp_path)
    path = write(tmp_path, 1)
    assert ledger_path(tmp_path) == ledger_path(path) == path


def test_opening_leaves_no_descriptor_behind_when_it_fails(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    path.write_bytes(b"x\n" + path.read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        for _ in range(300):
            with pytest.raises(EvidenceError):
                LedgerFile(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
