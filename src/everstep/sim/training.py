"""A synchronous training job without processes: ranks that step together, and stop together when one of them fails.

Knows nothing of hosts, agents or policy; faults come from `cause`.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto

from everstep.domain.causes import FaultKind
from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.domain.progress import Mark

_SIGNALS = {FaultKind.KILL: -9, FaultKind.SEGFAULT: -11, FaultKind.MAINTENANCE: -15}


class Health(Enum):
    """What has become of a simulated rank."""

    WELL = auto()
    FROZEN = auto()
    ASLEEP = auto()
    HOLDING_GIL = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Attributes:
    step_s: median step; each is drawn between 0.9 and 1.3 times this.
    start_s: from the start of the last rank to the first step's begin.
    checkpoint_every: steps between checkpoints; a restart continues at the newest.
    gloo: peers of a dead rank raise at once; False lets them hang as NCCL does.
    """

    steps: int
    step_s: float = 0.05
    start_s: float = 0.3
    checkpoint_every: int = 10
    gloo: bool = True


@dataclass(slots=True)
class SimRank:
    """One rank of one attempt."""

    rank: Rank
    pid: int
    health: Health = Health.WELL
    exit_code: int | None = None
    error: str = ""
    phase: Phase = Phase.STARTING
    step: int = 0
    changed_at_s: float = 0.0
    cpu_s: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def mark(self, at_s: float, *, is_step: bool) -> None:
        self.changed_at_s = at_s
        self.marks.append(Mark(at_s=at_s, rank=self.rank, step=self.step, phase=self.phase, is_step=is_step))


class SimTraining:
    """The job of all hosts. `advance` plays it up to a time.

    Args:
        config: its shape.
        world_size: ranks of the whole job.
        rng: draws the step times.
    """

    def __init__(self, config: TrainingConfig, *, world_size: int, rng: random.Random) -> None:
        self._config = config
        self._world_size = world_size
        self._rng = rng
        self.ranks: dict[Rank, SimRank] = {}
        self._orders: dict[Rank, list[FaultKind]] = defaultdict(list)
        self._next_event_s = 0.0
        self._saved_step = 0
        self._next_pid = 1000

    def begin(self, rank: Rank, at_s: float) -> int:
        """A rank's process starts; gives its pid."""
        self._next_pid += 1
        begun = SimRank(rank=rank, pid=self._next_pid)
        begun.mark(at_s, is_step=False)
        self.ranks[rank] = begun
        self._next_event_s = at_s + self._config.start_s
        return begun.pid

    def end(self, rank: Rank) -> None:
        """A rank's process is ended from outside and forgotten."""
        self.ranks.pop(rank, None)
        self._orders.pop(rank, None)

    def cause(self, rank: Rank, kind: FaultKind, at_s: float) -> None:
        """Signals act at once, the others at the rank's next step."""
        hit = self.ranks[rank]
        if kind in _SIGNALS:
            self._die(hit, _SIGNALS[kind], at_s)
        elif kind is FaultKind.FREEZE:
            hit.health = Health.FROZEN
        else:
            self._orders[rank].append(kind)

    def advance(self, to_s: float) -> None:
        """Play all steps that end before `to_s`."""
        while self._all_there() and self._next_event_s <= to_s:
            at_s = self._next_event_s
            if all(rank.health is Health.WELL for rank in self.ranks.values()):
                self._step(at_s)
            elif any(rank.health is Health.ENDED for rank in self.ranks.values()) and self._config.gloo:
                self._lose_peers(at_s)
            self._next_event_s += self._config.step_s * self._rng.uniform(0.9, 1.3)

    def _all_there(self) -> bool:
        return len(self.ranks) == self._world_size

    def _step(self, at_s: float) -> None:
        done = max(self._saved_step, *(rank.step for rank in self.ranks.values())) + 1
        if done > self._config.steps:
            for rank in self.ranks.values():
                rank.phase = Phase.ENDING
                rank.mark(at_s, is_step=False)
                rank.health, rank.exit_code = Health.ENDED, 0
            return
        for rank in self.ranks.values():
            rank.step, rank.phase = done, Phase.TRAINING
            rank.cpu_s += self._config.step_s
            rank.mark(at_s, is_step=True)
        if done % self._config.checkpoint_every == 0:
            self._saved_step = done
        for number, orders in sorted(self._orders.items()):
            for kind in orders:
                self._obey(self.ranks[number], kind, at_s)
        self._orders.clear()

    def _obey(self, rank: SimRank, kind: FaultKind, at_s: float) -> None:
        match kind:
            case FaultKind.EXCEPTION:
                rank.error = f"ValueError: simulated at {at_s:.3f}"
                self._die(rank, 1, at_s)
            case FaultKind.EXIT:
                self._die(rank, 0, at_s)
            case FaultKind.GIL:
                rank.health = Health.HOLDING_GIL
            case _:
                rank.health = Health.ASLEEP

    def _die(self, rank: SimRank, code: int, at_s: float) -> None:
        if rank.health is not Health.ENDED:
            rank.health, rank.exit_code = Health.ENDED, code

    def _lose_peers(self, at_s: float) -> None:
        for rank in self.ranks.values():
            if rank.health is Health.WELL:
                rank.error = "RuntimeError: [gloo] Connection closed by peer"
                self._die(rank, 1, at_s)
