"""Puts the real parts together and runs one job with them: ledger, clock, channel, workers, evidence, the two loops."""

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

import everstep
from everstep.adapters.channel import LocalChannel
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence_files import EvidenceFiles
from everstep.adapters.guard import Guard
from everstep.adapters.ledger_file import LedgerFile
from everstep.adapters.local_workers import LocalJob, LocalWorkers, Parts
from everstep.adapters.memory_folder import open_folder
from everstep.adapters.mirror_process import MirrorOrder, MirrorProcess
from everstep.adapters.processes import become_subreaper, kill_run
from everstep.adapters.rendezvous_store import RendezvousStores
from everstep.adapters.roster import Roster
from everstep.adapters.saver_process import SaverProcess
from everstep.adapters.snapshot_request import answering
from everstep.adapters.standby import Standby
from everstep.adapters.worker_environment import RUN_VARIABLE, everstep_defaults
from everstep.adapters.worker_logs import WorkerLogs
from everstep.adapters.worker_notes import RosterPages
from everstep.cli.run_arguments import RunPlan, command_line
from everstep.domain.codec import Entry, is_command
from everstep.domain.commands import Command, FinishJob
from everstep.domain.errors import ConfigError, ExitCode, WorldError
from everstep.domain.events import Event, RunResumed, RunStarted, StopRequested
from everstep.domain.ids import HostId, RunId
from everstep.policy.recovery import Job
from everstep.runtime.agent import Agent, AgentConfig, AgentPorts
from everstep.runtime.coordinator import Coordinator, CoordinatorPorts

_log = logging.getLogger(__name__)
_AGENT_ENDS_WITHIN_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")
_MIRROR_NOTES = "mirror.notes"
_START = secrets.token_hex(4)
Listener = Callable[[Event | Command], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """How a run begins: with a fresh ledger, or where an old one ended."""

    run: str
    event: Event
    start_at_s: float

    @property
    def mark(self) -> str:
        """What every process of this start carries, so that an earlier start's guard, still at work, spares it."""
        return f"{self.run}.{_START}"


def run_job(plan: RunPlan, *, listen: Listener) -> FinishJob:
    """Run a job to its end and give the command that ended it. Nothing of it lives afterwards.

    Args:
        plan: what to run.
        listen: hears every entry of the ledger.

    Raises:
        ConfigError: a folder can't be used, or another `everstep run` uses it.
        EvidenceError: the ledger of a run to be continued is damaged or from a newer version.
        WorldError: the ledger can't be written any more.
    """
    _make_writable(plan.run_dir, "--run-dir")
    _make_writable(plan.log_dir, "--log-dir")
    with LedgerFile(plan.run_dir) as ledger:
        entries = ledger.read()
        job = Job(plan.recovery)
        for entry in entries:
            if not is_command(entry.body):
                job.handle(entry.body)  # type: ignore[arg-type]
        if entries and (end := _already_done(entries)) is not None:
            return end
        if entries and plan.faults:
            _log.warning("--inject is ignored: the faults of a run that is continued stand in its ledger")
        opening = _opening(plan, entries)
        clock = MonotonicClock(start_at_s=opening.start_at_s)
        with _scratch_folder() as scratch:
            return _run(plan, opening, _Core(ledger=ledger, clock=clock, job=job, listen=listen), scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    ledger: LedgerFile
    clock: MonotonicClock
    job: Job
    listen: Listener


def _run(plan: RunPlan, opening: _Opening, core: _Core, scratch: Path) -> FinishJob:
    become_subreaper()
    kill_run(opening.run)  # what an earlier start of this run may have left
    host = HostId(socket.gethostname())
    workers, roster = _make_workers(plan, opening, host, core.clock, scratch)
    channel = LocalChannel(wake=workers.wake)
    evidence = EvidenceFiles(plan.run_dir / "evidence", host=host, roster=roster, clock=core.clock)
    agent = Agent(
        AgentConfig(
            host=host,
            address=plan.address,
            worker_count=plan.worker_count,
            report_s=plan.report_s,
            stall=plan.stall,
        ),
        AgentPorts(
            workers=workers,
            pages=RosterPages(roster, scratch / _MIRROR_NOTES),
            evidence=evidence,
            channel=channel.agent_end(host),
            clock=core.clock,
        ),
    )
    ports = CoordinatorPorts(ledger=core.ledger, channel=channel, clock=core.clock, listen=core.listen)
    coordinator = Coordinator(core.job, ports)
    thread = threading.Thread(target=agent.run, name="everstep-agent", daemon=True)
    with (
        _guarded(opening.mark, scratch),
        _signals(opening.mark, channel, core.clock),
        answering(plan.run_dir, evidence.collect),
    ):
        thread.start()
        try:
            return coordinator.run([opening.event])
        finally:
            agent.finish()
            workers.wake()
            thread.join(_AGENT_ENDS_WITHIN_S)
            workers.close()


def _make_workers(
    plan: RunPlan, opening: _Opening, host: HostId, clock: MonotonicClock, scratch: Path
) -> tuple[LocalWorkers, Roster]:
    environment = dict(os.environ)
    environment[RUN_VARIABLE] = opening.mark
    if plan.worker_count > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    environment |= everstep_defaults(environment, _compile_cache(plan.run_dir))
    program = plan.program if plan.script_imports else None
    standby = Standby(environment=environment, preload=plan.preload, program=program) if plan.standby else None
    if standby is not None:
        standby.warm_up()
    has_torch = importlib.util.find_spec("torch") is not None
    stores = RendezvousStores(address=plan.address, port=plan.port, standby=standby, environment=environment)
    console = (sys.stdout.buffer, sys.stderr.buffer) if plan.console else None
    roster = Roster()
    job = LocalJob(
        mark=opening.mark,
        host=host,
        program=plan.program,
        scratch=scratch,
        checkpoints=plan.run_dir.resolve() / "checkpoints",
        address=plan.address,
        rdzv_id=plan.rdzv_id or opening.run,
        virtual_local_rank=plan.virtual_local_rank,
        restart_count_max=plan.recovery.restarts.restart_count_max or 0,
        environment=environment,
    )
    parts = Parts(
        clock=clock,
        logs=WorkerLogs(plan.log_dir, choice=plan.logs, console=console),
        roster=roster,
        standby=standby,
        stores=stores if has_torch else None,
        saver=_saver(opening.run) if plan.program.python and has_torch else None,
        mirror=_mirror(plan, job, clock),
    )
    return LocalWorkers(job, parts), roster


def _mirror(plan: RunPlan, job: LocalJob, clock: MonotonicClock) -> MirrorProcess | None:
    if not plan.mirror:
        return None
    order = MirrorOrder(
        url=plan.mirror,
        directory=str(job.checkpoints),
        keep=plan.mirror_keep,
        notes=str(job.scratch / _MIRROR_NOTES),
        clock_zero_ns=clock.zero_ns,
    )
    return MirrorProcess(order)


def _saver(run: str) -> SaverProcess | None:
    """The memory tier's folder and its saver; None where there is no room for them."""
    try:
        return SaverProcess(open_folder(run))
    except WorldError as problem:
        _log.warning("checkpoints stay out of memory and go to disk only: %s", problem)
        return None


def _compile_cache(run_dir: Path) -> Path | None:
    """Where compilers keep their work from attempt to attempt: what lies there is run, so it is the user's alone."""
    folder = run_dir.resolve() / "compile-cache"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    except OSError as problem:
        _log.warning("compilers keep their usual caches: %s cannot be used (%s)", folder, problem.strerror)
        return None
    return folder


def _make_writable(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".everstep-probe-{secrets.token_hex(4)}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder} ({error.strerror}); give another folder with {flag}, or make room in this one"
        ) from error


def _already_done(entries: Sequence[Entry]) -> FinishJob | None:
    last = entries[-1].body
    return last if isinstance(last, FinishJob) and last.exit_code is ExitCode.DONE else None


def _opening(plan: RunPlan, entries: Sequence[Entry]) -> _Opening:
    if not entries:
        run = f"{plan.run_dir.name[:40]}-{secrets.token_hex(3)}"
        event = RunStarted(
            at_s=0.0,
            run=RunId(run),
            everstep=everstep.__version__,
            command=command_line(),
            world_size=plan.worker_count,
            host_count=1,
            faults=plan.faults,
        )
        return _Opening(run=run, event=event, start_at_s=0.0)
    first, last = entries[0].body, entries[-1]
    run = first.run if isinstance(first, RunStarted) else plan.run_dir.name
    left = datetime.fromisoformat(last.wall)
    gap_s = max(0.0, (datetime.now(left.tzinfo) - left).total_seconds())
    start_at_s = last.body.at_s + gap_s
    return _Opening(
        run=run, event=RunResumed(at_s=start_at_s, gap_s=gap_s, command=command_line()), start_at_s=start_at_s
    )


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path("/tmp")
    folder = parent / f"everstep-{os.getuid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the guard may have been faster


@contextlib.contextmanager
def _guarded(mark: str, scratch: Path) -> Iterator[None]:
    guard = Guard(run=mark, scratch=scratch)
    try:
        yield
    finally:
        guard.close()


@contextlib.contextmanager
def _signals(mark: str, channel: LocalChannel, clock: MonotonicClock) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the job with grace; the second one without."""
    asked = 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            channel.post(StopRequested(at_s=clock.now_s(), by=signal.Signals(number).name))
        else:
            kill_run(mark)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
