"""What the live view shows for a run with one fault: exact lines in a pipe, the same facts in a picture."""

import io

from everstep.cli.live_view import PlainView, RichView, live_view
from everstep.domain.causes import Cause, FaultKind
from everstep.domain.commands import Command, FinishJob, HostShare, RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import Event, FaultInjected, PhaseChanged, RunStarted, StepsFinished, WorkersStopped
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.views.live import sparkline

HOST = HostId("ash")
FAULT = PlannedFault(
    number=1, kind=FaultKind.FREEZE, rank=Rank(2), step=4, cause=Cause(component="NIC", category="Host")
)


def start(attempt: int, at_s: float) -> StartWorkers:
    return StartWorkers(
        at_s=at_s,
        attempt=Attempt(attempt),
        shares=(HostShare(host=HOST, first_rank=Rank(0), count=4),),
        world_size=4,
        restart_count=attempt - 1,
        faults=(),
        rung=None,
        why="",
    )


def steps(attempt: int, first: int, ends_s: list[float], loss: float) -> StepsFinished:
    return StepsFinished(
        at_s=ends_s[-1],
        attempt=Attempt(attempt),
        host=HOST,
        first_step=first,
        ended_at_s=tuple(ends_s),
        loss=loss,
    )


def phase(attempt: int, at_s: float) -> PhaseChanged:
    return PhaseChanged(at_s=at_s, attempt=Attempt(attempt), host=HOST, phase=Phase.TRAINING, step=0)


def verdict(at_s: float) -> RecordVerdict:
    found = Verdict(
        trouble=Trouble.FROZEN,
        ranks=(Rank(2),),
        hosts=(HOST,),
        reason="rank 2 on ash is frozen since step 4.",
        cause=Cause(component="Frozen Process", category="Host"),
        signature="frozen 2",
    )
    return RecordVerdict(
        at_s=at_s,
        attempt=Attempt(1),
        incident=IncidentId("a0001-1"),
        verdict=found,
        since_s=7.0,
        detected_at_s=8.5,
        step=4,
    )


STORY: tuple[Event | Command, ...] = (
    RunStarted(at_s=0.0, run=RunId("r"), everstep="0", command=(), world_size=4, host_count=1, faults=(FAULT,)),
    start(1, 0.1),
    phase(1, 2.0),
    steps(1, 1, [3.0, 4.0, 5.0], 4.5),
    steps(1, 4, [6.0], 4.25),
    FaultInjected(at_s=6.5, attempt=Attempt(1), fault=FAULT, step=4),
    verdict(8.8),
    StopWorkers(at_s=8.8, attempt=Attempt(1), host=HOST, kill_ranks=(), grace_s=3.0),
    WorkersStopped(at_s=9.0, attempt=Attempt(1), host=HOST, killed=()),
    start(2, 9.0),
    phase(2, 9.5),
    steps(2, 4, [10.0], 4.25),
    steps(2, 5, [11.0, 12.0], 3.5),
    FinishJob(at_s=12.5, exit_code=ExitCode.DONE, rung=None, summary="all 4 ranks have ended well"),
)


def test_a_pipe_gets_a_line_for_each_fault_and_recovery_and_one_every_few_seconds() -> None:
    stream = io.StringIO()
    with PlainView(stream).show("the run", until=6, fault_count=1) as hear:
        for body in STORY:
            hear(body)
    lines = stream.getvalue().splitlines()
    shares = [line.rpartition(" ")[2] for line in lines if "effective" in line]
    assert all(0 < int(share.rstrip("%")) < 100 for share in shares)
    assert [line.replace(share, "N%") for line, share in zip(lines, per_line(lines), strict=True)] == [
        "the run",
        "   5.0 s  step 3 of 6, loss 4.500, 0 of 1 faults injected, effective training time N%",
        "   6.5 s  fault 1 of 1: freeze on rank 2 at step 4, standing for NIC (Host)",
        "   8.8 s  found in 1.8 s: rank 2 on ash is frozen since step 4.",
        "  10.0 s  recovered: training again at step 4, 3.0 s after the last progress",
        "  10.0 s  step 4 of 6, loss 4.250, 1 of 1 faults injected, effective training time N%",
        "  12.5 s  done: all 4 ranks have ended well",
    ]


def per_line(lines: list[str]) -> list[str]:
    return [line.rpartition(" ")[2] if "effective" in line else "\0" for line in lines]


def test_a_terminal_gets_a_picture_with_the_same_facts() -> None:
    stream = io.StringIO()
    with RichView(stream).show("the run", until=6, fault_count=1) as hear:
        for body in STORY:
            hear(body)
    picture = stream.getvalue()
    for words in ("the run", "step 6 of 6", "attempt 2: done", "loss 3.500", "faults injected 1 of 1", "recovered 1"):
        assert words in picture
    assert "freeze on rank 2 for NIC" in picture


def test_a_pipe_is_not_taken_for_a_terminal() -> None:
    assert isinstance(live_view(io.StringIO()), PlainView)


def test_a_sparkline_follows_the_values_and_fits() -> None:
    assert sparkline([], cells=5) == ""
    assert sparkline([1.0], cells=5) == "▁"
    assert sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], cells=8) == "█▇▆▅▄▃▂▁"
    assert sparkline([8.0, 8.0, 1.0, 1.0], cells=2) == "█▁"
    assert len(sparkline([float(n % 7) for n in range(1000)], cells=48)) == 48
