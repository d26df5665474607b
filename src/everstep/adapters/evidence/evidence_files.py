"""Takes a snapshot of every rank from outside and writes it into the run directory before anybody is killed.

Each source has its own deadline, and what did not answer is itself evidence. Knows nothing of what it means.
"""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.operation_ring import RingView, parse_ring
from everstep.adapters.evidence.recorder_traces import reduce_recorders
from everstep.adapters.evidence.ring_trace import RankFacts, drained_groups, reduce_rings
from everstep.adapters.evidence.stacks import dump_stacks, main_thread
from everstep.adapters.workers.processes import ProcessStat, read_stat, waits_for_lock
from everstep.adapters.workers.roster import Roster, Worker
from everstep.adapters.workers.worker_server import Answer, ask, ask_recorder, group_counts
from everstep.domain.codec import to_json
from everstep.domain.errors import EvidenceError
from everstep.domain.evidence import EvidenceFile, GroupCounts, ProcessState, RankSummary
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.phases import Phase

_PING_S = 0.15
_GIL_S = 0.12
_RECORDER_S = 1.0
_STACKS_S = 0.12
_ASKERS_MAX = 32
_DIGEST_BYTES = 16
_REFRESH = "everstep_refresh"
"""`worker.recorder`'s handler: it runs Python, so it answers only when the GIL is free; then the ring is up to date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """`python` says by its answer whether Python code runs; None when that was not asked."""

    alive: Answer
    python: Answer | None
    recorder: Answer


class EvidenceFiles:
    """The `Evidence` port for one host.

    Args:
        folder: `evidence/` in the run directory.
        host: this host's name.
        roster: whom to look at.
        clock: the run's clock.
        shared: other hosts write into the same folder, so what is not a rank's carries this host's name.
    """

    def __init__(
        self, folder: Path, *, host: HostId, roster: Roster, clock: MonotonicClock, shared: bool = False
    ) -> None:
        self._folder = folder
        self._mark = f".{host}" if shared else ""
        self._host = host
        self._roster = roster
        self._clock = clock
        self._one_at_a_time = threading.Lock()  # a person may ask while the job is being looked into

    def collect(
        self, *, attempt: Attempt, incident: IncidentId, snapshot: int
    ) -> tuple[Sequence[RankSummary], Sequence[EvidenceFile]]:
        """See `ports.Evidence`."""
        with self._one_at_a_time:
            return self._collect(incident, snapshot)

    def _collect(self, incident: IncidentId, snapshot: int) -> tuple[Sequence[RankSummary], Sequence[EvidenceFile]]:
        workers = list(self._roster.workers.values())
        stats = {worker.pid: _stat(worker) for worker in workers}
        able = [w for w in workers if _can_answer(stats[w.pid])]
        with ThreadPoolExecutor(min(_ASKERS_MAX, len(able) + 1), "everstep-evidence") as pool:
            stacks = pool.submit(dump_stacks, {w.pid: w.stacks for w in able if w.page.observed()}, timeout_s=_STACKS_S)
            answers = dict(zip((w.pid for w in able), pool.map(_ask_all, able), strict=True))
        texts = stacks.result()
        rings = {w.rank: w.ring.raw() for w in workers if w.ring is not None}
        recorders = {w.rank: answers[w.pid].recorder.body for w in able if w.pid in answers}
        summaries = [self._summary(w, stats[w.pid], answers.get(w.pid), texts.get(w.pid, "")) for w in workers]
        summaries = self._with_traces(summaries, rings, recorders, {w.rank: w.pid for w in able})
        files: list[EvidenceFile] = []
        folder = self._folder / incident
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for worker in workers:
                files += self._write(folder, worker, snapshot, answers.get(worker.pid), texts.get(worker.pid, ""))
            for rank, ring in rings.items():
                files.append(self._write_one(folder / f"rank-{rank}.{snapshot}.ring", ring))
            files.append(self._write_one(folder / f"snapshot-{snapshot}{self._mark}.json", to_json(summaries)))
        except OSError as error:  # a full disk must not cost the job its recovery; the summaries are in the ledger
            missing = f"files could not be written: {error.strerror}"
            summaries = [replace(summary, missing=(*summary.missing, missing)) for summary in summaries]
        return summaries, files

    def _summary(self, worker: Worker, stat: ProcessStat, answers: _Answers | None, stack: str) -> RankSummary:
        view = worker.page.view_without_marks()
        missing = [] if stack else ["python stack: no answer to the signal"]
        groups: tuple[GroupCounts, ...] = ()
        answers_now = gil_free = None
        if answers is not None:
            groups = group_counts(answers.recorder.body)
            answers_now = not answers.alive.problem
            gil_free = not answers.python.problem if answers_now and answers.python else None
            missing += [a.problem for a in (answers.alive, answers.python, answers.recorder) if a and a.problem]
        return RankSummary(
            rank=worker.rank,
            host=self._host,
            process=stat.state,
            exit_code=worker.exit_code,
            phase=view.phase,
            step=view.step,
            silence_s=max(0.0, self._clock.now_s() - view.changed_at_s),
            cpu_s=stat.cpu_s,
            answers=answers_now,
            gil_free=gil_free,
            stack=main_thread(stack),
            groups=groups,
            missing=tuple(missing),
        )

    def _with_traces(
        self,
        summaries: list[RankSummary],
        rings: dict[Rank, bytes],
        recorders: dict[Rank, bytes],
        living: dict[Rank, int],
    ) -> list[RankSummary]:
        """Add what the rings say, or NCCL's recorder; a ring that makes no sense is said to be missing."""
        views: dict[Rank, RingView] = {}
        facts = {}
        for place, summary in enumerate(summaries):
            rank = summary.rank
            try:
                if rank in rings:
                    views[rank] = parse_ring(rings[rank])
            except EvidenceError as error:
                summaries[place] = replace(summary, missing=(*summary.missing, str(error)))
            stuck = summary.answers and summary.gil_free is False
            facts[rank] = RankFacts(
                process=summary.process,
                exit_code=summary.exit_code,
                stack=summary.stack,
                in_lock=waits_for_lock(living[rank]) if rank in living else None,
                gil_free=summary.gil_free,
                drained=drained_groups([(g.group, g.enqueued, g.completed) for g in summary.groups] if stuck else ()),
            )
        traces, memberships = reduce_rings(self._host, views, facts)
        if not traces:
            traces, memberships = reduce_recorders(self._host, {r: b for r, b in recorders.items() if b}, facts)
        first = min(traces, default=None)
        return [
            replace(summary, trace=traces.get(summary.rank), memberships=memberships if summary.rank == first else ())
            for summary in summaries
        ]

    def _write(
        self, folder: Path, worker: Worker, snapshot: int, answers: _Answers | None, stack: str
    ) -> list[EvidenceFile]:
        name = f"rank-{worker.rank}.{snapshot}"
        files = [self._write_one(folder / f"{name}.page", worker.page.raw())]
        if stack:
            files.append(self._write_one(folder / f"{name}.stacks.txt", stack.encode()))
        if answers is not None and answers.recorder.body:
            files.append(self._write_one(folder / f"{name}.flight_recorder.json", answers.recorder.body))
        return files

    def _write_one(self, path: Path, content: bytes) -> EvidenceFile:
        path.write_bytes(content)
        return EvidenceFile(
            path=str(path.relative_to(self._folder.parent)),
            size_bytes=len(content),
            digest=f"blake2b-128:{hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()}",
        )


def _stat(worker: Worker) -> ProcessStat:
    if worker.exit_code is not None:
        return ProcessStat(state=ProcessState.GONE, cpu_s=0.0)
    return read_stat(worker.pid)


def _can_answer(stat: ProcessStat) -> bool:
    return stat.state in (ProcessState.RUNNING, ProcessState.SLEEPING) and not stat.is_ending


def _ask_all(worker: Worker) -> _Answers:
    path = str(worker.server)
    if not worker.server.exists():
        nothing = Answer(problem="no worker server yet")
        return _Answers(alive=nothing, python=nothing, recorder=nothing)
    alive = ask(path, "ping", timeout_s=_PING_S)
    if alive.problem:
        return _Answers(alive=alive, python=Answer(), recorder=Answer())
    return _Answers(
        alive=alive,
        recorder=ask_recorder(path, timeout_s=_RECORDER_S),
        python=_ask_python(worker, path),
    )


def _ask_python(worker: Worker, path: str) -> Answer | None:
    """Not when the script is at its end: a thread that wants the GIL of an interpreter in teardown aborts it."""
    if worker.page.view_without_marks().phase is Phase.ENDING:
        return None
    answer = ask(path, _REFRESH, timeout_s=_GIL_S)
    return ask(path, "dump_traceback", timeout_s=_GIL_S) if "HTTP" in answer.problem else answer
