"""A simulated host behind the `Workers`, `Pages` and `Evidence` ports: its ranks of a `SimTraining`."""

from collections.abc import Sequence

from everstep.domain.causes import FaultKind
from everstep.domain.commands import StartWorkers
from everstep.domain.events import Event
from everstep.domain.evidence import EvidenceFile, Frame, GroupCounts, ProcessState, RankSummary
from everstep.domain.ids import Attempt, HostId, IncidentId, Rank
from everstep.domain.progress import PageView
from everstep.ports import Exit, Started
from everstep.sim.clock import SimClock
from everstep.sim.training import Health, SimRank, SimTraining

_STATES = {
    Health.WELL: ProcessState.SLEEPING,
    Health.ASLEEP: ProcessState.SLEEPING,
    Health.HOLDING_GIL: ProcessState.RUNNING,
    Health.FROZEN: ProcessState.STOPPED,
    Health.ENDED: ProcessState.GONE,
}
_WAITING = Frame(file="torch/distributed/distributed_c10d.py", line=1, function="all_reduce")


class SimHost:
    """The workers of one host; `stop` takes no time."""

    def __init__(self, host: HostId, *, training: SimTraining, clock: SimClock) -> None:
        self._host = host
        self._training = training
        self._clock = clock
        self._mine: list[Rank] = []
        self._told: set[Rank] = set()

    def start(self, command: StartWorkers) -> Started:
        share = next(share for share in command.shares if share.host == self._host)
        self._mine = [Rank(share.first_rank + number) for number in range(share.count)]
        self._told = set()
        pids = [self._training.begin(rank, self._clock.now_s()) for rank in self._mine]
        return Started(pids=tuple(pids), warm=True)

    def wait(self, timeout_s: float) -> None:
        """Time moves only by the clock's owner."""

    def exits(self) -> Sequence[Exit]:
        found = []
        for rank in self.ranks():
            if rank.exit_code is not None and rank.rank not in self._told:
                self._told.add(rank.rank)
                kind, _, message = rank.error.partition(": ")
                found.append(
                    Exit(
                        rank=rank.rank,
                        pid=rank.pid,
                        exit_code=rank.exit_code,
                        at_s=self._clock.now_s(),
                        error_type=kind,
                        error_message=message,
                        error_where="train.py:1 in main" if rank.error else "",
                    )
                )
        return found

    def store_loss(self) -> str:
        return ""

    def signal(self, rank: Rank, kind: FaultKind) -> None:
        self._training.cause(rank, kind, self._clock.now_s())

    def stop(self, kill_ranks: Sequence[Rank], grace_s: float) -> tuple[Rank, ...]:
        for rank in self._mine:
            self._training.end(rank)
        self._mine = []
        return ()

    def ranks(self) -> list[SimRank]:
        return [self._training.ranks[rank] for rank in self._mine]


class SimHostView:
    """What can be seen of a `SimHost` from outside."""

    def __init__(self, host: HostId, *, workers: SimHost, clock: SimClock) -> None:
        self._host = host
        self._workers = workers
        self._clock = clock

    def views(self) -> Sequence[PageView]:
        return [self._view(rank) for rank in self._workers.ranks()]

    def notes(self) -> Sequence[Event]:
        return ()

    def collect(
        self, *, attempt: Attempt, incident: IncidentId, snapshot: int
    ) -> tuple[Sequence[RankSummary], Sequence[EvidenceFile]]:
        return [self._summary(rank) for rank in self._workers.ranks()], []

    def _view(self, rank: SimRank) -> PageView:
        marks, rank.marks = tuple(rank.marks), []
        return PageView(
            rank=rank.rank,
            phase=rank.phase,
            step=rank.step,
            changed_at_s=rank.changed_at_s,
            loss=None,
            marks=marks,
        )

    def _summary(self, rank: SimRank) -> RankSummary:
        waits = rank.health is Health.WELL
        able = rank.health in (Health.WELL, Health.ASLEEP)
        stack = (_WAITING,) if waits else (Frame(file="train.py", line=7, function="stuck"),)
        return RankSummary(
            rank=rank.rank,
            host=self._host,
            process=_STATES[rank.health],
            exit_code=rank.exit_code,
            phase=rank.phase,
            step=rank.step,
            silence_s=self._clock.now_s() - rank.changed_at_s,
            cpu_s=rank.cpu_s,
            answers=rank.health not in (Health.FROZEN, Health.ENDED),
            gil_free=able,
            stack=stack if able or rank.health is Health.HOLDING_GIL else (),
            groups=(GroupCounts(group="0", enqueued=rank.step + waits, completed=rank.step),) if able else (),
        )
