"""What `everstep run` says: a line for what a person wants to know, and the reason of the end as the very last line."""

import pytest

from everstep.cli.console import RunConsole, sayer
from everstep.domain.causes import Cause, FaultKind
from everstep.domain.commands import Command, DismissSuspicion, FinishJob, RecordVerdict, Rung, StartWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointDelayed,
    CheckpointFailed,
    CheckpointRefused,
    CheckpointRestored,
    CheckpointSaved,
    Event,
    FaultInjected,
    RunResumed,
    StallSuspected,
    StepsFinished,
    WorkersStarted,
)
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict

HOST = HostId("h")


def start(attempt: int, why: str = "first start") -> StartWorkers:
    return StartWorkers(
        at_s=0.0,
        attempt=Attempt(attempt),
        shares=(),
        world_size=4,
        restart_count=attempt - 1,
        faults=(),
        rung=None,
        why=why,
    )


def started(*, warm: bool) -> WorkersStarted:
    return WorkersStarted(at_s=0.5, attempt=Attempt(1), host=HOST, pids=(1, 2, 3, 4), warm=warm, spawn_s=0.123)


def verdict(where: str = "train.py:3 in main") -> RecordVerdict:
    return RecordVerdict(
        at_s=12.0,
        attempt=Attempt(1),
        incident=IncidentId("a0001-1"),
        verdict=Verdict(
            trouble=Trouble.NEVER_ENTERED,
            ranks=(Rank(2),),
            hosts=(HOST,),
            reason="rank 2 stands.",
            where=where,
            cause=Cause(component="c", category="c"),
            signature="s",
        ),
        since_s=10.5,
        detected_at_s=11.0,
        step=40,
    )


def end(code: ExitCode, detail: str = "") -> FinishJob:
    rung = None if code is ExitCode.DONE else Rung.ASK_A_PERSON
    return FinishJob(at_s=20.0, exit_code=code, rung=rung, summary="the summary", detail=detail)


def said(*bodies: Event | Command, quiet: bool = False) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    console = RunConsole(lambda text, style: lines.append((style, text)), quiet=quiet, report_hint="see the report")
    for body in bodies:
        console.hear(body)
    return lines


STORY: list[Event | Command] = [
    RunResumed(at_s=0.0, gap_s=61.4, command=()),
    start(1),
    started(warm=True),
    StepsFinished(at_s=1.0, attempt=Attempt(1), host=HOST, first_step=1, ended_at_s=(0.9,)),
    FaultInjected(
        at_s=2.0, attempt=Attempt(1), fault=PlannedFault(number=1, kind=FaultKind.KILL, rank=Rank(2), step=9), step=9
    ),
    StallSuspected(
        at_s=5.0,
        attempt=Attempt(1),
        host=HOST,
        phase=Phase.TRAINING,
        since_s=3.0,
        deadline_s=1.5,
        learned_from="the floor",
    ),
    DismissSuspicion(
        at_s=5.1, attempt=Attempt(1), host=HOST, incident=IncidentId("i"), reason="it moves again", deadline_factor=1.0
    ),
    verdict(),
    start(2, "restart 1: again"),
    started(warm=False),
    CheckpointRestored(at_s=13.0, attempt=Attempt(2), step=30, path="checkpoints/30", duration_s=0.5),
]


def test_a_story_in_lines() -> None:
    assert said(*STORY) == [
        ("plain", "continuing a run that was left 61 s ago"),
        ("plain", "attempt 1: starting 4 workers"),
        ("quiet", "attempt 1: 4 workers started warm in 0.12 s"),
        ("quiet", "injected kill into rank 2 at step 9"),
        ("quiet", "no rank has moved for 2.0 s (the floor); taking evidence"),
        ("quiet", "no hang (yet): it moves again"),
        ("bad", "NEVER_ENTERED: rank 2 stands. [train.py:3 in main] (found 1.50 s after the last progress)"),
        ("plain", "attempt 2: starting 4 workers; restart 1: again"),
        ("quiet", "attempt 1: 4 workers started cold in 0.12 s"),
        ("good", "resumed from step 30 (checkpoints/30) in 0.50 s"),
    ]


def test_quietly_only_what_went_wrong_is_said() -> None:
    assert [style for style, _ in said(*STORY, end(ExitCode.DONE), quiet=True)] == ["bad"]
    assert said(end(ExitCode.BUDGET_SPENT), quiet=True) == [("bad", "budget spent (exit 15): the summary")]


def test_a_line_that_the_reason_has_already_is_not_said_twice() -> None:
    assert said(verdict("stands"))[0][1] == "NEVER_ENTERED: rank 2 stands. (found 1.50 s after the last progress)"


@pytest.mark.parametrize("quiet", [False, True])
def test_trouble_with_checkpoints_is_always_said(quiet: bool) -> None:
    refused = CheckpointRefused(at_s=1.0, attempt=Attempt(1), path="c/30", reason="torn")
    failed = CheckpointFailed(at_s=1.0, attempt=Attempt(1), step=40, reason="disk full")
    assert said(refused, failed, quiet=quiet) == [
        ("bad", "checkpoint c/30 is not used: torn"),
        ("bad", "the save of step 40 failed and training goes on: disk full"),
    ]


def test_storage_that_answers_again_is_said_once_and_the_mirror_is_not_the_disk() -> None:
    disk = CheckpointDelayed(at_s=1.0, attempt=Attempt(1), step=40, waited_s=10.0, reason="the disk has not answered")
    mirror = CheckpointDelayed(at_s=1.0, attempt=Attempt(0), step=40, waited_s=0.0, reason="503")
    saved = CheckpointSaved(at_s=2.0, attempt=Attempt(1), step=50, path="c/50", size_bytes=1, duration_s=0.1)
    assert said(mirror, saved) == [("bad", "step 40 is not in the mirror yet: 503")]
    assert said(disk, saved, saved) == [
        ("bad", "step 40 is not durable yet: the disk has not answered"),
        ("good", "checkpoints are durable again: step 50, c/50"),
    ]


def test_a_good_end_is_the_last_line() -> None:
    assert said(end(ExitCode.DONE)) == [("quiet", "see the report"), ("good", "done: the summary")]


def test_a_bad_end_shows_the_detail_and_then_its_sentence_as_the_very_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = RunConsole(sayer(), quiet=False, report_hint="see the report")
    console.hear(end(ExitCode.SCRIPT_BUG, detail="Traceback: mine\n  line 3\n\n"))
    assert capsys.readouterr().err.splitlines() == [
        "everstep: see the report",
        "Traceback: mine",
        "  line 3",
        "everstep: script bug (exit 10): the summary",
    ]
