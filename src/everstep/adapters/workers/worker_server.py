"""Asks a worker's own C++ server over its unix socket: it answers although Python is stuck, and never when frozen."""

import http.client
import json
import socket
from dataclasses import dataclass

from everstep.domain.evidence import GroupCounts
from everstep.domain.ids import Rank

_NCCL_RECORDER = "dump_nccl_trace_json?includecollectives=true&onlyactive=false"
"""Registered by builds with CUDA alone; parameters it does not know are refused with 400."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back; `problem` says why nothing did."""

    body: bytes = b""
    problem: str = ""


def ask(path: str, handler: str, *, timeout_s: float) -> Answer:
    """POST to a handler: `ping`, `fr_trace_json`, `dump_traceback` (which needs the GIL)."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request("POST", f"/handler/{handler}")
        response = connection.getresponse()
        body = response.read()
    except TimeoutError:
        return Answer(problem=f"{handler}: no answer within {timeout_s} s")
    except (OSError, http.client.HTTPException) as error:
        return Answer(problem=f"{handler}: {error}")
    finally:
        connection.close()
    if response.status != http.client.OK:
        return Answer(problem=f"{handler}: HTTP {response.status}")
    return Answer(body=body)


def ask_recorder(path: str, *, timeout_s: float) -> Answer:
    """PyTorch's flight recorder in JSON: NCCL's where this build has one that recorded anything, else the CPU's.

    They are two recorders behind two handlers. JSON leaves stacks out, whose symbols need the GIL: so it is answered
    while that is held.
    """
    nccl = ask(path, _NCCL_RECORDER, timeout_s=timeout_s)
    if not nccl.problem and _holds_anything(nccl.body):
        return nccl
    cpu = ask(path, "fr_trace_json", timeout_s=timeout_s)
    return nccl if cpu.problem and not nccl.problem else cpu


def _holds_anything(recorder_json: bytes) -> bool:
    try:
        dump = json.loads(recorder_json)
        return bool(dump.get("entries") or dump.get("pg_status"))
    except (ValueError, AttributeError):
        return False


def group_counts(recorder_json: bytes) -> tuple[GroupCounts, ...]:
    """The rank's progress in each group, from PyTorch's flight recorder in JSON; empty when that is torn.

    On gloo `pg_status` counts every operation, point-to-point too; names come from the entries.
    """
    try:
        dump = json.loads(recorder_json)
        status = dump.get("pg_status", {})
        newest = {str(entry["pg_id"]): entry for entry in dump.get("entries", ())}
        groups = []
        for group_id, counts in sorted(status.items()):
            entry = newest.get(group_id, {})
            name, description = entry.get("process_group", (group_id, ""))
            groups.append(
                GroupCounts(
                    group=f"{name} ({description})" if description else name,
                    ranks=_members(dump, name),
                    enqueued=int(counts["last_enqueued_collective"]),
                    completed=int(counts["last_completed_collective"]),
                    newest=_operation(entry),
                )
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
    return tuple(groups)


def _members(dump: dict[str, dict[str, dict[str, str]]], name: str) -> tuple[Rank, ...]:
    """gloo writes its table under an empty name (flight_recorder.md 1.3); that one is the default group, `0`."""
    table = dump.get("pg_config", {})
    ranks = table.get(name, table.get("", {}) if name == "0" else {}).get("ranks", "[]")
    return tuple(Rank(rank) for rank in json.loads(ranks))


def _operation(entry: dict[str, object]) -> str:
    name = str(entry.get("profiling_name", "")).partition(":")[2]
    return f"{name} of {entry['input_sizes']}" if name and entry.get("input_sizes") else name
