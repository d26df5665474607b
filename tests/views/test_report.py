"""The report as data, text, JSON and CSV, from the ledger of a small run that loses a rank and recovers."""

import csv
import io
import json
from collections.abc import Iterable

import pytest

from everstep.domain.causes import LLAMA3, FaultKind
from everstep.domain.codec import Entry
from everstep.domain.commands import Command, FinishJob, HostShare, RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.errors import EvidenceError, ExitCode
from everstep.domain.events import (
    Event,
    EvidenceCollected,
    FaultInjected,
    PhaseChanged,
    RunResumed,
    RunStarted,
    StepsFinished,
    WorkersStopped,
)
from everstep.domain.evidence import EvidenceFile
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.views.report import Report, RunFold, RunReport
from everstep.views.report_tables import incident_json, report_csv, report_json
from everstep.views.report_text import duration, incident_lines, percent, report_lines, size

HOST = HostId("host-0")
WALL = "2026-11-30T05:44:{:02}.000Z"


def verdict() -> Verdict:
    return Verdict(
        trouble=Trouble.DEAD,
        ranks=(Rank(1),),
        hosts=(HOST,),
        reason="rank 1 on host-0 was killed by signal 9 after step 10",
        evidence=("the kernel says so",),
        where="train.py:40 in step",
        cause=LLAMA3[0].cause,
        signature="dead:1",
    )


def attempt(number: int, at_s: float, first: int, count: int) -> list[Event | Command]:
    share = HostShare(host=HOST, first_rank=Rank(0), count=2)
    ends_s = tuple(at_s + 2.0 + i for i in range(count))
    return [
        StartWorkers(at_s=at_s, attempt=Attempt(number), shares=(share,), world_size=2, restart_count=number - 1,
                     faults=(), rung=None, why="all are restarted" if number > 1 else ""),
        PhaseChanged(at_s=at_s + 1.0, attempt=Attempt(number), host=HOST, phase=Phase.TRAINING, step=0),
        StepsFinished(at_s=ends_s[-1], attempt=Attempt(number), host=HOST, first_step=first, ended_at_s=ends_s),
    ]  # fmt: skip


def failure(number: int, since_s: float) -> list[Event | Command]:
    fault = PlannedFault(number=1, kind=FaultKind.KILL, rank=Rank(1), step=10, cause=LLAMA3[1].cause)
    incident = IncidentId(f"a{number:04}-1")
    file = EvidenceFile(path=f"evidence/{incident}/stacks.txt", size_bytes=1234, digest="blake2b-128:00")
    return [
        FaultInjected(at_s=since_s, attempt=Attempt(number), fault=fault, step=10),
        RecordVerdict(at_s=since_s + 0.5, attempt=Attempt(number), incident=incident, verdict=verdict(),
                      since_s=since_s, detected_at_s=since_s + 0.25, step=10),
        EvidenceCollected(at_s=since_s + 0.5, attempt=Attempt(number), host=HOST, incident=incident, snapshot=1,
                          summaries=(), files=(file,), took_s=0.1),
        StopWorkers(at_s=since_s + 0.5, attempt=Attempt(number), host=HOST, kill_ranks=(), grace_s=1.0),
        WorkersStopped(at_s=since_s + 1.0, attempt=Attempt(number), host=HOST, killed=()),
    ]  # fmt: skip


STARTED = RunStarted(
    at_s=0.0, run=RunId("7f3a"), everstep="0.1.0", command=("train.py", "--lr", "1"), world_size=2, host_count=1
)
END = FinishJob(at_s=24.0, exit_code=ExitCode.DONE, rung=None, summary="the script is done")
STORY: list[Event | Command] = [STARTED, *attempt(1, 0.0, 1, 10), *failure(1, 11.0), *attempt(2, 13.0, 9, 10), END]


def run(bodies: Iterable[Event | Command], name: str = "runs/one") -> RunReport:
    fold = RunFold(name)
    fold.take_all(
        Entry(number=number, wall=WALL.format(number % 60), body=body) for number, body in enumerate(bodies, start=1)
    )
    return fold.report()


def many_failures(count: int) -> list[Event | Command]:
    bodies: list[Event | Command] = [STARTED]
    for number in range(1, count + 1):
        bodies += [*attempt(number, 20.0 * number, 1, 10), *failure(number, 20.0 * number + 11.0)]
    return bodies


ONE = Report(runs=(run(STORY),))
TWO = Report(runs=(run(STORY, "runs/one"), run([STARTED, *attempt(1, 0.0, 1, 20)], "runs/two")))


def test_the_headline_is_the_effective_training_time() -> None:
    lines = report_lines(ONE)
    assert "EFFECTIVE TRAINING TIME  75.0 %   18.0 s productive of 24.0 s" in lines
    assert "ended with code 0 (done): the script is done" in lines
    assert any(
        line.startswith("18 steps, the last one 18; 2 done again; healthy step 1.0 s; 2 attempts") for line in lines
    )


def test_the_parts_in_the_text_are_those_of_the_account_and_sum_to_the_whole() -> None:
    rows = [" ".join(line.split()) for line in report_lines(ONE)]
    bar = "█" * 24
    assert f"productive 75.0 % 18.0 s {bar} steps done for the first time, at the job's healthy pace" in rows
    assert "total 100.0 % 24.0 s" in rows
    account = ONE.runs[0].account
    assert sum(part.duration_ns for part in account.parts) == 24_000_000_000
    assert not any(row.startswith("evaluation") for row in rows)  # no empty rows


def test_the_interruption_table_stands_beside_llama_3() -> None:
    text = "\n".join(report_lines(ONE))
    assert "Unexpected interruptions: 1" in text
    rows = [" ".join(line.split()) for line in report_lines(ONE)]
    assert "GPU HBM3 Memory GPU 1 100.0 % 17.2 % 5.0 s" in rows
    assert "arXiv 2407.21783" in text
    assert "Verdicts: 1 of 1 injected fault was traced to the injected rank." in text


def test_an_incident_shows_verdict_where_facts_recovery_evidence_and_timeline() -> None:
    lines = incident_lines(ONE.runs[0].incidents[0])
    assert lines[0] == "a0001-1  GPU HBM3 Memory (GPU): dead after step 10, at 11.2 s; lost 5.0 s"
    assert lines[1:6] == [
        "  rank 1 on host-0 was killed by signal 9 after step 10",
        "  where: train.py:40 in step",
        "  because the kernel says so",
        "  injected: kill on rank 1, and the verdict names it",
        "  recovery: all are restarted",
    ]
    assert "  detect 250 ms · diagnose 250 ms · teardown 500 ms · wait 1.0 s · spawn 0 ms · first step 2.0 s" in lines
    assert "  evidence: evidence/a0001-1/ (1 file, 1 kB)" in lines
    assert lines[-1] == "       +3.75 s  step 9 is finished: the job has recovered"


def test_many_incidents_are_listed_in_short_with_the_way_to_one_of_them() -> None:
    lines = report_lines(Report(runs=(run(many_failures(7)),)))
    assert sum(line.startswith("a000") for line in lines) == 7
    assert not any(line.startswith("  where:") for line in lines)
    assert lines[-1] == "Timeline and evidence of one: everstep report runs/one --incident a0007-1"


def test_a_run_that_is_still_going_says_so() -> None:
    lines = report_lines(Report(runs=(run(STORY[:-1]),)))
    assert any(line.startswith("still running, or cut off: no end in the ledger") for line in lines)


def test_a_run_that_was_resumed_after_its_end_is_going_again() -> None:
    assert run([*STORY, RunResumed(at_s=30.0, gap_s=5.0, command=())]).end is None


def test_a_run_without_a_step_says_that_productive_time_is_unknown() -> None:
    text = "\n".join(report_lines(Report(runs=(run([STARTED, END]),))))
    assert "EFFECTIVE TRAINING TIME  0.0 %" in text
    assert "No step was seen" in text
    assert "--no-python" in text


def test_many_runs_are_a_table_with_a_weighted_total() -> None:
    lines = report_lines(TWO)
    assert TWO.elapsed_s == pytest.approx(24.0 + 21.0)
    assert TWO.effective_share == pytest.approx((18.0 + 20.0) / 45.0)
    (total,) = [line for line in lines if line.startswith("total ")]
    assert total.split() == ["total", "45.0", "s", "84.4", "%", "38", "1", "5.0", "s"]
    assert any(line.startswith("runs/two") and line.endswith("no end yet") for line in lines)
    assert "Unexpected interruptions: 1" in lines


def test_json_keys_carry_their_units_and_its_parts_sum_to_the_elapsed_time() -> None:
    document = json.loads(report_json(TWO))
    assert document["format"] == 1
    first, second = document["runs"]
    assert (first["name"], first["run"], first["state"], first["exit_code"]) == ("runs/one", "7f3a", "ended", 0)
    assert (second["state"], second["exit_code"], second["verdicts"]) == ("open", None, None)
    assert sum(first["parts_s"].values()) == pytest.approx(first["elapsed_s"])
    assert first["effective_training_share"] == 0.75
    assert first["verdicts"] == {"injected_count": 1, "found_count": 1, "named_count": 1}
    (incident,) = first["incidents"]
    assert (incident["id"], incident["ranks"], incident["lost_s"]) == ("a0001-1", [1], 5.0)
    assert sum(part["duration_s"] for part in incident["parts"]) == incident["recovered_at_s"] - incident["since_at_s"]
    assert document["total"]["run_count"] == 2
    assert json.loads(incident_json(ONE.runs[0].incidents[0])) == incident


def test_csv_has_one_row_per_run_incident_or_cause() -> None:
    def rows(table: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(report_csv(TWO, table))))

    first, second = rows("runs")
    assert (first["name"], first["elapsed_s"], first["productive_s"], first["replayed_s"]) == (
        "runs/one",
        "24.0",
        "18.0",
        "2.0",
    )
    assert (second["exit_code"], second["incident_count"]) == ("", "0")
    (incident,) = rows("incidents")
    assert (incident["run_name"], incident["id"], incident["ranks"]) == ("runs/one", "a0001-1", "1")
    (cause,) = rows("interruptions")
    assert (cause["component"], cause["count"]) == ("GPU HBM3 Memory", "1")


def test_a_ledger_without_a_start_or_without_entries_is_refused_by_name() -> None:
    with pytest.raises(EvidenceError, match=r"runs/one: the ledger is empty"):
        run([])
    with pytest.raises(EvidenceError, match=r"runs/one: the ledger begins with FinishJob, not RunStarted"):
        run([END])


def test_durations_shares_and_sizes_read_well() -> None:
    seconds = [0.0, 0.0124, 0.9996, 59.94, 59.96, 754, 3599.7, 11_520, 86_399, 190_000]
    assert [duration(s) for s in seconds] == [
        "0 ms", "12 ms", "1.0 s", "59.9 s", "1 min 0 s", "12 min 34 s", "1 h 0 min", "3 h 12 min", "1 d 0 h", "2 d 5 h",
    ]  # fmt: skip
    assert [percent(share) for share in (0.0, 0.0001, 0.357, 1.0)] == ["0.0 %", "<0.1 %", "35.7 %", "100.0 %"]
    assert [size(count) for count in (12, 1234, 5_000_000, 7_000_000_000)] == ["12 B", "1 kB", "5 MB", "7 GB"]
