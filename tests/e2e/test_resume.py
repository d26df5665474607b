"""A job that was broken resumes where it was, and ends with the same weights, bit for bit."""

from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, Finished, run

from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointFailed, CheckpointRefused, CheckpointRestored, CheckpointSaved

pytestmark = pytest.mark.e2e
SCRIPT = str(SCRIPTS / "train_attached.py")
STEPS = "60"


def train(folder: Path, *flags: str, steps: str = STEPS) -> Finished:
    return run(folder, "--nproc-per-node", "3", *flags, SCRIPT, steps, str(folder / "digest"))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untouched")
    done = train(folder)
    assert done.code == ExitCode.DONE, done.err
    return (folder / "digest").read_text()


def test_a_run_broken_three_times_ends_with_the_weights_of_an_untouched_one(tmp_path: Path, untouched: str) -> None:
    faults = ("kill:rank=0,step=22", "freeze:rank=2,step=35", "exception:rank=1,step=48")
    done = train(tmp_path, *(part for fault in faults for part in ("--inject", fault)))
    assert done.code == ExitCode.DONE, done.err
    assert len(done.bodies(CheckpointRestored)) == 3
    assert (tmp_path / "digest").read_text() == untouched


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path: Path, untouched: str) -> None:
    assert train(tmp_path, steps="20").code == ExitCode.DONE
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (tmp_path / "ledger.jsonl").unlink()  # else the run is done already
    done = train(tmp_path)
    assert done.code == ExitCode.DONE, done.err
    [refused] = done.bodies(CheckpointRefused)
    assert newest.name in refused.path
    assert "__0_0.distcp" in refused.reason
    assert refused.reason in done.err
    assert done.bodies(CheckpointRestored)[0].step < 20
    assert (tmp_path / "digest").read_text() == untouched


def test_a_full_disk_under_the_checkpoints_does_not_stop_training(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (small_disk_bytes(small_disk) - 20_000))
    done = train(tmp_path)
    assert done.code == ExitCode.DONE, done.err
    assert done.bodies(CheckpointFailed)
    assert not done.bodies(CheckpointSaved)
    assert "No space left" in done.err


def small_disk_bytes(folder: Path) -> int:
    import os

    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
