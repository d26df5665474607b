"""Incidents as the ledger tells them: their parts, their evidence, injected faults, causes."""

from collections.abc import Sequence

import pytest

from everstep.domain.causes import LLAMA3, Cause, FaultKind
from everstep.domain.commands import (
    Command,
    DismissSuspicion,
    HostShare,
    RecordVerdict,
    Rung,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.events import (
    CheckpointRestored,
    Event,
    EvidenceCollected,
    FaultInjected,
    PhaseChanged,
    RunStarted,
    StallSuspected,
    StepsFinished,
    WorkerExited,
    WorkerReady,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.evidence import EvidenceFile
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.accounting import Accountant
from everstep.policy.incidents import TIMELINE_MOMENTS_MAX, Incident, IncidentLog, VerdictAccuracy, interruption_table

A, B = HostId("a"), HostId("b")
GPU = LLAMA3[0].cause
PROCESS = Cause(component="Dead Process", category="Software")


def verdict(*ranks: int, cause: Cause = PROCESS) -> Verdict:
    named = tuple(map(Rank, ranks))
    return Verdict(trouble=Trouble.DEAD, ranks=named, hosts=(A,), reason=f"{ranks} died", cause=cause, signature="dead")


def started(*faults: PlannedFault) -> RunStarted:
    return RunStarted(at_s=0.0, run=RunId("r"), everstep="0", command=("x",), world_size=4, host_count=2, faults=faults)


def start(at_s: float, attempt: int, *, why: str = "", hosts: Sequence[HostId] = (A, B)) -> StartWorkers:
    return StartWorkers(
        at_s=at_s,
        attempt=Attempt(attempt),
        shares=tuple(HostShare(host=host, first_rank=Rank(2 * i), count=2) for i, host in enumerate(hosts)),
        world_size=4,
        restart_count=attempt - 1,
        faults=(),
        rung=Rung.RESTART_ALL if attempt > 1 else None,
        why=why,
    )


def train(attempt: int, ends_s: Sequence[float], first: int = 1) -> list[Event | Command]:
    begin_s = ends_s[0] - 1.0
    marks: list[Event | Command] = [
        PhaseChanged(at_s=begin_s, attempt=Attempt(attempt), host=host, phase=Phase.TRAINING, step=0) for host in (A, B)
    ]
    return marks + [
        StepsFinished(at_s=ends_s[-1], attempt=Attempt(attempt), host=host, first_step=first, ended_at_s=tuple(ends_s))
        for host in (A, B)
    ]


def record(
    at_s: float, attempt: int, found: Verdict, *, since_s: float, planned: bool = False, n: int = 1
) -> RecordVerdict:
    return RecordVerdict(
        at_s=at_s,
        attempt=Attempt(attempt),
        incident=IncidentId(f"a{attempt:04}-{n}"),
        verdict=found,
        since_s=since_s,
        detected_at_s=at_s - 0.1,
        step=3,
        planned=planned,
    )


def end(at_s: float, attempt: int) -> list[Event | Command]:
    """Both hosts are told to stop at once, and have stopped a second later."""
    orders = [StopWorkers(at_s=at_s, attempt=Attempt(attempt), host=h, kill_ranks=(), grace_s=1.0) for h in (A, B)]
    return [
        *orders,
        WorkersStopped(at_s=at_s + 0.5, attempt=Attempt(attempt), host=A, killed=(Rank(1),)),
        WorkersStopped(at_s=at_s + 1.0, attempt=Attempt(attempt), host=B, killed=()),
    ]


def inject(at_s: float, attempt: int, rank: int, number: int = 1, cause: Cause | None = GPU) -> FaultInjected:
    fault = PlannedFault(number=number, kind=FaultKind.KILL, rank=Rank(rank), step=3, cause=cause)
    return FaultInjected(at_s=at_s, attempt=Attempt(attempt), fault=fault, step=3)


def exited(at_s: float, attempt: int, rank: int) -> WorkerExited:
    return WorkerExited(
        at_s=at_s, attempt=Attempt(attempt), host=A, rank=Rank(rank), pid=7, exit_code=-9, phase=Phase.TRAINING, step=3
    )


def ready(at_s: float, attempt: int, rank: int, part: str, after_s: float) -> WorkerReady:
    return WorkerReady(at_s=at_s, attempt=Attempt(attempt), rank=Rank(rank), part=part, after_s=after_s)


def fold(*bodies: Event | Command) -> tuple[tuple[Incident, ...], VerdictAccuracy | None]:
    accountant, log = Accountant(), IncidentLog()
    for body in bodies:
        accountant.handle(body)
        log.handle(body)
    return log.incidents(accountant.account()), log.accuracy()


FAILED: list[Event | Command] = [started(), start(0.0, 1), *train(1, [2.0, 3.0, 4.0])]
RECOVERING: list[Event | Command] = [
    start(6.0, 2, why="all are restarted"),
    WorkersStarted(at_s=6.2, attempt=Attempt(2), host=A, pids=(1, 2), warm=True, spawn_s=0.2),
    WorkersStarted(at_s=6.4, attempt=Attempt(2), host=B, pids=(3, 4), warm=True, spawn_s=0.4),
    ready(6.9, 2, 0, "imported", 0.5),
    ready(7.4, 2, 1, "imported", 1.0),
    ready(7.9, 2, 1, "group_ready", 1.5),
    ready(8.4, 2, 0, "restored", 2.0),
    CheckpointRestored(at_s=8.4, attempt=Attempt(2), step=2, path="checkpoints/2", duration_s=0.5),
    *train(2, [9.4, 10.4], first=3),
]


def story() -> Incident:
    (incident,), _ = fold(
        *FAILED,
        inject(4.0, 1, 1),
        exited(4.4, 1, 1),
        EvidenceCollected(
            at_s=4.45,
            attempt=Attempt(1),
            host=A,
            incident=IncidentId("a0001-1"),
            snapshot=1,
            summaries=(),
            files=(EvidenceFile(path="evidence/a0001-1/stack.txt", size_bytes=12, digest="blake2b-128:00"),),
            took_s=0.1,
        ),
        record(4.5, 1, verdict(1), since_s=4.0),
        *end(4.6, 1),
        exited(4.7, 1, 2),
        *RECOVERING,
    )
    return incident


def test_an_incident_has_the_times_of_its_whole_recovery() -> None:
    incident = story()
    assert (incident.since_s, incident.detected_at_s, incident.verdict_at_s) == (4.0, 4.4, 4.5)
    assert (incident.stopped_at_s, incident.restarted_at_s, incident.recovered_at_s) == (5.6, 6.0, 9.4)
    assert (incident.rung, incident.why) == (Rung.RESTART_ALL, "all are restarted")


def test_the_parts_of_a_recovery_follow_each_other_and_the_slowest_rank_counts() -> None:
    incident = story()
    assert {part.name: pytest.approx(part.duration_s) for part in incident.parts} == {
        "detect": 0.4,
        "diagnose": 0.2,
        "teardown": 1.0,
        "wait": 0.4,
        "spawn": 0.4,
        "import": 1.0,
        "init": 0.5,
        "restore": 0.5,
        "first_step": 1.0,
    }
    assert incident.recovered_at_s is not None
    assert sum(part.duration_s for part in incident.parts) == pytest.approx(incident.recovered_at_s - incident.since_s)


def test_the_cost_of_an_incident_includes_the_steps_done_again() -> None:
    incident = story()
    assert incident.lost_s == pytest.approx(
        9.4 - 4.0
    )  # from the last progress to the end of step 3, which is done again


def test_the_timeline_tells_the_story_in_order_without_the_exits_that_were_ordered() -> None:
    moments = story().timeline
    assert [moment.at_s for moment in moments] == sorted(moment.at_s for moment in moments)
    told = [moment.sentence for moment in moments]
    for words in (
        "injected: kill on rank 1 after step 3",
        "rank 1 on a ended with signal 9 at step 3",
        "evidence of 0 ranks on a (snapshot 1) in 0.1 s",
        "verdict: (1,) died",
        "rank 1 on a had to be killed",
        "no worker of the attempt lives any more",
        "attempt 2 is started: all are restarted",
        "restored step 2 from checkpoints/2 in 0.5 s",
        "step 3 is finished: the job has recovered",
    ):
        assert words in told
    assert not any("rank 2" in sentence for sentence in told)


def test_evidence_files_are_listed_with_their_incident() -> None:
    assert [file.path for file in story().evidence_files] == ["evidence/a0001-1/stack.txt"]


def test_an_injected_fault_is_matched_and_counts_under_what_it_stands_for() -> None:
    incident = story()
    assert incident.cause == GPU
    assert incident.names_the_injected_rank
    (row,) = interruption_table([incident])
    assert (row.component, row.count, row.share, row.lost_s) == ("Faulty GPU", 1, 1.0, incident.lost_s)
    assert row.llama3_share == 148 / 419


def test_without_an_injected_cause_the_verdicts_own_cause_counts() -> None:
    for before in ([], [inject(4.0, 1, 1, cause=None)]):
        (incident,), _ = fold(*FAILED, *before, record(4.5, 1, verdict(1), since_s=4.0))
        (row,) = interruption_table([incident])
        assert (row.component, row.category, row.llama3_share) == ("Dead Process", "Software", None)


def test_a_verdict_that_names_the_wrong_rank_is_counted_as_found_but_not_as_named() -> None:
    (incident,), accuracy = fold(*FAILED, inject(4.0, 1, 3), record(4.5, 1, verdict(1), since_s=4.0))
    assert incident.injected is not None
    assert not incident.names_the_injected_rank
    assert accuracy == VerdictAccuracy(injected_count=1, found_count=1, named_count=0)


def test_a_fault_that_led_to_no_incident_is_counted_as_injected_only() -> None:
    incidents, accuracy = fold(*FAILED, inject(4.0, 1, 3), start(6.0, 2), record(7.0, 2, verdict(3), since_s=6.0))
    assert incidents[0].injected is None
    assert accuracy == VerdictAccuracy(injected_count=1, found_count=0, named_count=0)


def test_without_injected_faults_there_is_no_accuracy() -> None:
    assert fold(*FAILED) == ((), None)


def test_two_faults_at_once_go_to_the_verdicts_that_name_their_ranks() -> None:
    incidents, accuracy = fold(
        *FAILED,
        inject(4.0, 1, 1),
        inject(4.0, 1, 2, number=2),
        record(4.5, 1, verdict(2), since_s=4.0),
        record(4.6, 1, verdict(1), since_s=4.0, n=2),
    )
    assert [incident.injected.number for incident in incidents if incident.injected] == [2, 1]
    assert accuracy == VerdictAccuracy(injected_count=2, found_count=2, named_count=2)


def test_an_incident_whose_restart_fails_again_has_not_recovered() -> None:
    incidents, _ = fold(
        *FAILED,
        record(4.5, 1, verdict(1), since_s=4.0),
        *end(4.6, 1),
        start(6.0, 2),
        record(8.0, 2, verdict(1), since_s=6.0),
        *end(8.1, 2),
        start(10.0, 3),
        *train(3, [12.0]),
    )
    assert [(i.restarted_at_s, i.recovered_at_s) for i in incidents] == [(6.0, None), (10.0, 12.0)]


def test_the_job_has_recovered_when_its_last_host_has_finished_a_step() -> None:
    *most, last = train(2, [9.0])
    incidents, _ = fold(*FAILED, record(4.5, 1, verdict(1), since_s=4.0), *end(4.6, 1), start(6.0, 2), *most)
    assert incidents[0].recovered_at_s is None
    incidents, _ = fold(*FAILED, record(4.5, 1, verdict(1), since_s=4.0), *end(4.6, 1), start(6.0, 2), *most, last)
    assert incidents[0].recovered_at_s == 9.0


def test_planned_interruptions_are_not_in_the_table_unless_injected_for_a_cause() -> None:
    maintenance = next(row.cause for row in LLAMA3 if row.fault is FaultKind.MAINTENANCE)
    planned = record(4.5, 1, verdict(1), since_s=4.0, planned=True)
    incidents, _ = fold(*FAILED, planned)
    assert interruption_table(incidents) == ()
    incidents, _ = fold(*FAILED, inject(4.0, 1, 1, cause=maintenance), planned)
    assert [row.component for row in interruption_table(incidents)] == ["Host Maintenance"]


def test_the_table_is_sorted_by_count_and_its_shares_sum_to_one() -> None:
    bodies: list[Event | Command] = [started()]
    for attempt, cause in enumerate([GPU, PROCESS, PROCESS, LLAMA3[3].cause], start=1):
        at_s = 10.0 * attempt
        bodies += [start(at_s, attempt), *train(attempt, [at_s + 2.0])]
        bodies += [record(at_s + 3.0, attempt, verdict(1, cause=cause), since_s=at_s + 2.0), *end(at_s + 3.0, attempt)]
    rows = interruption_table(fold(*bodies)[0])
    assert [row.count for row in rows] == [2, 1, 1]
    assert rows[0].component == "Dead Process"
    assert sum(row.share for row in rows) == pytest.approx(1.0)


def test_a_suspicion_that_was_dismissed_is_no_incident_but_opens_the_next_ones_timeline() -> None:
    suspicion = StallSuspected(
        at_s=5.0, attempt=Attempt(1), host=A, phase=Phase.TRAINING, since_s=4.0, deadline_s=0.8, learned_from="20 steps"
    )
    dismissal = DismissSuspicion(
        at_s=5.2, attempt=Attempt(1), host=A, incident=IncidentId("a0001-1"), reason="rank 1 moved", deadline_factor=2.0
    )
    assert fold(*FAILED, suspicion, dismissal)[0] == ()
    (incident,), _ = fold(*FAILED, suspicion, dismissal, record(9.0, 1, verdict(1), since_s=4.0, n=2))
    assert [moment.sentence for moment in incident.timeline][:2] == [
        "no progress on a for 1.0 s while training; 0.8 s were allowed (20 steps)",
        "no hang on a: rank 1 moved",
    ]


def test_a_timeline_is_bounded_and_keeps_room_for_the_recovery() -> None:
    crowd = [exited(4.4, 1, rank) for rank in range(5000)]
    (incident,), _ = fold(*FAILED, *crowd, record(4.5, 1, verdict(1), since_s=4.0), *end(4.6, 1), *RECOVERING)
    assert len(incident.timeline) < TIMELINE_MOMENTS_MAX
    assert incident.timeline[-1].sentence == "step 3 is finished: the job has recovered"
