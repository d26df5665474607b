"""Makes flight recorder dumps and traces for tests, in PyTorch's own form."""

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import HostState, Membership, RankTrace
from everstep.domain.recorder_dump import Dump, Entry
from everstep.policy.trace_summary import MemberLists, reduce_dump


def collective(seq: int, *, record: int | None = None, group: str = "0", **changes: Any) -> dict[str, Any]:
    """An all_reduce of NCCL that has ended, unless `changes` say otherwise."""
    return {
        "record_id": seq if record is None else record,
        "pg_id": int(group),
        "process_group": (group, f"GROUP{group}"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1000 + seq,
        "input_sizes": [[17]],
        "input_dtypes": ["Float"],
        "output_sizes": [[17]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "retired": True,
        "is_p2p": False,
        **changes,
    }


def one_missing(*, ranks: int, missing: int) -> list[list[dict[str, Any]]]:
    """The entries of each rank where one has not entered the third all_reduce and all others wait in it."""
    frames = [{"name": "step", "filename": "/job/train.py", "line": 12}]
    done = [collective(1, frames=frames), collective(2, frames=frames)]
    stuck = collective(3, state="scheduled", retired=False, frames=frames)
    return [done if rank == missing else [*done, stuck] for rank in range(ranks)]


def message(name: str, number: int, *, record: int, group: str = "0", **changes: Any) -> dict[str, Any]:
    """A point-to-point operation such as `send 0->1` that has not ended."""
    changes = {"state": "scheduled", "retired": False, **changes}
    return collective(
        0, record=record, group=group, p2p_seq_id=number, is_p2p=True, profiling_name=f"nccl:{name}", **changes
    )


def dump(entries: Sequence[dict[str, Any]], groups: dict[str, Sequence[int]], **changes: Any) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {n: {"name": n, "desc": f"GROUP{n}", "ranks": str(list(r))} for n, r in groups.items()},
        "pg_status": {},
        "comm_lib_version": "2.27",
        "entries": list(entries),
        **changes,
    }


def reduced(
    raw: dict[str, Any], rank: int = 0, members: MemberLists | None = None, state: HostState = HostState.UNKNOWN
) -> RankTrace:
    entries = [msgspec.convert(one, Entry) for one in raw["entries"]]
    decoded = msgspec.convert({**raw, "entries": []}, Dump)
    decoded.entries = entries
    lists = members or MemberLists()
    return reduce_dump(decoded, lists, rank=Rank(rank), host=HostId(f"host{rank // 2}"), host_state=state)


def job(
    dumps: dict[int, dict[str, Any]], states: dict[int, HostState] | None = None
) -> tuple[list[RankTrace], tuple[Membership, ...]]:
    """Traces and member lists of several ranks' dumps."""
    lists = MemberLists()
    traces = [reduced(raw, rank, lists, (states or {}).get(rank, HostState.UNKNOWN)) for rank, raw in dumps.items()]
    return traces, lists.memberships()
