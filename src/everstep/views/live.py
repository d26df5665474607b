"""A run as it goes, for people who watch: a fold over the ledger into numbers and sentences. It knows no terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.commands import Command, FinishJob, RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import (
    CheckpointDelayed,
    CheckpointFailed,
    Event,
    FaultInjected,
    PhaseChanged,
    StallSuspected,
    StepsFinished,
    WorkerExited,
)
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt
from everstep.policy.accounting import Accountant

_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """One failure of the run and how it was overcome.

    Attributes:
        injected: the fault behind it; None for a real failure.
        verdict: its class and the ranks that are named.
        found_s: from the last progress to the verdict.
        recovered_s: from the last progress to the next attempt's first step; None while that has not come.
    """

    injected: PlannedFault | None
    verdict: str
    step: int
    found_s: float
    recovered_s: float | None = None

    @property
    def what(self) -> str:
        if self.injected is None:
            return "a real failure"
        cause = self.injected.cause
        standing_for = f" for {cause.component}" if cause else ""
        return f"{self.injected.kind} on rank {self.injected.rank}{standing_for}"


class LiveRun:
    """The fold. `hear` takes the next entry and gives sentences about it; the attributes are for a picture.

    Args:
        until: the step at which the run is done.
        fault_count: how many faults are planned.
    """

    def __init__(self, *, until: int, fault_count: int) -> None:
        self.until = until
        self.fault_count = fault_count
        self.injected_count = 0
        self.step = 0
        self.loss: float | None = None
        self.attempt = Attempt(0)
        self.state = "warming up the standby"
        self.elapsed_s = 0.0
        self.setbacks: list[Setback] = []
        self._losses: dict[int, float] = {}
        self._accountant = Accountant()
        self._injected: PlannedFault | None = None
        self._since_s: float | None = None

    @property
    def losses(self) -> list[float]:
        """The losses that were reported, by step."""
        return [self._losses[step] for step in sorted(self._losses)]

    @property
    def recovered_count(self) -> int:
        return sum(setback.recovered_s is not None for setback in self.setbacks)

    def effective_share(self) -> float:
        return self._accountant.account().effective_share

    def summary(self) -> str:
        """Where the run is, in one line."""
        loss = "" if self.loss is None else f", loss {self.loss:.3f}"
        faults = f", {self.injected_count} of {self.fault_count} faults injected" if self.fault_count else ""
        return f"step {self.step} of {self.until}{loss}{faults}, effective training time {self.effective_share():.0%}"

    def hear(self, body: Event | Command) -> tuple[str, ...]:
        """Take an entry of the ledger."""
        self._accountant.handle(body)
        self.elapsed_s = max(self.elapsed_s, body.at_s)
        match body:
            case StartWorkers():
                self.attempt = body.attempt
                self._injected = None
                self.state = "starting workers"
            case PhaseChanged():
                self.state = body.phase.name.lower().replace("_", " ")
            case StepsFinished():
                return self._take_steps(body)
            case FaultInjected():
                return self._inject(body)
            case WorkerExited() if body.exit_code != 0:
                self.state = "a worker died; taking evidence"
            case CheckpointFailed():
                return (f"the save of step {body.step} failed: {body.reason}",)
            case CheckpointDelayed():
                return (body.sentence,)
            case StallSuspected():
                self.state = "no rank moves; taking evidence"
            case RecordVerdict():
                return self._record(body)
            case StopWorkers():
                self.state = "stopping workers"
            case FinishJob():
                self.state = "done" if body.exit_code is ExitCode.DONE else "ended"
                return (f"{self.state}: {body.summary}",)
        return ()

    def _take_steps(self, body: StepsFinished) -> tuple[str, ...]:
        self.step = body.last_step
        if self.state != "saving":
            self.state = "training"
        if body.loss is not None:
            self.loss = self._losses[body.last_step] = body.loss
        if self._since_s is None:
            return ()
        last = self.setbacks[-1]
        recovered_s = body.ended_at_s[0] - self._since_s
        self._since_s = None
        self.setbacks[-1] = Setback(
            injected=last.injected,
            verdict=last.verdict,
            step=last.step,
            found_s=last.found_s,
            recovered_s=recovered_s,
        )
        return (f"recovered: training again at step {body.first_step}, {recovered_s:.1f} s after the last progress",)

    def _inject(self, body: FaultInjected) -> tuple[str, ...]:
        fault = self._injected = body.fault
        self.injected_count += 1
        cause = f", standing for {fault.cause.component} ({fault.cause.category})" if fault.cause else ""
        of = f" of {self.fault_count}" if self.fault_count else ""
        return (f"fault {self.injected_count}{of}: {fault.kind} on rank {fault.rank} at step {body.step}{cause}",)

    def _record(self, body: RecordVerdict) -> tuple[str, ...]:
        verdict, found_s = body.verdict, body.at_s - body.since_s
        named = f", {'rank' if len(verdict.ranks) == 1 else 'ranks'} {', '.join(map(str, verdict.ranks))}"
        words = verdict.trouble.replace("_", " ") + (named if verdict.ranks else "")
        self.setbacks.append(Setback(injected=self._injected, verdict=words, step=body.step, found_s=found_s))
        self._since_s = body.since_s
        return (f"found in {found_s:.1f} s: {verdict.reason}",)


def sparkline(values: Sequence[float], *, cells: int) -> str:
    """The course of values in at most `cells` characters, each the mean of its share; the highest is a full block."""
    if not values:
        return ""
    cells = min(cells, len(values))
    means = []
    for cell in range(cells):
        share = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        means.append(sum(share) / len(share))
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] for mean in means)
