"""A record of host faults as StepFun published one (github.com/stepfun-ai/InfiniteHBD-Trace): starts and ends in JSON.

Each entry has `node_id`, `event_time` in days, `event_type` (`fault_start` or `fault_end`) and `fault_type` with
`Level`, `Class` and `Desc`. It pairs starts with ends, and knows nothing of what they mean.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from everstep.domain.errors import ConfigError, EvidenceError
from everstep.planning.failures import DAY_S
from everstep.planning.traces import HostFault


def read_fault_trace(path: Path) -> tuple[HostFault, ...]:
    """Read a record, in the order of the faults' starts. A fault without an end lasts until the last entry.

    Raises:
        ConfigError: the file isn't there or can't be read.
        EvidenceError: it is not such a record.
    """
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a fault trace, a JSON list of starts and ends") from error
    except ValueError as error:
        raise EvidenceError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise EvidenceError(f"{path} holds no fault: a fault trace is a JSON list of starts and ends")
    return _paired(entries, name=str(path))


def _paired(entries: list[Any], *, name: str) -> tuple[HostFault, ...]:
    open_faults: defaultdict[tuple[str, str], list[HostFault]] = defaultdict(list)
    faults: list[HostFault] = []
    last_s = 0.0
    for number, entry in enumerate(entries, start=1):
        fault, is_start = _fault(entry, number=number, name=name)
        last_s = max(last_s, fault.began_s)
        waiting = open_faults[fault.host, f"{fault.level}/{fault.detail}"]
        if is_start:
            waiting.append(fault)
        elif waiting:
            faults.append(_ended(waiting.pop(0), fault.began_s))
    for waiting in open_faults.values():
        faults += [_ended(fault, last_s) for fault in waiting]
    return tuple(sorted(faults, key=lambda fault: (fault.began_s, fault.host, fault.ended_s)))


def _fault(entry: Any, *, number: int, name: str) -> tuple[HostFault, bool]:
    """A fault that lasts no time yet, and whether the entry is its start."""
    try:
        kind, at_s = entry["fault_type"], float(entry["event_time"]) * DAY_S
        fault = HostFault(
            host=str(entry["node_id"]),
            began_s=at_s,
            ended_s=at_s,
            level=str(kind["Level"]),
            detail=f"{kind['Class']}: {kind['Desc']}",
        )
        is_start = {"fault_start": True, "fault_end": False}[entry["event_type"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{name}: entry {number} is not a fault's start or end: {type(error).__name__} {error}; it needs node_id, "
            "event_time in days, event_type (fault_start or fault_end) and fault_type with Level, Class and Desc"
        ) from error
    return fault, is_start


def _ended(fault: HostFault, at_s: float) -> HostFault:
    return HostFault(host=fault.host, began_s=fault.began_s, ended_s=at_s, level=fault.level, detail=fault.detail)
