"""Makes ends, summaries and whole stories of a job for the tests of policy; no test of its own."""

from typing import Any

from hypothesis import strategies as st

from everstep.domain.causes import FaultKind
from everstep.domain.commands import CollectEvidence, Command
from everstep.domain.events import (
    Event,
    EvidenceCollected,
    HostJoined,
    HostLost,
    RunResumed,
    RunStarted,
    StallEnded,
    StallSuspected,
    StartFailed,
    StepsFinished,
    StopRequested,
    StoreLost,
    Ticked,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
)
from everstep.domain.evidence import Frame, GroupCounts, ProcessState, RankSummary
from everstep.domain.faults import PlannedFault
from everstep.domain.ids import Attempt, HostId, Rank, RunId
from everstep.domain.phases import Phase
from everstep.policy.recovery import Job, RecoveryConfig

WAITING = (
    Frame(file="/x/site-packages/torch/distributed/distributed_c10d.py", line=2806, function="all_reduce"),
    Frame(file="/home/me/train.py", line=30, function="main"),
)
STUCK = (Frame(file="/home/me/train.py", line=12, function="mine"), Frame(file="train.py", line=30, function="main"))
LOST_PEER = {"error_type": "RuntimeError", "error_message": "[gloo/pair.cc:534] Connection closed by peer [10.0.0.1]"}


def ended(rank: int, exit_code: int, **fields: Any) -> WorkerExited:
    """An end at second `10 + rank`, after step 40, in the middle of training."""
    known = {
        "at_s": 10.0 + rank,
        "attempt": Attempt(1),
        "host": HostId("h0"),
        "pid": 100 + rank,
        "phase": Phase.TRAINING,
        "step": 40,
    }
    return WorkerExited(rank=Rank(rank), exit_code=exit_code, **(known | fields))


def counts(enqueued: int, completed: int, group: str = "0", newest: str = "") -> GroupCounts:
    return GroupCounts(group=group, enqueued=enqueued, completed=completed, newest=newest)


def seen(rank: int, **fields: Any) -> RankSummary:
    """A rank that is alive, answers, and of which nothing else is known."""
    known = {
        "host": HostId("h0"),
        "process": ProcessState.SLEEPING,
        "phase": Phase.TRAINING,
        "step": 40,
        "silence_s": 5.0,
        "cpu_s": 1.0,
        "answers": True,
        "gil_free": True,
    }
    return RankSummary(rank=Rank(rank), **(known | fields))


def waiting(rank: int, **fields: Any) -> RankSummary:
    """A rank inside the 41st collective of the default group."""
    known = {"stack": WAITING, "groups": (counts(41, 40, newest="all_reduce of [[4]]"),)}
    return seen(rank, **(known | fields))


def absent(rank: int, **fields: Any) -> RankSummary:
    """A rank that has not entered the 41st collective of the default group."""
    known = {"stack": STUCK, "groups": (counts(40, 40),)}
    return seen(rank, **(known | fields))


def fault(number: int, kind: FaultKind = FaultKind.KILL, *, rank: int = 1, **when: Any) -> PlannedFault:
    return PlannedFault(number=number, kind=kind, rank=Rank(rank), **when)


_STACKS = st.sampled_from([(), WAITING, STUCK, (Frame(file="train.py", line=9, function="save_checkpoint"),)])
_COUNTS = st.builds(
    lambda group, completed, more: counts(completed + more, completed, group),
    st.sampled_from(["0", "1", "2"]),
    st.integers(0, 3),
    st.integers(0, 1),
)
SEEN_FROM_OUTSIDE = st.builds(
    seen,
    st.integers(0, 5),
    process=st.sampled_from(ProcessState),
    exit_code=st.sampled_from([None, None, 0, 1, -9]),
    phase=st.sampled_from(Phase),
    step=st.integers(39, 41),
    silence_s=st.sampled_from([0.1, 5.0, 5.5]),
    cpu_s=st.sampled_from([None, 1.0, 1.4]),
    answers=st.sampled_from([None, True, False]),
    gil_free=st.sampled_from([None, True, False]),
    stack=_STACKS,
    groups=st.lists(_COUNTS, max_size=3, unique_by=lambda one: one.group).map(tuple),
    missing=st.sampled_from([(), ("python stack: no answer to the signal",)]),
)
"""Any summary at all, whether it makes sense or not."""


class Story:
    """Tells a job what happens, event after event, and remembers what it said.

    Time moves by `after_s` with each event; `attempt` is the job's own unless an event names another.
    """

    def __init__(
        self,
        config: RecoveryConfig | None = None,
        *,
        hosts: int = 1,
        per_host: int = 2,
        faults: tuple[PlannedFault, ...] = (),
    ) -> None:
        self.job = Job(config or RecoveryConfig())
        self.hosts = [HostId(f"h{number}") for number in range(hosts)]
        self.per_host = per_host
        self.at_s = 0.0
        self.said: list[Command] = []
        self.answers: list[tuple[Event, list[Command]]] = []
        self.tell(
            RunStarted,
            run=RunId("r"),
            everstep="0",
            command=(),
            world_size=hosts * per_host,
            host_count=hosts,
            faults=faults,
        )

    def tell(self, kind: Any, *, after_s: float = 0.1, **fields: Any) -> list[Command]:
        """What the job says to the event; everything it ever said is in `said`."""
        self.at_s += after_s
        if "attempt" in kind.__dataclass_fields__:
            fields.setdefault("attempt", self.job.attempt)
        event = kind(at_s=self.at_s, **fields)
        answer = list(self.job.handle(event))
        self.answers.append((event, answer))
        self.said += answer
        return answer

    @property
    def told(self) -> list[Event]:
        return [event for event, _ in self.answers]

    def of(self, kind: Any) -> list[Any]:
        return [command for command in self.said if isinstance(command, kind)]

    def last(self, kind: Any) -> Any:
        return self.of(kind)[-1]

    @property
    def asked(self) -> bool:
        """Whether evidence was ever asked for."""
        return bool(self.of(CollectEvidence))

    # --- everything that can happen, with what matters to the test as arguments

    def join(self, host: int = 0) -> list[Command]:
        return self.tell(HostJoined, host=self.hosts[host], worker_count=self.per_host, address="a")

    def begin(self) -> "Story":
        """All hosts join, start and do four steps."""
        for host in range(len(self.hosts)):
            self.join(host)
        self.run(1, 4)
        return self

    def run(self, first: int, last: int) -> None:
        """All hosts have started the present attempt and finished these steps."""
        for host in self.hosts:
            self.tell(WorkersStarted, host=host, pids=(), warm=True, spawn_s=0.1)
        self.steps(first, last)

    def steps(self, first: int, last: int) -> None:
        for host in self.hosts:
            times = tuple(self.at_s + 0.01 * number for number in range(last - first + 1))
            self.tell(StepsFinished, host=host, first_step=first, ended_at_s=times, after_s=0.01 * (last - first + 2))

    def exit(self, rank: int, exit_code: int, **fields: Any) -> list[Command]:
        after_s = fields.pop("after_s", 0.1)
        known = {"pid": 100 + rank, "phase": Phase.TRAINING, "step": 4, "host": self.hosts[rank // self.per_host]}
        return self.tell(WorkerExited, after_s=after_s, rank=Rank(rank), exit_code=exit_code, **(known | fields))

    def finish_well(self) -> list[Command]:
        """Every rank ends as it should."""
        for rank in range(len(self.hosts) * self.per_host):
            said = self.exit(rank, 0, phase=Phase.ENDING)
        return said

    def evidence(self, host: int = 0, *summaries: RankSummary, **fields: Any) -> list[Command]:
        after_s = fields.pop("after_s", 0.1)
        asked = self.last(CollectEvidence)
        known = {"incident": asked.incident, "snapshot": asked.snapshot, "files": (), "took_s": 0.1}
        return self.tell(
            EvidenceCollected, after_s=after_s, host=self.hosts[host], summaries=summaries, **(known | fields)
        )

    def all_evidence(self) -> list[Command]:
        for host in range(len(self.hosts)):
            said = self.evidence(host)
        return said

    def stopped(self, host: int = 0, **fields: Any) -> list[Command]:
        return self.tell(WorkersStopped, host=self.hosts[host], killed=(), **fields)

    def all_stopped(self) -> list[Command]:
        for host in range(len(self.hosts)):
            said = self.stopped(host)
        return said

    def die(self, rank: int = 1, exit_code: int = -9, **fields: Any) -> list[Command]:
        """A rank ends badly, evidence is taken, everything stops; gives what follows."""
        self.exit(rank, exit_code, **fields)
        self.all_evidence()
        return self.all_stopped()

    def suspect(self, host: int = 0, *, silence_s: float = 2.0, **fields: Any) -> list[Command]:
        known = {"phase": Phase.TRAINING, "deadline_s": 1.5, "learned_from": "the floor"}
        since_s = self.at_s + fields.get("after_s", 0.1) - silence_s
        return self.tell(StallSuspected, host=self.hosts[host], since_s=since_s, **(known | fields))

    def moves_again(self, host: int = 0, **fields: Any) -> list[Command]:
        return self.tell(StallEnded, host=self.hosts[host], **fields)

    def tick(self, after_s: float = 0.1) -> list[Command]:
        return self.tell(Ticked, after_s=after_s)

    def look_into(
        self, first: list[RankSummary], second: list[RankSummary], *, silence_s: float = 2.0
    ) -> list[Command]:
        """A whole inquiry into a silence on one host; gives what follows from the second snapshot."""
        self.suspect(silence_s=silence_s)
        self.evidence(0, *first)
        self.tick(0.5)
        return self.evidence(0, *second)

    def ask_to_stop(self, by: str = "SIGTERM") -> list[Command]:
        return self.tell(StopRequested, by=by)

    def lose(self, host: int = 0, reason: str = "gone") -> list[Command]:
        return self.tell(HostLost, host=self.hosts[host], reason=reason)

    def lose_store(self, **fields: Any) -> list[Command]:
        return self.tell(StoreLost, host=self.hosts[0], reason="the rendezvous store ended with -9", **fields)

    def fail_to_start(self, host: int = 0, *, final: bool, reason: str = "cannot start x") -> list[Command]:
        return self.tell(StartFailed, host=self.hosts[host], reason=reason, final=final)

    def resume(self, gap_s: float = 12.0) -> list[Command]:
        return self.tell(RunResumed, gap_s=gap_s, command=())
