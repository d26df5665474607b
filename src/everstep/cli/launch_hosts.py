"""Runs one host of a job of several: the coordinator's, or one that joins it, serves it, and waits for it to come back.

Which of the two a host is, `adapters.host_endpoint.claim` knows.
"""

import contextlib
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

import everstep
from everstep.adapters.channel import LocalChannel
from everstep.adapters.checkpoints.peer_line import load_credentials
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.snapshot_request import Collect
from everstep.adapters.hosts.board import LocalBoard
from everstep.adapters.hosts.host_endpoint import check_local, claim, made_credentials
from everstep.adapters.hosts.host_joining import HostBoard, HostEnd, Refused, Stranger, Welcomed, is_anybody_at, join
from everstep.adapters.hosts.host_looks import ask_all, obey_looks
from everstep.adapters.hosts.host_messages import Hello
from everstep.adapters.hosts.host_switchboard import HostSwitchboard, Terms
from everstep.adapters.hosts.node_slot import node_slot
from everstep.adapters.ledger_file import LEDGER_NAME, last_entry, read_entries
from everstep.adapters.workers.processes import become_subreaper, kill_run
from everstep.cli.coordinate import Exchange, Listener, coordinate, run_id
from everstep.cli.host_arguments import HostsPlan
from everstep.cli.host_parts import HostParts, Seat, guarded, has_left_memory, make_agent, make_host, scratch_folder
from everstep.cli.run_arguments import RunPlan
from everstep.domain.commands import Command, FinishJob, Rung
from everstep.domain.errors import ConfigError, EverstepError, EvidenceError, ExitCode, WorldError
from everstep.domain.events import Event, HostJoined, HostLost, StopRequested
from everstep.domain.ids import HostId
from everstep.runtime.agent import Agent

_log = logging.getLogger(__name__)
_AGENT_ENDS_WITHIN_S = 60.0
_TELL_AFTER_S = 2.0
_TELL_EVERY_S = 30.0
_STRANGERS_MAX = 5
_EAGER_S = 5.0
_LOOK_S = 0.2
_LOOK_LATER_S = 1.0
_LAST_WORD_WITHIN_S = 5.0
_STILL_LOOKS = 5
_HANGS = "its agent hangs, as it does when a disk is gone or nobody reads its output"
Tell = Callable[[str], None]


def run_on_hosts(plan: RunPlan, hosts: HostsPlan, *, listen: Listener, tell: Tell) -> FinishJob:
    """See `launch.run_job`."""
    check_local(hosts.endpoint)
    with node_slot(f"{hosts.endpoint} {plan.rdzv_id}", rank=hosts.node_rank) as number:
        name = socket.gethostname()
        host = HostId(name if number == 1 else f"{name}.{number}")
        listener = claim(hosts.endpoint, node_rank=hosts.node_rank)
        if listener is None:
            outcome = _Follower(plan, hosts, host, number, tell).run(listen)
            if isinstance(outcome, FinishJob):
                return outcome
            listener = outcome
        with contextlib.closing(listener):
            return _lead(plan, hosts, host, number, listener, _announcing(listen, tell, hosts))


def _lead(
    plan: RunPlan, hosts: HostsPlan, host: HostId, number: int, listener: socket.socket, listen: Listener
) -> FinishJob:
    credentials = made_credentials(hosts.credentials)
    board = LocalBoard()
    address = hosts.endpoint.local or str(listener.getsockname()[0])

    def make_seat(run: str) -> Seat:
        return Seat(run=run, host=host, address=address, number=number, place=hosts.node_rank or 0, board=board)

    def open_exchange(seat: Seat, channel: LocalChannel, clock: MonotonicClock) -> Exchange:
        terms = Terms(
            run=seat.run,
            host=host,
            host_count_max=hosts.host_count_max,
            everstep=everstep.__version__,
            nnodes=hosts.nnodes,
            program=_program(plan),
            rdzv_id=plan.rdzv_id,
        )
        switchboard = HostSwitchboard(listener, credentials, terms, channel=channel, board=board, clock=clock)
        switchboard.start()
        return _Exchange(switchboard, board, clock)

    return coordinate(plan, make_seat, listen=listen, open_exchange=open_exchange)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The lines to other hosts, as `coordinate` knows them."""

    switchboard: HostSwitchboard
    board: LocalBoard
    clock: MonotonicClock

    def finish(self, end: FinishJob) -> None:
        self.switchboard.finish(end)

    def close(self) -> None:
        self.switchboard.close()

    def widen(self, collect: Collect) -> Collect:
        return ask_all(self.board, self.clock, lambda: self.switchboard.hosts, collect)


def _program(plan: RunPlan) -> tuple[str, ...]:
    how = () if plan.program.python and not plan.program.module else ("-m" if plan.program.module else "--no-python",)
    return (*how, *plan.program.arguments)


def _announcing(listen: Listener, tell: Tell, hosts: HostsPlan) -> Listener:
    """Also say who comes and goes."""
    here: set[HostId] = set()

    def hear(body: Event | Command) -> None:
        listen(body)
        match body:
            case HostJoined():
                here.add(body.host)
                missing = f"; waiting for {hosts.need - len(here)} more" if len(here) < hosts.need else ""
                tell(f"host {body.host} has joined with {body.worker_count} workers ({len(here)} here{missing})")
            case HostLost() if body.host in here:
                here.discard(body.host)
                if len(here) < hosts.need:
                    tell(f"host {body.host} is lost; waiting up to {hosts.wait_s:g} s for it or another to join")

    return hear


@dataclass(slots=True)
class _Stop:
    """What SIGINT and SIGTERM have asked for."""

    by: str = ""
    count: int = 0
    tell: Callable[[str], None] = field(default=lambda _: None)
    """Called in the signal handler, once."""
    kill: Callable[[], object] = field(default=lambda: None)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        def stop(number: int, _frame: FrameType | None) -> None:
            self.by, self.count = signal.Signals(number).name, self.count + 1
            if self.count == 1:
                self.tell(self.by)
            else:
                self.kill()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _WithoutCredentialsError(WorldError):
    """The job's credentials are not on this host, or not yet."""


class _Follower:
    """A host without the coordinator."""

    def __init__(self, plan: RunPlan, hosts: HostsPlan, host: HostId, number: int, tell: Tell) -> None:
        self._plan = plan
        self._hosts = hosts
        self._host = host
        self._number = number
        self._tell = tell
        self._hello = Hello(
            host=host,
            instance=secrets.token_hex(8),
            everstep=everstep.__version__,
            nnodes=hosts.nnodes,
            program=_program(plan),
            rdzv_id=plan.rdzv_id,
            node_rank=hosts.node_rank,
        )
        self._stop = _Stop()
        self._changed = threading.Event()
        self._board = HostBoard()
        self._parts: HostParts | None = None
        self._hangs = False

    def run(self, listen: Listener) -> FinishJob | socket.socket:
        """Serve the job to its end; gives the coordinator's word on it, or this host's own where that is gone.

        Or, where the endpoint turns out to be free and this host's, the socket that listens there: the port was that
        of a job that has ended meanwhile.
        """
        with self._stop.heard():
            found = self._find(again=False)
            if isinstance(found, socket.socket):
                return found
            end = found if isinstance(found, FinishJob) else self._serve(found)
        listen(end)
        return end

    def _serve(self, welcomed: Welcomed) -> FinishJob:
        line = self._open(welcomed)  # at once: it has to say that this host lives
        seat = Seat(
            run=welcomed.run,
            host=self._host,
            address=self._hosts.endpoint.local or welcomed.address,
            number=self._number,
            place=self._hosts.node_rank,
            board=self._board,
        )
        become_subreaper()
        kill_run(seat.name)  # what an earlier start of this run may have left
        self._stop.kill = lambda: kill_run(seat.mark)
        clock = MonotonicClock.of_zero(welcomed.zero_ns)
        with scratch_folder() as scratch, guarded(seat.mark, scratch):
            self._parts = parts = make_host(self._plan, seat, clock, scratch)
            obey_looks(self._board, clock, seat.host, parts.evidence.collect)
            try:
                while True:
                    if (end := self._work(line, seat, parts, clock)) is not None:
                        return end
                    found = self._find(again=True)
                    if isinstance(found, FinishJob):
                        return found
                    assert isinstance(found, Welcomed)
                    if found.run != seat.run:
                        found.connection.close()
                        raise ConfigError(f"the coordinator has come back with another run, {found.run}; start again")
                    clock.zero_ns = found.zero_ns
                    line = self._open(found)
            finally:
                line.close()
                if not self._hangs:  # else so would this, and the guard looks after what is left
                    parts.workers.close()

    def _open(self, welcomed: Welcomed) -> HostEnd:
        self._tell(f"joined the job at {self._hosts.endpoint} as host {self._host}")
        return HostEnd(welcomed.connection, board=self._board, wake=self._wake)

    def _wake(self) -> None:
        self._changed.set()
        if self._parts is not None:
            self._parts.workers.wake()

    def _work(self, line: HostEnd, seat: Seat, parts: HostParts, clock: MonotonicClock) -> FinishJob | None:
        """Obey the coordinator until it says that the job is over; None when the line is lost. No worker lives then."""

        def ask_to_stop(by: str) -> None:
            line.send(StopRequested(at_s=clock.now_s(), by=f"{by} on {seat.host}"))

        self._stop.tell = ask_to_stop
        if self._stop.count:
            ask_to_stop(self._stop.by)
        agent = make_agent(self._plan, seat, parts, line, clock)
        thread = threading.Thread(target=agent.run, name="everstep-agent", daemon=True)
        thread.start()
        self._hangs = self._look_after(agent, thread, line)
        self._stop.tell = lambda _: None
        hangs = f"host {seat.host} has left the job: {_HANGS}"
        if self._hangs:
            self._stop.kill()
            line.send(HostLost(at_s=clock.now_s(), host=seat.host, reason=hangs))
        if (self._hangs or not thread.is_alive()) and not line.lost:  # the agent is gone, and it was said why
            self._await_last_word(line)
        agent.finish()
        parts.workers.wake()
        thread.join(0.0 if self._hangs else _AGENT_ENDS_WITHIN_S + self._plan.recovery.grace_s)
        if thread.is_alive() and not self._hangs:  # it may yet start the workers of an attempt that is over
            self._hangs = True
            self._stop.kill()
        if line.end is not None:
            return line.end
        if self._hangs or not line.lost:
            code = ExitCode.PREEMPTED if self._stop.count else ExitCode.RETRY_ELSEWHERE
            return _own_end(clock.now_s(), code, hangs if self._hangs else f"host {seat.host} has left the job")
        _log.warning(
            "the coordinator is gone (%s): this host's workers are ended; waiting up to %g s for it to come back",
            line.lost,
            self._hosts.wait_s,
        )
        parts.workers.stop((), self._plan.recovery.grace_s)
        return None

    def _look_after(self, agent: Agent, thread: threading.Thread, line: HostEnd) -> bool:
        """Wait for the end of the agent or of the line, or to be told to leave; True when the agent hangs."""
        looks = 0
        while thread.is_alive() and not line.lost and line.end is None and self._stop.count < 2:
            self._changed.wait(_LOOK_LATER_S)
            self._changed.clear()
            looks = looks + 1 if agent.stands_still else 0
            if looks >= _STILL_LOOKS:  # one alone may be that of a process that was stopped and just wakes
                return True
        return False

    def _await_last_word(self, line: HostEnd) -> None:
        deadline_s = time.monotonic() + _LAST_WORD_WITHIN_S
        while not line.lost and line.end is None and time.monotonic() < deadline_s:
            self._changed.wait(_LOOK_S)
            self._changed.clear()

    # --- finding the coordinator

    def _find(self, *, again: bool) -> Welcomed | FinishJob | socket.socket:
        """Join the coordinator when it is there; or how the job ended, or that this host gives up, or is the first.

        Raises:
            ConfigError: this host can never join, or a stranger answers.
        """
        started_s = time.monotonic()
        tell_s = started_s + _TELL_AFTER_S
        strangers = 0
        while not self._stop.count:
            try:
                return self._join()
            except Stranger as error:
                strangers += 1
                problem: EverstepError = error
                if strangers >= _STRANGERS_MAX:
                    raise ConfigError(
                        f"whoever answers at {self._hosts.endpoint} is not this job's coordinator ({error}): another "
                        f"job or program has that port, or {self._hosts.credentials} is not the coordinator's"
                    ) from error
            except (WorldError, EvidenceError) as error:
                strangers = 0
                problem = error
            if not again and (listener := claim(self._hosts.endpoint, node_rank=self._hosts.node_rank)) is not None:
                return listener
            now_s = time.monotonic()
            if now_s >= tell_s:
                tell_s = now_s + _TELL_EVERY_S
                _log.warning(
                    "waiting for the coordinator at %s, up to %g s (%s)",
                    self._hosts.endpoint,
                    self._hosts.wait_s,
                    problem,
                )
            if now_s - started_s > _TELL_AFTER_S and (end := self._recorded_end(again=again)) is not None:
                return end
            if now_s - started_s > self._hosts.wait_s:
                return _own_end(0.0, ExitCode.RETRY_HERE, self._in_vain(problem, again=again))
            self._pause(_LOOK_S if now_s - started_s < _EAGER_S and not strangers else _LOOK_LATER_S)
        return _own_end(0.0, ExitCode.PREEMPTED, f"stopped by {self._stop.by} while waiting for the coordinator")

    def _join(self) -> Welcomed:
        try:
            credentials = load_credentials(self._hosts.credentials, encrypted=True)
        except WorldError as error:
            raise _WithoutCredentialsError(str(error), retryable=True) from error
        return join(str(self._hosts.endpoint), credentials, self._hello)

    def _in_vain(self, problem: EverstepError, *, again: bool) -> str:
        """What to say when it has been waited for long enough."""
        endpoint, within = self._hosts.endpoint, f"within {self._hosts.wait_s:g} s"
        if isinstance(problem, Refused):
            return f"the coordinator at {endpoint} did not let this host join {within} ({problem})"
        if isinstance(problem, _WithoutCredentialsError) and is_anybody_at(str(endpoint)):
            return (
                f"somebody is at {endpoint}, and this host has not found the job's credentials {within} ({problem}): "
                "share --run-dir among the hosts, or copy them here and give --credentials DIR"
            )
        return f"the coordinator at {endpoint} {'did not come back' if again else 'was not there'} {within} ({problem})"

    def _pause(self, seconds: float) -> None:
        if self._parts is not None:
            self._parts.workers.wait(0.0)  # which looks after the saver
        time.sleep(seconds)

    def _recorded_end(self, *, again: bool) -> FinishJob | None:
        """The job's end, where the shared ledger tells it: for good, or while this host was part of it."""
        entry = last_entry(self._hosts.run_dir / LEDGER_NAME)
        body = entry.body if entry is not None else None
        if isinstance(body, FinishJob) and (again or (body.exit_code is ExitCode.DONE and not self._has_left_memory())):
            return body
        return None

    def _has_left_memory(self) -> bool:
        """Whether the job is going to go on from what this host has, though it is done."""
        first = next(iter(read_entries(self._hosts.run_dir / LEDGER_NAME)), None)
        if first is None:
            return False
        seat = Seat(run=run_id(self._plan, first), host=self._host, address="", number=self._number)
        return has_left_memory(seat)


def _own_end(at_s: float, code: ExitCode, summary: str) -> FinishJob:
    return FinishJob(at_s=at_s, exit_code=code, rung=Rung.GIVE_BACK, summary=summary)
