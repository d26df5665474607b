"""A few of the hang cases, one seed each: `bench/hang_cases.py` plays all of them in three."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hang_cases.expected import BY_NAME
from tests.e2e.hang_cases.playing import JOB, play
from tests.e2e.jobs import bodies, command, started, wait_for

from everstep.cli.diagnosing import diagnose
from everstep.domain.commands import RecordVerdict, StopWorkers
from everstep.domain.events import StepsFinished

pytestmark = pytest.mark.e2e
_SEED = 1
STEPS_BEFORE = 30


@pytest.mark.parametrize(
    "name", ["dtype", "wrong_root", "cross_pg", "new_group", "p2p_order", "pipeline", "early_exit", "healthy_ring"]
)
def test_the_class_and_the_culprit_are_right(tmp_path: Path, name: str) -> None:
    case = BY_NAME[name]
    said = play(case, seed=_SEED, run_dir=tmp_path)
    assert not said.wrong(case, case.victim(_SEED)), said
    if (tmp_path / "evidence").exists():
        afterwards = diagnose([tmp_path])
        assert (afterwards.trouble, frozenset(afterwards.ranks)) == (said.trouble, said.ranks)


def test_a_live_job_can_be_asked_and_goes_on(tmp_path: Path) -> None:
    with started(tmp_path, "--nproc-per-node", "4", "--hang-floor", "inf", str(JOB), "pipeline", "2") as job:
        wait_for(lambda: finished_steps(tmp_path) >= STEPS_BEFORE, "the thirty ordinary steps", within_s=90)
        wait_for(lambda: diagnosed(tmp_path)["ranks"] == [2], "the verdict", within_s=20)
        assert job.poll() is None
        assert diagnosed(tmp_path)["trouble"] == "never_entered"
        assert not any(isinstance(body, RecordVerdict | StopWorkers) for body in bodies(tmp_path))


def finished_steps(run_dir: Path) -> int:
    if not (run_dir / "ledger.jsonl").exists():
        return 0
    return max((body.last_step for body in bodies(run_dir) if isinstance(body, StepsFinished)), default=0)


def diagnosed(run_dir: Path) -> dict[str, Any]:
    done = subprocess.run(command("diagnose", "--run", str(run_dir), "--json"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
