"""Copies on other hosts: complete or not there, whoever is killed or lies; an empty host gets its own back."""

from pathlib import Path

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
