"""Several nodes on one machine tell themselves apart, and one that was killed is itself again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from everstep.adapters.hosts.node_slot import node_slot

HOLD = """
import sys, time
from pathlib import Path
from everstep.adapters.hosts.node_slot import node_slot
rank = int(sys.argv[2]) if len(sys.argv) > 2 else None
with node_slot("job", rank=rank, folder=Path(sys.argv[1])) as number:
    print(number, flush=True)
    sys.stdin.read()
"""


def hold(folder: Path, *rank: str) -> tuple[int, subprocess.Popen[str]]:
    """The number that another process holds."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return int(process.stdout.readline()), process


def kill(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def test_nodes_of_one_job_get_numbers_of_their_own_and_jobs_do_not_mind_each_other(tmp_path: Path) -> None:
    with (
        node_slot("job", rank=None, folder=tmp_path) as first,
        node_slot("job", rank=None, folder=tmp_path) as second,
        node_slot("another", rank=None, folder=tmp_path) as other,
    ):
        assert (first, second, other) == (1, 2, 1)
    with node_slot("job", rank=None, folder=tmp_path) as again:
        assert again == 1
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_killed_nodes_find_their_numbers_by_their_rank_in_any_order(tmp_path: Path) -> None:
    (zero, a), (one, b) = hold(tmp_path, "0"), hold(tmp_path, "1")
    assert (zero, one) == (1, 2)
    kill(a, b)
    (one, b), (zero, a) = hold(tmp_path, "1"), hold(tmp_path, "0")
    assert (zero, one) == (1, 2)
    kill(a, b)


def test_a_killed_node_without_a_rank_takes_its_number_back_while_others_live(tmp_path: Path) -> None:
    (first, a), (second, b), (third, c) = hold(tmp_path), hold(tmp_path), hold(tmp_path)
    assert (first, second, third) == (1, 2, 3)
    kill(b)
    second, b = hold(tmp_path)
    assert second == 2
    kill(a, b, c)


def test_a_new_rank_takes_no_number_that_a_dead_one_will_want_back(tmp_path: Path) -> None:
    zero, a = hold(tmp_path, "0")
    kill(a)
    with node_slot("job", rank=7, folder=tmp_path) as seven, node_slot("job", rank=0, folder=tmp_path) as again:
        assert (zero, seven, again) == (1, 2, 1)


def test_what_a_killed_node_of_another_job_left_goes_after_a_day_and_what_lives_stays(tmp_path: Path) -> None:
    _, a = hold(tmp_path)
    (left,) = [path for path in tmp_path.iterdir() if path.suffix == ".1"]
    os.utime(left, (0, 0))
    with node_slot("another", rank=None, folder=tmp_path):
        assert left.exists()
    kill(a)
    with node_slot("another", rank=None, folder=tmp_path):
        assert not left.exists()
