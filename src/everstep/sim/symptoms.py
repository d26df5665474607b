"""What a fault of the coarse world looks like from outside: exits, suspicions, and the summaries of an inquiry.

An agent that speaks for hundreds of hosts sends only summaries that tell something: the culprit's, and one of a rank
that waits.
"""

from everstep.domain.causes import FaultKind
from everstep.domain.events import StallSuspected, WorkerExited
from everstep.domain.evidence import Frame, GroupCounts, ProcessState, RankSummary
from everstep.domain.ids import Attempt, HostId, Rank
from everstep.domain.phases import Phase
from everstep.sim.failures import Fault
from everstep.sim.fleet import Duty

_CODES = {
    FaultKind.KILL: -9,
    FaultKind.SEGFAULT: -11,
    FaultKind.MAINTENANCE: -15,
    FaultKind.EXCEPTION: 1,
    FaultKind.EXIT: 0,
}
_SILENT = {FaultKind.FREEZE, FaultKind.GIL, FaultKind.SLEEP, FaultKind.LOADER}
_WAITING = Frame(file="torch/distributed/distributed_c10d.py", line=1, function="all_reduce")
_STUCK = Frame(file="train.py", line=7, function="stuck")


def is_silent(kind: FaultKind) -> bool:
    """Whether no process ends: ranks just stop moving."""
    return kind in _SILENT


def exits_of(
    fault: Fault, number: int, *, duty: Duty, attempt: Attempt, at_s: float, step: int
) -> tuple[WorkerExited, ...]:
    """The culprit's end; after a silent leave a victim's as well, which proves that the others had not finished."""
    host = duty.fleet.host(fault.hosts[0])
    raised = fault.kind is FaultKind.EXCEPTION
    culprit = WorkerExited(
        at_s=at_s,
        attempt=attempt,
        host=host,
        rank=duty.rank(fault.hosts[0]),
        pid=1,
        exit_code=_CODES[fault.kind],
        phase=Phase.TRAINING,
        step=step,
        error_type="RuntimeError" if raised else "",
        error_message=f"simulated: {fault.cause.component} (fault {number})" if raised else "",
        error_where="train.py:1 in main" if raised else "",
    )
    if fault.kind is not FaultKind.EXIT:
        return (culprit,)
    victim = WorkerExited(
        at_s=at_s,
        attempt=attempt,
        host=host,
        rank=Rank(culprit.rank + 1),
        pid=2,
        exit_code=1,
        phase=Phase.TRAINING,
        step=step,
        error_type="DistBackendError",
        error_message="NCCL error: remote process exited or there was a network error",
    )
    return culprit, victim


def suspicion_of(agent: HostId, *, attempt: Attempt, at_s: float, since_s: float, phase: Phase) -> StallSuspected:
    return StallSuspected(
        at_s=at_s,
        attempt=attempt,
        host=agent,
        phase=phase,
        since_s=since_s,
        deadline_s=round(at_s - since_s, 3),
        learned_from="the scenario's detect_silence",
    )


def summaries_of(
    fault: Fault | None, *, duty: Duty, phase: Phase, step: int, silence_s: float
) -> dict[HostId, tuple[RankSummary, ...]]:
    """By agent. Empty for an end: the exits tell it all."""
    if fault is None or not is_silent(fault.kind):
        return {}
    culprit_host = duty.fleet.host(fault.hosts[0])
    culprit = duty.rank(fault.hosts[0])
    holds_gil = fault.kind is FaultKind.GIL
    frozen = fault.kind is FaultKind.FREEZE
    process = ProcessState.STOPPED if frozen else ProcessState.RUNNING if holds_gil else ProcessState.SLEEPING
    return {
        duty.fleet.agent_of(culprit_host): (
            RankSummary(
                rank=culprit,
                host=culprit_host,
                process=process,
                phase=phase,
                step=step,
                silence_s=silence_s,
                cpu_s=silence_s if holds_gil else 1.0,
                answers=not frozen,
                gil_free=not (frozen or holds_gil),
                stack=() if frozen else (_STUCK,),
                groups=() if frozen or holds_gil else (GroupCounts(group="0", enqueued=step, completed=step),),
            ),
            RankSummary(
                rank=Rank(culprit + 1),
                host=culprit_host,
                process=ProcessState.SLEEPING,
                phase=phase,
                step=step,
                silence_s=silence_s,
                cpu_s=1.0,
                answers=True,
                gil_free=True,
                stack=(_WAITING,),
                groups=(GroupCounts(group="0", enqueued=step + 1, completed=step),),
            ),
        )
    }
