"""Runs the coordinator of a job and the agent of its own host: ledger, clock, channel and the two loops, to the end.

Other hosts come in by an exchange that the caller opens; a job of one host has none, and listens nowhere.
"""

import contextlib
import logging
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Protocol

import everstep
from everstep.adapters.channel import LocalChannel
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.snapshot_request import Collect, answering
from everstep.adapters.ledger_file import LedgerFile
from everstep.adapters.workers.processes import become_subreaper, kill_run
from everstep.cli.host_parts import Seat, guarded, has_left_memory, make_agent, make_host, scratch_folder
from everstep.cli.run_arguments import RunPlan, command_line
from everstep.domain.codec import Entry, is_command
from everstep.domain.commands import Command, FinishJob
from everstep.domain.errors import ConfigError, ExitCode
from everstep.domain.events import Event, HostLost, RunResumed, RunStarted, StopRequested
from everstep.domain.ids import RunId
from everstep.policy.recovery import Job
from everstep.runtime.agent import Agent
from everstep.runtime.coordinator import Coordinator, CoordinatorPorts

_log = logging.getLogger(__name__)
_AGENT_ENDS_WITHIN_S = 60.0
Listener = Callable[[Event | Command], None]


class Exchange(Protocol):
    """The lines to other hosts."""

    def finish(self, end: FinishJob) -> None:
        """Tell them that the job is over, and close."""
        ...

    def close(self) -> None:
        """May be called twice."""
        ...

    def widen(self, collect: Collect) -> Collect:
        """Have all hosts looked at, where a person asks for evidence of a job."""
        ...


OpenExchange = Callable[[Seat, LocalChannel, MonotonicClock], Exchange]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """How a run begins: with a fresh ledger, or where an old one ended."""

    run: str
    event: Event
    start_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    ledger: LedgerFile
    clock: MonotonicClock
    job: Job
    listen: Listener


def coordinate(
    plan: RunPlan, make_seat: Callable[[str], Seat], *, listen: Listener, open_exchange: OpenExchange | None = None
) -> FinishJob:
    """Run a job to its end and give the command that ended it. Nothing of it lives on this host afterwards.

    Args:
        make_seat: this host's place in the run of that id.
        listen: hears every entry of the ledger.
        open_exchange: opens the lines to other hosts.

    Raises:
        ConfigError: another `everstep run` uses the folder, or its run is of another number of hosts.
        EvidenceError: the ledger of a run to be continued is damaged or from a newer version.
        WorldError: the ledger can't be written any more.
    """
    with LedgerFile(plan.run_dir) as ledger:
        entries = ledger.read()
        job = Job(plan.recovery)
        for entry in entries:
            if not is_command(entry.body):
                job.handle(entry.body)  # type: ignore[arg-type]
        if entries and (end := _already_done(entries)) is not None:
            if not has_left_memory(make_seat(run_id(plan, entries[0]))):
                return end
            _log.warning("the run is done, but its last step may be in memory alone: it goes on from there")
        if entries and plan.faults:
            _log.warning("--inject is ignored: the faults of a run that is continued stand in its ledger")
        opening = _opening(plan, entries)
        clock = MonotonicClock(start_at_s=opening.start_at_s)
        core = _Core(ledger=ledger, clock=clock, job=job, listen=listen)
        return _run(plan, opening.event, make_seat(opening.run), core, open_exchange)


def _run(plan: RunPlan, opening: Event, seat: Seat, core: _Core, open_exchange: OpenExchange | None) -> FinishJob:
    become_subreaper()
    kill_run(seat.name)  # what an earlier start of this run may have left
    with scratch_folder() as scratch:
        parts = make_host(plan, seat, core.clock, scratch)
        channel = LocalChannel(wake=parts.workers.wake)
        agent = make_agent(plan, seat, parts, channel.agent_end(seat.host), core.clock)
        ports = CoordinatorPorts(ledger=core.ledger, channel=channel, clock=core.clock, listen=core.listen)
        coordinator = Coordinator(core.job, ports)
        thread = threading.Thread(target=agent.run, name="everstep-agent", daemon=True)
        with (
            guarded(seat.mark, scratch),
            _signals(seat, agent, channel, core.clock),
            _exchange(open_exchange, seat, channel, core.clock) as exchange,
            answering(plan.run_dir, exchange.widen(parts.evidence.collect) if exchange else parts.evidence.collect),
        ):
            thread.start()
            try:
                end = coordinator.run([opening])
                if exchange is not None:
                    exchange.finish(end)
                return end
            finally:
                agent.finish()
                parts.workers.wake()
                thread.join(0.0 if agent.stands_still else _AGENT_ENDS_WITHIN_S)
                if thread.is_alive():  # it hangs, and so might this; the guard looks after what is left
                    kill_run(seat.mark)
                else:
                    parts.workers.close()


@contextlib.contextmanager
def _exchange(
    open_exchange: OpenExchange | None, seat: Seat, channel: LocalChannel, clock: MonotonicClock
) -> Iterator[Exchange | None]:
    if open_exchange is None:
        yield None
        return
    exchange = open_exchange(seat, channel, clock)
    try:
        yield exchange
    finally:
        exchange.close()


def _already_done(entries: Sequence[Entry]) -> FinishJob | None:
    last = entries[-1].body
    return last if isinstance(last, FinishJob) and last.exit_code is ExitCode.DONE else None


def run_id(plan: RunPlan, first: Entry) -> str:
    """Of the run whose ledger begins with this entry."""
    return first.body.run if isinstance(first.body, RunStarted) else plan.run_dir.name


def _opening(plan: RunPlan, entries: Sequence[Entry]) -> _Opening:
    host_count = plan.hosts.need if plan.hosts else 1
    if not entries:
        run = f"{plan.run_dir.name[:40]}-{secrets.token_hex(3)}"
        event = RunStarted(
            at_s=0.0,
            run=RunId(run),
            everstep=everstep.__version__,
            command=command_line(),
            world_size=plan.worker_count * host_count,
            host_count=host_count,
            faults=plan.faults,
        )
        return _Opening(run=run, event=event, start_at_s=0.0)
    first, last = entries[0].body, entries[-1]
    if isinstance(first, RunStarted) and first.host_count != host_count:
        raise ConfigError(
            f"the run in {plan.run_dir} is of {first.host_count} hosts and cannot go on with {host_count}: "
            f"write --nnodes {first.host_count}, or give another --run-dir"
        )
    left = datetime.fromisoformat(last.wall)
    gap_s = max(0.0, (datetime.now(left.tzinfo) - left).total_seconds())
    start_at_s = last.body.at_s + gap_s
    resumed = RunResumed(at_s=start_at_s, gap_s=gap_s, command=command_line())
    return _Opening(run=run_id(plan, entries[0]), event=resumed, start_at_s=start_at_s)


@contextlib.contextmanager
def _signals(seat: Seat, agent: Agent, channel: LocalChannel, clock: MonotonicClock) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the job with grace; the second one without. An agent that hangs is not waited for."""
    asked = 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            channel.post(StopRequested(at_s=clock.now_s(), by=signal.Signals(number).name))
        else:
            kill_run(seat.mark)
        if agent.stands_still:
            channel.post(HostLost(at_s=clock.now_s(), host=seat.host, reason=f"the agent of host {seat.host} hangs"))

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
