"""Hosts lose all their memory, and savers are killed during transfers: copies bring the job back, bit for bit."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.worker.conftest import lab, launcher  # noqa: F401
from tests.worker.peer_hosts import MB, TWO, Cluster, SimulatedHost, complete, save, steps, wait_for

from everstep.adapters.checkpoints.memory_slots import RankSlots, image_path
from everstep.policy.checkpoints import committed_steps

pytestmark = pytest.mark.e2e
THREE = {"a": (0, 1), "b": (2,), "c": (3,)}
CASES = {
    "ddp, of which each rank holds a quarter, without rank 0's host": ("ddp", TWO, "a"),
    "fsdp2 on three hosts, without the second": ("fsdp", THREE, "b"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_loses_a_host_with_all_its_memory_goes_on_from_the_copies_bit_for_bit(
    case: str,
    lab: Any,  # noqa: F811 - the fixture that is imported
    tmp_path: Path,
) -> None:
    kind, ranks, lost = CASES[case]
    spec = {"kind": kind, "world": 4, "until": 40, "pause_s": 0.01}
    whole = lab.train("whole", **spec, directory=str(tmp_path / "other"))
    with Cluster(tmp_path, ranks) as cluster:
        assert all(told.step is None for told in cluster.restore())
        pids = lab.start("first", **spec, memories=cluster.memories())
        wait_for(lambda: (steps(cluster) or [0])[-1] >= 8, f"copies of a step; {cluster.errors()}{lab.errors('first')}")
        held = steps(cluster)[-1]
        for rank in ranks[lost]:
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


def test_a_whole_parallel_group_that_is_lost_comes_back_from_hosts_outside_of_it(
    lab: Any,  # noqa: F811 - the fixture that is imported
    tmp_path: Path,
) -> None:
    spec = {"kind": "hsdp", "world": 4, "until": 40, "pause_s": 0.01}  # ranks 0 and 1 hold one replica, 2 and 3 another
    whole = lab.train("whole", **spec, directory=str(tmp_path / "other"))
    with Cluster(tmp_path, {name: (rank,) for rank, name in enumerate("abcd")}) as cluster:
        cluster.restore()
        pids = lab.start("first", **spec, memories=cluster.memories())

        def kept_outside() -> int:
            """The newest step of the second replica that the hosts of the first one hold."""
            held = [{v.step for name in "ab" for v in cluster.hosts[name].copies(rank)} for rank in (2, 3)]
            return max(held[0] & held[1], default=0)

        wait_for(lambda: kept_outside() >= 8, f"copies of a step; {cluster.errors()}{lab.errors('first')}")
        step = kept_outside()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for name in "cd":
            cluster.hosts[name].lose()
        lab.wait()
        for name in "cd":
            cluster.hosts[name].come_up()
        found = {told.step for told in cluster.restore()}
        assert len(found) == 1
        assert (restored := found.pop()) is not None
        assert restored >= step
        resumed = lab.train("second", **spec, memories=cluster.memories(), seed=99)
        assert lab.restored_step("second") == restored
        assert resumed == [rank[restored:] for rank in whole]
    assert "defect" not in cluster.errors()


def test_ranks_of_several_hosts_leave_memory_together_when_one_can_save_there_no_more(
    lab: Any,  # noqa: F811 - the fixture that is imported
    tmp_path: Path,
) -> None:
    often = {"save_every_s": 1.0, "save_within_s": 2.0}
    spec = {"kind": "ddp", "world": 4, "until": 800, "pause_s": 0.02, "attach": often, "replace_at": 30}
    with Cluster(tmp_path, TWO) as cluster:
        cluster.restore()
        lab.train("first", **spec, memories=cluster.memories())
    assert "rank 3: saving to memory stopped at step 30" in lab.errors("first")
    assert lab.errors("first").count("no save to memory was complete on all ranks of late") == 1
    saved = [body["step"] for kind, body in lab.notes("first") if kind == "CheckpointSaved"]
    assert any(100 < step < 800 for step in saved)  # by the ranks, to disk
    assert saved[-1] == 800


def test_a_damaged_slot_of_a_living_host_is_brought_again_from_a_copy(
    lab: Any,  # noqa: F811 - the fixture that is imported
    tmp_path: Path,
) -> None:
    spec = {"kind": "ddp", "world": 4, "until": 24, "pause_s": 0.01}
    whole = lab.train("whole", **spec, directory=str(tmp_path / "other"))
    with Cluster(tmp_path, TWO) as cluster:
        cluster.restore()
        lab.train("first", **spec, die_at=20, code=-9, memories=cluster.memories())
        wait_for(lambda: (steps(cluster) or [0])[-1] >= newest(cluster), f"copies; {cluster.errors()}")
        step = newest(cluster)
        folder = Path(cluster.memories()[3])
        slot = RankSlots(folder, 3).find(step)
        assert slot is not None
        flip(image_path(folder, 3, slot))
        cluster.restore()
        resumed = lab.train("second", **spec, memories=cluster.memories(), seed=99)
        assert lab.restored_step("second") == step
        assert resumed == [rank[step:] for rank in whole]
        assert f"the memory of rank 3 at step {step} is damaged" in lab.errors("second")
        assert "brought again from host b" in lab.errors("second")
    assert "defect" not in cluster.errors()


def newest(cluster: Cluster) -> int:
    """The newest step that all ranks have in their own memory."""
    return committed_steps([RankSlots(Path(f), rank).slots() for rank, f in enumerate(cluster.memories())])[0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    with path.open("r+b") as file:
        file.write(content)


def test_savers_killed_in_the_middle_of_transfers_never_cost_a_copy_that_all_had(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("EVERSTEP_FUZZ_SEED", "5")))
    kills = int(os.environ.get("EVERSTEP_FUZZ_KILLS", "4"))
    with Cluster(tmp_path, {"a": (0, 1), "b": (2, 3), "c": (4, 5)}) as cluster:
        cluster.tell(bytes_per_s=60e6)
        save(cluster, 1, slot=1, size=4 * MB)
        wait_for(lambda: steps(cluster) == [1], f"copies of step 1; {cluster.errors()}")
        for step in range(2, 2 + kills):
            save(cluster, step, slot=step % 3, size=4 * MB)
            killed = chance.sample("abc", chance.choice([1, 1, 2]))
            for name in killed:
                wait_for_bytes(cluster.hosts[name], chance)
                cluster.hosts[name].kill()
            assert steps(cluster)[-1:] in ([step - 1], [step])
            for name in killed:
                cluster.hosts[name].start()
            wait_for(lambda step=step: steps(cluster)[-1:] == [step], f"copies of step {step}; {cluster.errors()}")
    assert "defect" not in cluster.errors()


def test_savers_killed_while_a_lost_host_is_brought_back_only_delay_it(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("EVERSTEP_FUZZ_SEED", "5")))
    with Cluster(tmp_path, {"a": (0, 1), "b": (2, 3), "c": (4, 5)}) as cluster:
        cluster.tell()
        save(cluster, 1, slot=1, size=16 * MB)
        wait_for(lambda: steps(cluster) == [1], f"copies of step 1; {cluster.errors()}")
        for lost, killed in (("b", "c"), ("a", "b"), ("c", "c")):
            cluster.hosts[lost].lose()
            cluster.hosts[lost].come_up()
            cluster.tell(restoring=True)
            time.sleep(0.3 * chance.random())  # some time in the restore
            cluster.hosts[killed].kill()
            cluster.hosts[killed].start()
            cluster.wait_ready()
            for rank in range(6):
                assert [v.step for v in complete(Path(cluster.memories()[rank]), rank)] == [1]
            wait_for(lambda: steps(cluster) == [1], f"copies on all hosts again; {cluster.errors()}")
    assert "defect" not in cluster.errors()


def wait_for_bytes(host: SimulatedHost, chance: random.Random) -> None:
    """Until a copy of some shard is being written, or a little later, or for a while."""
    ends_s = time.monotonic() + 0.4 * chance.random()
    while time.monotonic() < ends_s and not host.is_receiving():
        os.sched_yield()
    spin_until_s = time.monotonic() + 0.03 * chance.random()
    while time.monotonic() < spin_until_s:
        os.sched_yield()
