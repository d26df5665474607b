"""NCCL's recorder asked in a live job: its own handler, its JSON, and whom the operations name although hosts wait."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.policy.dumping import collective, dump

from everstep.adapters.evidence.recorder_traces import reduce_recorders
from everstep.adapters.evidence.ring_trace import RankFacts
from everstep.adapters.workers.worker_server import group_counts
from everstep.domain.evidence import Frame, ProcessState
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import HostState
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis import diagnose

GROUPS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3)}
IN_ITEM = (Frame(file="/job/train.py", line=40, function="loss_item"),)
"""A host that waits for its GPU stands in the script, not in torch.distributed."""


def as_json(entries: list[dict[str, Any]], newest: dict[str, tuple[int, int]]) -> bytes:
    """As `dump_nccl_trace_json` has it: text for numbers in `pg_status`, zero for unknown times, no empty `entries`."""
    status = {
        number: {
            "last_enqueued_collective": str(enqueued),
            "last_started_collective": "-1",
            "last_completed_collective": str(completed),
        }
        for number, (enqueued, completed) in newest.items()
    }
    raw = dump([{**entry, "time_discovered_started_ns": 0} for entry in entries], GROUPS, pg_status=status)
    if not raw["entries"]:
        del raw["entries"]
    return json.dumps(raw).encode()


def waiting(seq: int, *, group: str, record: int) -> dict[str, Any]:
    return collective(seq, group=group, record=record, state="scheduled", retired=False)


def facts(process: ProcessState = ProcessState.SLEEPING) -> RankFacts:
    return RankFacts(process=process, stack=IN_ITEM)


def bodies() -> dict[Rank, bytes]:
    """Rank 3 never enters the second operation of group 2; 2 waits for it there, and 0 and 1 for 2 in group 0."""
    past = [collective(1, group="1", record=0), collective(1, group="0", record=1)]
    past_2 = [collective(1, group="2", record=0), collective(1, group="0", record=1)]
    first = as_json([*past, waiting(2, group="0", record=2)], {"0": (2, 1), "1": (1, 1)})
    return {
        Rank(0): first,
        Rank(1): first,
        Rank(2): as_json([*past_2, waiting(2, group="2", record=2)], {"0": (1, 1), "2": (2, 1)}),
        Rank(3): as_json(past_2, {"0": (1, 1), "2": (1, 1)}),
    }


def test_a_host_that_waits_for_its_gpu_is_not_taken_for_one_that_is_elsewhere() -> None:
    traces, members = reduce_recorders(HostId("h"), bodies(), {Rank(rank): facts() for rank in range(4)})
    assert {trace.host_state for trace in traces.values()} == {HostState.UNKNOWN}
    verdict = diagnose(list(traces.values()), members, moved=())
    assert (verdict.trouble, verdict.ranks) == (Trouble.NEVER_ENTERED, (3,))
    assert verdict.stack[0].startswith("/job/train.py:40")


def test_what_the_kernel_says_of_a_process_counts() -> None:
    known = {Rank(rank): facts() for rank in range(4)} | {Rank(3): facts(ProcessState.STOPPED)}
    traces, members = reduce_recorders(HostId("h"), bodies(), known)
    assert diagnose(list(traces.values()), members, moved=()).trouble is Trouble.FROZEN


def test_gloos_recorder_and_torn_answers_are_left_to_others() -> None:
    gloo = as_json([collective(1, profiling_name="gloo:all_reduce")], {"0": (1, 1)})
    idle = json.dumps({"version": "2.10", "pg_config": {"": {"name": "", "ranks": "[]"}}}).encode()
    answers = {Rank(0): gloo, Rank(1): b'{"version": "2.10', Rank(2): idle}
    assert reduce_recorders(HostId("h"), answers, {Rank(rank): facts() for rank in range(3)}) == ({}, ())


def test_a_rank_whose_ring_is_empty_is_known_by_its_counts() -> None:
    alone = {Rank(3): as_json([], {"0": (1, 1), "1": (1, 1), "2": (1, 1)})}
    traces, _ = reduce_recorders(HostId("h"), alone, {Rank(3): facts()})
    assert [(group.name, group.completed) for group in traces[Rank(3)].groups] == [("0", 1), ("1", 1), ("2", 1)]


ASKED = """
import json, sys
from torch._C import _distributed_c10d as c10d
from everstep.adapters.workers.worker_server import ask_recorder

server = c10d._WorkerServer(sys.argv[1])
before = ask_recorder(sys.argv[1], timeout_s=5.0)
seen = []
def answer(request, response):
    seen.append((request.get_param("includecollectives"), request.get_param("onlyactive")))
    response.set_content(sys.argv[2], "application/json")
    response.set_status(200)
c10d._register_handler("dump_nccl_trace_json", answer)
after = ask_recorder(sys.argv[1], timeout_s=5.0)
print(json.dumps([before.problem, before.body.decode(), after.problem, after.body.decode(), seen]), flush=True)
import os; os._exit(0)
"""


def test_nccls_own_handler_is_asked_first_and_its_absence_is_no_trouble(tmp_path: Path) -> None:
    body = bodies()[Rank(2)].decode()
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(tmp_path / "s"), body], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    problem, cpu, problem_then, nccl, seen = json.loads(done.stdout)
    assert (problem, problem_then) == ("", "")
    assert json.loads(cpu)["version"]  # the CPU's recorder, since this build has no other
    assert nccl == body
    assert seen == [["true", "false"]]
    assert {count.group: count.completed for count in group_counts(nccl.encode())} == {"0 (GROUP0)": 1, "2 (GROUP2)": 1}
