"""Where a job's time went: an exact partition of the run's clock into spans with one category each.

A streaming fold over the ledger. One cursor moves over the clock in whole nanoseconds, and every cut gives the time
behind it to one category, so the parts sum to the whole in every run. It knows no files and no reasons.
"""

import copy
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from everstep.domain.commands import Command, FinishJob, RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.events import Event, HostLost, PhaseChanged, RunResumed, RunStarted, StepsFinished, WorkersStopped
from everstep.domain.ids import Attempt, HostId, IncidentId
from everstep.domain.phases import Phase, phase_of_group
from everstep.policy.pace import Pace


class Category(StrEnum):
    """What a second was spent on."""

    PRODUCTIVE = "productive"
    """Steps done for the first time, at the healthy pace. While a run is going, the step under way counts too."""
    REPLAYED = "replayed"
    """Steps that an earlier attempt had finished already."""
    SLOW = "slow"
    """What steps took above the job's own healthy pace (`policy.pace`)."""
    CHECKPOINT = "checkpoint"
    """Ranks stood still to save."""
    DETECTION = "detection"
    """From the last progress to the first sign of a failure; the unfinished step is in it."""
    DIAGNOSIS = "diagnosis"
    TEARDOWN = "teardown"
    WAITING = "waiting"
    """For hosts, or for the backoff; also from the run's start to the first attempt."""
    STARTING = "starting"
    """Processes, imports, groups, model. A plain script's first step is in it, since nothing marks where that began;
    so is all time of workers without an observer (`--no-python`), of which no step is ever seen."""
    RESTORING = "restoring"
    WARMING_UP = "warming_up"
    """An attempt's first step, as far as it took longer than a healthy step: that much of it is work done."""
    EVALUATION = "evaluation"
    MAINTENANCE = "maintenance"
    """All of a planned interruption, up to the next attempt's first step."""
    IDLE = "idle"
    """No coordinator was there, or the script had taken its last step and was ending."""


_OF_PHASE = {
    Phase.UNOBSERVED: Category.STARTING,
    Phase.STARTING: Category.STARTING,
    Phase.RESTORING: Category.RESTORING,
    Phase.WARMING_UP: Category.WARMING_UP,
    Phase.TRAINING: Category.PRODUCTIVE,
    Phase.SAVING: Category.CHECKPOINT,
    Phase.EVALUATING: Category.EVALUATION,
    Phase.ENDING: Category.IDLE,
}
_PLANNED = {
    Category.DETECTION,
    Category.DIAGNOSIS,
    Category.TEARDOWN,
    Category.WAITING,
    Category.STARTING,
    Category.RESTORING,
}
"""Becomes MAINTENANCE when the interruption was planned."""
_LOST = _PLANNED | {Category.WARMING_UP, Category.MAINTENANCE, Category.REPLAYED}
"""What an incident costs, from its last progress on."""
_ENDED_BY_A_STEP = {Category.WAITING, Category.STARTING, Category.RESTORING, Category.MAINTENANCE}
"""When a step ends in one of these, the workers had gone on to train without a word."""
_INTERRUPTS = {Category.TEARDOWN, Category.WAITING, Category.MAINTENANCE, Category.STARTING}
_LATENESS_NS = 6_000_000_000
"""News of a step may come this long after it: agents send steps in batches every 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    category: Category
    duration_ns: int

    @property
    def duration_s(self) -> float:
        return self.duration_ns / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one incident cost: all from the last progress to the next attempt's first step, and the replayed steps."""

    incident: IncidentId
    duration_ns: int

    @property
    def duration_s(self) -> float:
        return self.duration_ns / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of one run up to its last entry.

    Attributes:
        parts: one per category, in the order of `Category`; together they are the whole time.
        step_count: steps done for the first time; `replayed_step_count` of them were done again.
        last_step: the highest step that any attempt finished; 0 before the first.
        healthy_step_s: the job's own healthy step; None before it is known.
        has_ended: whether the ledger has an end; else the run is still going or was cut off.
    """

    parts: tuple[Part, ...]
    losses: tuple[Loss, ...]
    attempt_count: int
    step_count: int
    replayed_step_count: int
    last_step: int
    healthy_step_s: float | None
    has_ended: bool

    @property
    def elapsed_s(self) -> float:
        return sum(part.duration_ns for part in self.parts) / 1e9

    @property
    def effective_share(self) -> float:
        """Effective training time: productive ÷ elapsed; 0 for a run without time."""
        return effective_share(self.parts)

    def spent_s(self, category: Category) -> float:
        return sum(part.duration_ns for part in self.parts if part.category is category) / 1e9

    def lost_s(self, incident: IncidentId) -> float:
        return sum(loss.duration_ns for loss in self.losses if loss.incident == incident) / 1e9


def effective_share(parts: Iterable[Part]) -> float:
    parts = tuple(parts)
    elapsed_ns = sum(part.duration_ns for part in parts)
    productive_ns = sum(part.duration_ns for part in parts if part.category is Category.PRODUCTIVE)
    return productive_ns / elapsed_ns if elapsed_ns else 0.0


def total_parts(accounts: Iterable[Account]) -> tuple[Part, ...]:
    """The parts of many runs together, so that their effective share is weighted by time."""
    sums: Counter[Category] = Counter()
    for account in accounts:
        sums.update({part.category: part.duration_ns for part in account.parts})
    return tuple(Part(category=category, duration_ns=sums[category]) for category in Category)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """From `at_ns` on, time is `category`. A failure's mark names its incident and since when nothing had moved."""

    at_ns: int
    category: Category
    since_ns: int | None = None
    incident: IncidentId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstStep:
    duration_ns: int
    is_replayed: bool
    incident: IncidentId | None


class Accountant:
    """Folds events and commands into an `Account`; `account` may be called at any time and changes nothing.

    News of a step may be up to 6 s late, so what follows it (marks) waits as long before it is applied. Whatever comes
    later still is clamped to the cursor: no order of entries gives a negative span.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._has_ended = False
        self._cursor_ns = 0
        self._latest_ns = 0
        self._category = Category.WAITING
        """What the time behind the cursor is, unless a step ends there. PRODUCTIVE stands for steps of every kind."""
        self._marks: list[_Mark] = []
        self._spent_ns: Counter[Category] = Counter()
        self._lost_ns: Counter[IncidentId] = Counter()
        self._incident: IncidentId | None = None
        self._open_ns = 0
        """Time of the step under way that lies before the cursor, since another phase came between."""
        self._pace = Pace()
        self._first_steps: list[_FirstStep] = []
        self._attempt = Attempt(0)
        self._attempt_count = 0
        self._has_failed = False
        self._has_verdict = False
        self._is_planned = False
        self._is_first = True
        self._replayed_until = 0
        self._last_step = 0
        self._step_count = 0
        self._replayed_step_count = 0
        self._phases: dict[HostId, Phase] = {}
        self._phase_counts: Counter[Phase] = Counter()
        self._running: set[HostId] = set()
        self._reports: dict[int, tuple[int, int]] = {}
        """With several hosts: for a step that some have reported, how many, and the latest end."""

    def handle(self, body: Event | Command) -> None:
        """Take the next entry of the ledger."""
        at_ns = int(body.at_s * 1e9)
        if not self._has_begun:
            self._has_begun, self._cursor_ns, self._latest_ns = True, at_ns, at_ns
        if self._has_ended and not isinstance(body, RunResumed):
            return
        self._latest_ns = max(self._latest_ns, at_ns)
        if self._marks:
            self._apply_marks(self._latest_ns - _LATENESS_NS)
        match body:
            case StepsFinished():
                if body.attempt == self._attempt and body.host in self._phases:
                    self._take_steps(body)
            case PhaseChanged():
                if body.attempt == self._attempt and body.host in self._phases and not self._has_failed:
                    self._change_phase(body.host, body.phase, at_ns)
            case RecordVerdict() if body.attempt == self._attempt:
                self._fail(body)
            case StopWorkers() if body.attempt == self._attempt:
                self._has_failed = True
                self._mark(at_ns, Category.TEARDOWN)
            case WorkersStopped() if body.attempt == self._attempt:
                self._leave(body.host, at_ns)
            case HostLost():
                self._leave(body.host, at_ns)
            case StartWorkers():
                self._start(body, at_ns)
            case RunStarted():
                self._category = Category.WAITING
            case RunResumed():
                self._resume(at_ns, int(body.gap_s * 1e9))
            case FinishJob():
                self._close(is_over=True)
                self._has_ended = True

    def account(self) -> Account:
        """The account up to the latest entry."""
        last = copy.copy(self)
        last._marks = list(self._marks)
        last._spent_ns = Counter(self._spent_ns)
        last._lost_ns = Counter(self._lost_ns)
        if not self._has_ended:
            last._close(is_over=False)
        split = self._pace.split()
        last._spent_ns[Category.PRODUCTIVE] += split.productive_ns
        last._spent_ns[Category.SLOW] += split.slow_ns
        for step in self._first_steps:
            last._split_first_step(step, split.healthy_step_ns or 0)
        return Account(
            parts=tuple(Part(category=category, duration_ns=last._spent_ns[category]) for category in Category),
            losses=tuple(Loss(incident=incident, duration_ns=lost) for incident, lost in last._lost_ns.items()),
            attempt_count=self._attempt_count,
            step_count=self._step_count,
            replayed_step_count=self._replayed_step_count,
            last_step=self._last_step,
            healthy_step_s=None if split.healthy_step_ns is None else split.healthy_step_ns / 1e9,
            has_ended=self._has_ended,
        )

    # The cursor: these alone move it or give time to a category.

    def _move(self, end_ns: int) -> int:
        """Move the cursor to `end_ns`, never back, and return the time between; the caller gives it to one category."""
        moved_ns = max(0, end_ns - self._cursor_ns)
        self._cursor_ns += moved_ns
        return moved_ns

    def _spend(self, category: Category, duration_ns: int) -> None:
        self._spent_ns[category] += duration_ns
        if self._incident is not None and category in _LOST:
            self._lost_ns[self._incident] += duration_ns

    def _apply_marks(self, until_ns: int) -> None:
        while self._marks and self._marks[0].at_ns <= until_ns:
            self._apply(self._marks.pop(0))

    def _apply(self, mark: _Mark) -> None:
        """Cut at the mark. An unfinished step goes on after a mere phase, and is lost to what interrupts it."""
        before, after = self._category, mark.category
        if mark.since_ns is not None and before in {Category.TEARDOWN, Category.WAITING}:
            self._incident = mark.incident  # a verdict that came after the stop
            return
        if mark.since_ns is not None:
            if before is not Category.PRODUCTIVE:
                self._spend(before, self._move(min(mark.since_ns, mark.at_ns)))
            self._incident = mark.incident
            silence = Category.MAINTENANCE if after is Category.MAINTENANCE else Category.DETECTION
            self._spend(silence, self._take_open_ns() + self._move(mark.at_ns))
        elif before is not Category.PRODUCTIVE:
            self._spend(before, self._move(mark.at_ns))
        elif after in _INTERRUPTS:
            self._spend(after, self._take_open_ns() + self._move(mark.at_ns))
        else:
            self._open_ns += self._move(mark.at_ns)
        self._category = after

    def _take_open_ns(self) -> int:
        open_ns, self._open_ns = self._open_ns, 0
        return open_ns

    def _close(self, *, is_over: bool) -> None:
        """Close all spans at the latest entry. A step under way is work while the run is going, and not after."""
        self._apply_marks(self._latest_ns)
        category = self._category
        if category is Category.PRODUCTIVE and is_over:
            category = Category.IDLE
        elif category is Category.PRODUCTIVE and self._last_step < self._replayed_until:
            category = Category.REPLAYED
        self._spend(category, self._take_open_ns() + self._move(self._latest_ns))

    def _split_first_step(self, step: _FirstStep, healthy_ns: int) -> None:
        work_ns = min(step.duration_ns, healthy_ns)
        self._incident = step.incident
        self._spend(Category.REPLAYED if step.is_replayed else Category.PRODUCTIVE, work_ns)
        self._spend(Category.WARMING_UP, step.duration_ns - work_ns)

    # What the entries mean.

    def _mark(self, at_ns: int, category: Category) -> None:
        if self._is_planned and category in _PLANNED:
            category = Category.MAINTENANCE
        if category is not (self._marks[-1].category if self._marks else self._category):
            insort(self._marks, _Mark(at_ns=at_ns, category=category), key=lambda mark: mark.at_ns)

    def _fail(self, body: RecordVerdict) -> None:
        if self._has_verdict:
            return  # the attempt is ending already; a second verdict about it costs no second of its own
        self._has_verdict, self._has_failed, self._is_planned = True, True, body.planned
        mark = _Mark(
            at_ns=int(body.detected_at_s * 1e9),
            category=Category.MAINTENANCE if body.planned else Category.DIAGNOSIS,
            since_ns=int(body.since_s * 1e9),
            incident=body.incident,
        )
        insort(self._marks, mark, key=lambda mark: mark.at_ns)

    def _leave(self, host: HostId, at_ns: int) -> None:
        """The host has no workers any more; with the last one, teardown is over."""
        if host in self._running:
            self._running.discard(host)
            if not self._running and self._has_failed:
                self._mark(at_ns, Category.WAITING)

    def _start(self, body: StartWorkers, at_ns: int) -> None:
        self._apply_marks(self._latest_ns)
        self._marks.clear()
        self._apply(
            _Mark(at_ns=at_ns, category=Category.MAINTENANCE if self._is_planned else Category.STARTING)
        )  # at once: news of older attempts is fenced from here on
        self._pace.end_window()
        self._attempt, self._attempt_count = body.attempt, self._attempt_count + 1
        self._has_failed, self._has_verdict, self._is_first = False, False, True
        self._replayed_until = self._last_step
        self._phases = {share.host: Phase.STARTING for share in body.shares}
        self._phase_counts = Counter(self._phases.values())
        self._running = set(self._phases)
        self._reports.clear()

    def _resume(self, at_ns: int, gap_ns: int) -> None:
        self._apply_marks(self._latest_ns)
        if self._has_ended or self._category is Category.PRODUCTIVE:
            self._category = Category.IDLE
            self._spend(Category.IDLE, self._take_open_ns())
        self._spend(self._category, self._move(at_ns - gap_ns))
        self._spend(Category.IDLE, self._move(at_ns))
        self._category, self._has_ended, self._incident = Category.WAITING, False, None

    def _change_phase(self, host: HostId, phase: Phase, at_ns: int) -> None:
        if phase is Phase.UNOBSERVED and not self._is_first:
            return  # it has trained: its page is gone, it did not go back to the start
        self._phase_counts[self._phases[host]] -= 1
        self._phase_counts[phase] += 1
        self._phases[host] = phase
        together = phase_of_group([phase for phase, count in self._phase_counts.items() if count])
        category = _OF_PHASE[together]
        if category in {Category.WARMING_UP, Category.PRODUCTIVE}:
            self._is_planned = False
        self._mark(at_ns, category)

    def _take_steps(self, body: StepsFinished) -> None:
        ends_ns = [int(end_s * 1e9) for end_s in body.ended_at_s]
        if len(self._phases) == 1:
            self._end_steps(body.first_step, ends_ns)
            return
        for number, end_ns in enumerate(ends_ns, start=body.first_step):
            count, latest_ns = self._reports.get(number, (0, 0))
            if count + 1 < len(self._phases):
                self._reports[number] = (count + 1, max(end_ns, latest_ns))
            else:
                self._reports.pop(number, None)
                self._end_steps(number, [max(end_ns, latest_ns)])

    def _end_steps(self, first: int, ends_ns: list[int]) -> None:
        """Steps have ended on every rank of the job."""
        is_plain = self._category is Category.PRODUCTIVE and not (self._marks or self._is_first or self._open_ns)
        if is_plain and first > self._replayed_until:
            durations_ns = [end_ns - begin_ns for begin_ns, end_ns in pairwise((self._cursor_ns, *ends_ns))]
            if min(durations_ns, default=0) > 0:  # nearly all steps of a long run come by here
                self._cursor_ns = ends_ns[-1]
                self._pace.add(durations_ns)
                self._step_count += len(ends_ns)
                self._last_step = max(self._last_step, first + len(ends_ns) - 1)
                return
        for number, end_ns in enumerate(ends_ns, start=first):
            self._apply_marks(end_ns)
            self._end_step(number, end_ns)

    def _end_step(self, number: int, end_ns: int) -> None:
        is_replayed = number <= self._replayed_until
        if self._category in _ENDED_BY_A_STEP and not self._has_failed:
            self._spend(self._category, self._move(end_ns))
            self._category, self._is_planned = Category.PRODUCTIVE, False
        elif self._category is Category.WARMING_UP or self._category is Category.PRODUCTIVE:
            self._count_time(self._take_open_ns() + self._move(end_ns), is_replayed=is_replayed)
            self._category = Category.PRODUCTIVE
        else:  # another rank had gone on to save, evaluate or end already, or it has failed: the time is accounted for
            self._count_time(self._take_open_ns(), is_replayed=is_replayed)
        self._is_first = False
        if is_replayed:
            self._replayed_step_count += 1
        else:
            self._step_count += 1
        self._last_step = max(self._last_step, number)

    def _count_time(self, duration_ns: int, *, is_replayed: bool) -> None:
        """Give a finished step its time."""
        if self._is_first:
            step = _FirstStep(duration_ns=duration_ns, is_replayed=is_replayed, incident=self._incident)
            self._first_steps.append(step)
        elif is_replayed:
            self._spend(Category.REPLAYED, duration_ns)
        elif duration_ns:
            self._pace.add([duration_ns])
