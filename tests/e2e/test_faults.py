"""Ranks that die, freeze, spin, sleep, raise or leave: the right one is named, and the job trains on."""

from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, Finished, bodies, run

from everstep.domain.commands import RecordVerdict, StopWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import EvidenceCollected, FaultInjected, StallSuspected, WorkersStarted
from everstep.domain.verdicts import Trouble

pytestmark = pytest.mark.e2e
DDP = str(SCRIPTS / "train_ddp.py")


def injected(tmp_path: Path, kind: str, *, rank: int) -> Finished:
    done = run(tmp_path, "--nproc-per-node", "4", "--inject", f"{kind}:rank={rank},step=40", DDP, "60", "0.03")
    assert done.code == ExitCode.DONE, done.err
    assert "restart 1" in done.out
    assert len(done.bodies(WorkersStarted)) == 2
    assert [event.fault.kind for event in done.bodies(FaultInjected)] == [kind]
    return done


@pytest.mark.parametrize(
    ("kind", "rank", "trouble"),
    [
        ("kill", 0, Trouble.DEAD),
        ("kill", 3, Trouble.DEAD),
        ("segfault", 1, Trouble.DEAD),
        ("exit", 2, Trouble.DEAD),
        ("maintenance", 1, Trouble.DEAD),
        ("exception", 2, Trouble.SCRIPT_ERROR),
        ("freeze", 0, Trouble.FROZEN),
        ("freeze", 2, Trouble.FROZEN),
        ("gil", 1, Trouble.FROZEN),
        ("sleep", 3, Trouble.NEVER_ENTERED),
        ("loader", 0, Trouble.NEVER_ENTERED),
    ],
)
def test_the_right_rank_is_named_and_the_job_goes_on(tmp_path: Path, kind: str, rank: int, trouble: Trouble) -> None:
    done = injected(tmp_path, kind, rank=rank)
    found = done.verdict()
    assert found.verdict.ranks == (rank,)
    assert found.verdict.trouble is trouble
    assert found.planned == (kind == "maintenance")
    if kind in ("gil", "sleep", "loader"):
        assert "worker/faults.py" in found.verdict.where


def test_evidence_of_every_rank_is_on_disk_before_anything_is_killed(tmp_path: Path) -> None:
    done = injected(tmp_path, "sleep", rank=1)
    order = [
        type(body)
        for body in bodies(tmp_path)
        if isinstance(body, StallSuspected | EvidenceCollected | RecordVerdict | StopWorkers)
    ]
    assert order[:5] == [StallSuspected, EvidenceCollected, EvidenceCollected, RecordVerdict, StopWorkers]
    collected = done.bodies(EvidenceCollected)[1]
    assert [summary.rank for summary in collected.summaries] == [0, 1, 2, 3]
    for file in collected.files:
        assert (tmp_path / file.path).stat().st_size == file.size_bytes
    for rank in range(4):
        assert list((tmp_path / "evidence").rglob(f"rank-{rank}.2.flight_recorder.json"))
        assert list((tmp_path / "evidence").rglob(f"rank-{rank}.2.stacks.txt"))


def test_a_script_bug_stops_after_two_identical_failures_and_shows_its_own_traceback_last(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "2", str(SCRIPTS / "raises.py"))
    assert done.code == ExitCode.SCRIPT_BUG
    assert len(done.bodies(WorkersStarted)) == 2
    end = done.err.rstrip().splitlines()
    assert "ValueError: the label 17 is out of range" in end[-1]
    assert end[-2] == "ValueError: the label 17 is out of range"
    assert all(verdict.verdict.ranks == (1,) for verdict in done.bodies(RecordVerdict))
    lines = (SCRIPTS / "raises.py").read_text().splitlines()
    guilty = next(number for number, line in enumerate(lines, start=1) if "raise ValueError" in line)
    assert f"raises.py:{guilty}" in done.bodies(RecordVerdict)[0].verdict.where


def test_a_script_that_fails_at_import_is_its_own_bug(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "2", str(SCRIPTS / "broken_import.py"))
    assert done.code == ExitCode.SCRIPT_BUG
    assert "no_such_module_anywhere" in done.err.rstrip().splitlines()[-1]


def test_max_restarts_is_a_limit_over_all_causes(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("--nproc-per-node", "2", "--max-restarts", "1"),
        *("--inject", "kill:rank=0,step=5", "--inject", "segfault:rank=1,step=50"),
        *(DDP, "60", "0.02"),
    )
    assert done.code == ExitCode.BUDGET_SPENT
    assert "--max-restarts 1" in done.err
    assert len(done.bodies(WorkersStarted)) == 2


def test_a_frozen_worker_costs_no_grace(tmp_path: Path) -> None:
    done = injected(tmp_path, "freeze", rank=1)
    [stop] = [stop for stop in done.bodies(StopWorkers) if stop.attempt == 1]
    assert stop.kill_ranks == (1,)
    stopped_at_s = next(w.at_s for w in done.bodies(WorkersStarted) if w.attempt == 2)
    assert stopped_at_s - stop.at_s < stop.grace_s


def test_long_checkpoints_and_evaluations_are_no_hang(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "2", str(SCRIPTS / "long_phases.py"), "5")
    assert done.code == ExitCode.DONE, done.err
    assert done.bodies(RecordVerdict) == []
    assert done.bodies(StallSuspected), "the silences were long enough to be looked into"
    assert done.out.count("healthy") == 2
