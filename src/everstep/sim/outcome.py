"""What a simulated run came to: a streaming fold over its ledger, small enough to be sent between processes.

The time comes from `policy.accounting`, the same account that `everstep report` gives; it keeps no ledger.
"""

from collections import Counter
from dataclasses import dataclass

from everstep.domain.commands import Command, FinishJob, RecordVerdict, ReplaceHost, StartWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointSaved, Event, FaultInjected
from everstep.policy.accounting import Accountant, Category, Part
from everstep.sim.power import Power, power_of
from everstep.sim.scenario import Scenario

_WORK = (Category.PRODUCTIVE, Category.REPLAYED, Category.SLOW, Category.WARMING_UP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run.

    Attributes:
        effective_share: productive ÷ elapsed.
        available_share: the part of the time in which the job had its hosts: all but waiting for them.
        causes: unexpected interruptions by component, most frequent first.
        named_count: of them, those whose rank a verdict named.
        ended_early: the policy gave the job up before the end of the simulated time, with `summary`.
    """

    scenario: str
    seed: int
    effective_share: float
    available_share: float
    elapsed_s: float
    parts: tuple[Part, ...]
    unexpected_count: int
    planned_count: int
    attempt_count: int
    replaced_count: int
    checkpoint_count: int
    named_count: int
    causes: tuple[tuple[str, int], ...]
    power: Power
    ended_early: bool
    summary: str

    @property
    def lost_per_interruption_s(self) -> float:
        """All unproductive time, for each interruption of either kind."""
        count = self.unexpected_count + self.planned_count
        return self.elapsed_s * (1 - self.effective_share) / count if count else 0.0

    def spent_s(self, category: Category) -> float:
        return sum(part.duration_s for part in self.parts if part.category is category)


class OutcomeFold:
    """Hears every entry; `outcome` at the end."""

    def __init__(self, scenario: Scenario, *, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        self._accountant = Accountant()
        self._causes: Counter[str] = Counter()
        self._injected: dict[int, set[int]] = {}
        self._planned = self._attempts = self._replaced = self._checkpoints = self._named = 0
        self._end: FinishJob | None = None

    def hear(self, body: Event | Command) -> None:
        self._accountant.handle(body)
        match body:
            case FaultInjected():
                assert body.fault.cause is not None
                self._causes[body.fault.cause.component] += 1
                self._injected.setdefault(body.attempt, set()).add(body.fault.rank)
            case RecordVerdict():
                injected = self._injected.pop(body.attempt, set())
                self._named += bool(injected & set(body.verdict.ranks))
                self._planned += body.planned and not injected
            case StartWorkers():
                self._attempts += 1
            case ReplaceHost():
                self._replaced += 1
            case CheckpointSaved():
                self._checkpoints += 1
            case FinishJob():
                self._end = body

    def outcome(self) -> Outcome:
        one, account = self._scenario, self._accountant.account()
        waiting_s = account.spent_s(Category.WAITING)
        interruptions = self._attempts - 1
        return Outcome(
            scenario=one.name,
            seed=self._seed,
            effective_share=account.effective_share,
            available_share=1 - waiting_s / account.elapsed_s if account.elapsed_s else 0.0,
            elapsed_s=account.elapsed_s,
            parts=account.parts,
            unexpected_count=self._causes.total(),
            planned_count=self._planned,
            attempt_count=self._attempts,
            replaced_count=self._replaced,
            checkpoint_count=self._checkpoints,
            named_count=self._named,
            causes=tuple(sorted(self._causes.items(), key=lambda item: (-item[1], item[0]))),
            power=power_of(
                gpus=one.gpus,
                gpu_watts=one.gpu_watts,
                idle_share=one.idle_share,
                working_s=sum(account.spent_s(category) for category in _WORK),
                elapsed_s=account.elapsed_s,
                stall_count=interruptions + self._checkpoints,
            ),
            ended_early=self._end is None or self._end.exit_code is not ExitCode.PREEMPTED,
            summary="" if self._end is None else self._end.summary,
        )
