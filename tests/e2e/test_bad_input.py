"""Wrong flags, missing files, full disks, damaged ledgers: one clear sentence, the right code, and nothing lost."""

import json
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, run

from everstep.domain.errors import ExitCode
from everstep.domain.events import StepsFinished

pytestmark = pytest.mark.e2e
DDP = str(SCRIPTS / "train_ddp.py")


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag", DDP], ["--no-such-flag", "--help"]),
        (["no_such_script.py"], ["no_such_script.py"]),
        (["--nproc-per-node", "4000", DDP], ["4000", "CPUs"]),
        (["--nproc-per-node", "several", DDP], ["several", "auto"]),
        (["--nnodes", "2", DDP], ["--rdzv-endpoint", "HOST:PORT"]),
        (["--inject", "explode:rank=1,step=2", DDP], ["explode", "kill"]),
        (["--inject", "kill:rank=7,step=2", "--nproc-per-node", "2", DDP], ["no rank 7", "1"]),
        (["--log-dir", "/proc/no-such-place", DDP], ["/proc/no-such-place", "--log-dir"]),
    ],
)
def test_bad_flags_start_nothing_and_say_what_to_write(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = run(tmp_path / "run", *arguments)
    assert done.code == ExitCode.USAGE
    assert done.out == ""
    assert all(word in last_line(done.err) for word in words), done.err
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert "Traceback" not in done.err


def test_a_full_log_disk_is_found_before_anything_starts(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk)
    done = run(tmp_path / "run", "--log-dir", str(small_disk), DDP, "5")
    assert done.code == ExitCode.USAGE
    assert "--log-dir" in last_line(done.err)
    assert "No space left" in last_line(done.err)


def test_a_log_disk_that_fills_up_is_named_as_the_cause(tmp_path: Path, small_disk: Path) -> None:
    script = tmp_path / "chatty.py"
    script.write_text("for _ in range(3000):\n    print('x' * 1000, flush=True)\n")
    done = run(tmp_path / "run", "--log-dir", str(small_disk), str(script))
    assert done.code == ExitCode.RETRY_HERE
    assert "The disk is full" in last_line(done.err)


def test_a_full_ledger_disk_ends_the_job_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk, leave=4096)
    done = run(small_disk, "--log-dir", str(tmp_path), DDP, "400", "0.01")
    assert done.code == ExitCode.IO_ERROR
    assert "the disk is full" in last_line(done.err)
    assert "Traceback" not in done.err
    (small_disk / "ballast").unlink()
    again = run(small_disk, "--log-dir", str(tmp_path), DDP, "20", "0.01")
    assert again.code == ExitCode.DONE, again.err
    assert again.bodies(StepsFinished)


def test_a_ledger_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    line = json.dumps({"v": 2, "n": 1, "at_s": 0, "wall": "2027-01-01T00:00:00Z", "type": "RunStarted", "body": {}})
    (tmp_path / "ledger.jsonl").write_text(line + "\n")
    done = run_without_orphan_check(tmp_path)
    assert done[0] == ExitCode.USAGE
    assert "upgrade" in last_line(done[1])
    assert (tmp_path / "ledger.jsonl").read_text() == line + "\n"


def test_a_ledger_damaged_in_the_middle_is_refused_by_line(tmp_path: Path) -> None:
    assert run(tmp_path, DDP, "3", "0.01").code == ExitCode.DONE
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b'{"v":1,"n":3,garbage}\n'
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines))
    code, said = run_without_orphan_check(tmp_path)
    assert code == ExitCode.USAGE
    assert "3" in last_line(said)
    assert "ledger.jsonl" in last_line(said)


def run_without_orphan_check(run_dir: Path) -> tuple[int, str]:
    import subprocess

    from tests.e2e.jobs import command, environment

    arguments = command("run", "--run-dir", str(run_dir), DDP, "5")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    return done.returncode, done.stderr


def fill(disk: Path, *, leave: int = 0) -> None:
    """Fill a small disk up to the last `leave` bytes."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            size = file.tell()
    if leave:
        with ballast.open("r+b") as file:
            file.truncate(size - leave)
