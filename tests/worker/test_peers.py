"""Copies on other hosts: complete or not there, whoever is killed or lies; an empty host gets its own back."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.worker.peer_hosts import Cluster, complete, wait_for, write_shard

TWO = {"a": (0, 1), "b": (2, 3)}
MB = 1 << 20


def save(cluster: Cluster, step: int, *, slot: int, size: int = MB + 1000) -> None:
    for rank, folder in enumerate(cluster.memories()):
        write_shard(Path(folder), rank, slot, step, bytes([rank, step]) * (size // 2), of=len(cluster.memories()))


def steps(cluster: Cluster) -> list[int]:
    return [version.step for version in cluster.held_by_all()]


def test_each_host_holds_the_others_newest_step_and_a_replaced_one_gets_its_own_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, TWO) as cluster:
        cluster.tell()
        save(cluster, 7, slot=0)
        wait_for(lambda: steps(cluster) == [7], f"copies of step 7; {cluster.errors()}")
        save(cluster, 9, slot=1)
        wait_for(lambda: steps(cluster) == [7, 9], f"copies of step 9; {cluster.errors()}")
        cluster.hosts["b"].lose()
        cluster.hosts["b"].come_up()
        ready = cluster.restore()
        assert [told.step for told in ready] == [9, 9]
        for rank in (2, 3):
            assert [v.step for v in complete(cluster.hosts["b"].folder, rank)] == [9]
        for host in cluster.hosts.values():
            host.stop()
    assert "defect" not in cluster.errors()


TRAININGS = {
    "ddp, of which each rank holds a quarter": {"kind": "ddp", "world": 4},
    "fsdp2": {"kind": "fsdp", "world": 4},
}


@pytest.mark.parametrize(("training", "lost"), list(zip(TRAININGS, ["a", "b"], strict=True)))
def test_a_job_that_loses_a_host_with_all_its_memory_goes_on_from_the_copies_bit_for_bit(
    training: str, lost: str, lab: Any, tmp_path: Path
) -> None:
    spec = {**TRAININGS[training], "until": 40, "pause_s": 0.01}
    whole = lab.train("whole", **spec, directory=str(tmp_path / "other"))
    with Cluster(tmp_path, TWO) as cluster:
        assert [told.step for told in cluster.restore()] == [None, None]
        pids = lab.start("first", **spec, memories=cluster.memories())
        wait_for(lambda: (steps(cluster) or [0])[-1] >= 8, f"copies of a step; {cluster.errors()}{lab.errors('first')}")
        held = steps(cluster)[-1]
        for rank in TWO[lost]:
            os.kill(pids[rank], signal.SIGKILL)
        cluster.hosts[lost].lose()
        for pid in pids:  # as the agents of the other hosts do
            os.kill(pid, signal.SIGKILL)
        assert 0 not in lab.wait()  # some die of the broken line before they are killed
        assert not list(lab.directory.glob("step-*"))
        cluster.hosts[lost].come_up()
        step = cluster.restore()[0].step
        assert step is not None
        assert step >= held
        resumed = lab.train("second", **spec, memories=cluster.memories(), seed=99)
        assert lab.restored_step("second") == step
        assert resumed == [rank[step:] for rank in whole]
        wait_for(lambda: steps(cluster)[-1] > step, "copies after the restart")
    assert "defect" not in cluster.errors()
    assert "everstep:" not in lab.errors("first") + lab.errors("second")
