"""A recorded fault trace in StepFun's format, as faults of the coarse world.

The format (InfiniteHBD-Trace, SIGCOMM'25): a JSON list of {node_id, event_time in days, event_type: fault_start or
fault_end, fault_type {Level, Class, Desc}}. Takes the parsed JSON; it opens no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.domain.causes import Cause, FaultKind
from everstep.domain.errors import EvidenceError
from everstep.sim.failures import DAY_S, Fault, in_order

_KINDS = {"Software Failure": FaultKind.EXCEPTION}
_SAMPLES_PER_DAY = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrace:
    """Attributes:
    node_names: by the number that faults use; nodes without a fault follow unnamed.
    duration_s: from the trace's zero to its last event.
    """

    faults: tuple[Fault, ...]
    node_names: tuple[str, ...]
    duration_s: float

    def down_at_once(self) -> list[int]:
        """How many nodes are down, sampled every hour: what spares are sized by."""
        changes: list[tuple[float, int]] = []
        for fault in self.faults:
            changes += [(fault.at_s, 1), (fault.at_s + fault.down_s, -1)]
        changes.sort()
        samples, down, next_change = [], 0, 0
        for hour in range(int(self.duration_s / DAY_S * _SAMPLES_PER_DAY)):
            at_s = hour * DAY_S / _SAMPLES_PER_DAY
            while next_change < len(changes) and changes[next_change][0] <= at_s:
                down += changes[next_change][1]
                next_change += 1
            samples.append(down)
        return samples


def parse_trace(document: object) -> FaultTrace:
    """The faults of a trace. A node is down from fault_start to the fault_end that follows it, or to the trace's end.

    Raises:
        EvidenceError: it is no such trace; says which entry and what was expected.
    """
    if not isinstance(document, list) or not document:
        raise EvidenceError("the fault trace is empty or no JSON list: expected StepFun's format, a list of events")
    events = [_event(number, entry) for number, entry in enumerate(document, start=1)]
    names = sorted({event.node for event in events})
    numbers = {name: number for number, name in enumerate(names)}
    duration_s = max(event.at_s for event in events)
    opened: dict[str, list[_Event]] = {}
    faults = []
    for event in sorted(events, key=lambda event: event.at_s):  # stable: equal times stay in the file's order
        begun = opened.setdefault(event.node, [])
        if event.is_start:
            begun.append(event)
        elif begun:
            faults.append(_fault(begun.pop(0), event.at_s, numbers))
    faults += [_fault(begun, duration_s, numbers) for open_ones in opened.values() for begun in open_ones]
    return FaultTrace(faults=in_order(faults), node_names=tuple(names), duration_s=duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    node: str
    at_s: float
    is_start: bool
    level: str
    kind: str


def _event(number: int, entry: object) -> _Event:
    if not isinstance(entry, Mapping):
        raise EvidenceError(f"event {number} of the fault trace is no object; expected node_id, event_time, event_type")
    node, days, kind = entry.get("node_id"), entry.get("event_time"), entry.get("event_type")
    if not isinstance(node, str) or not isinstance(days, int | float) or isinstance(days, bool) or days < 0:
        raise EvidenceError(f"event {number} of the fault trace: expected a node_id and an event_time in days, from 0")
    if kind not in ("fault_start", "fault_end"):
        raise EvidenceError(f"event {number} of the fault trace: event_type is {kind!r}, not fault_start or fault_end")
    described = entry.get("fault_type")
    described = described if isinstance(described, Mapping) else {}
    return _Event(
        node=node,
        at_s=round(float(days) * DAY_S, 3),
        is_start=kind == "fault_start",
        level=str(described.get("Level", "Other")),
        kind=str(described.get("Class", "Unknown")),
    )


def _fault(begun: _Event, end_s: float, numbers: dict[str, int]) -> Fault:
    return Fault(
        at_s=begun.at_s,
        hosts=(numbers[begun.node],),
        kind=_KINDS.get(begun.level, FaultKind.KILL),
        cause=Cause(component=begun.kind, category=begun.level),
        down_s=round(max(0.0, end_s - begun.at_s), 3),
    )
