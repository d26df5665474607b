"""A job that is killed and comes back with other numbers of ranks gets the same samples in the same order."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.jobs import SCRIPTS, assert_no_orphans, run, started, wait_for
from tests.e2e.scripts.train_ordered import Noisy
from torch.utils.data import DataLoader

from everstep.domain.errors import ExitCode
from everstep.worker import EpochSampler, SeededDataset

pytestmark = pytest.mark.e2e
SCRIPT = str(SCRIPTS / "train_ordered.py")
LEGS = (4, 2, 8)  # ranks
BATCH = 16  # of the whole job
STEPS = 42


def lines(folder: Path) -> list[dict[str, Any]]:
    """What every rank wrote for each step, in the order of the legs."""
    found = [json.loads(line) for path in folder.glob("got.*") for line in path.read_text().splitlines()]
    return sorted(found, key=lambda line: LEGS.index(line["world"]))


def kill_after(folder: Path, step: int, world: int) -> None:
    """Start a leg, and kill -9 the whole of it when a rank has come to `step`."""
    with started(folder, "--nproc-per-node", str(world), SCRIPT, "1000", str(folder)) as job:
        wait_for(lambda: any(line["step"] >= step for line in lines(folder)), f"step {step}", within_s=90)
        os.kill(job.pid, signal.SIGKILL)
    assert_no_orphans(folder, within_s=20)


def course(folder: Path) -> list[list[list[float]]]:
    """The samples of each step of the job, as the last leg that did it got them."""
    steps: dict[int, dict[int, list[list[float]]]] = {}
    by: dict[int, int] = {}
    for line in lines(folder):
        if by.setdefault(line["step"], line["world"]) != line["world"]:
            steps[line["step"]].clear()  # the leg before had gone further than it had saved
            by[line["step"]] = line["world"]
        steps.setdefault(line["step"], {})[line["rank"]] = line["got"]
    assert set(by.values()) == set(LEGS)
    ranks = [[steps[step][rank] for rank in range(by[step])] for step in range(STEPS)]
    return [[sample for turn in zip(*batches, strict=True) for sample in turn] for batches in ranks]


def test_four_then_two_then_eight_ranks_go_through_the_epochs_of_one(tmp_path: Path) -> None:
    kill_after(tmp_path, 15, LEGS[0])
    kill_after(tmp_path, 28, LEGS[1])
    done = run(tmp_path, "--nproc-per-node", str(LEGS[2]), SCRIPT, str(STEPS), str(tmp_path), timeout_s=150)
    assert done.code == ExitCode.DONE, done.err
    data = SeededDataset(Noisy())
    sampler = EpochSampler(data, num_replicas=1, rank=0)
    expected: list[list[list[float]]] = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected += [batch.tolist() for batch in DataLoader(data, BATCH, sampler=sampler, drop_last=True)]
    assert course(tmp_path) == expected[:STEPS]
