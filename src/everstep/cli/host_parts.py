"""Builds what one host of a job needs: its workers with all that belongs to them, evidence, agent, guard, folders.

The same for a job's only host, the coordinator's and every other one; it knows nothing of where commands come from.
"""

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.checkpoints.memory_folder import SHARED_MEMORY, folder_of, is_free, open_folder
from everstep.adapters.checkpoints.memory_slots import JOB_NAME
from everstep.adapters.checkpoints.mirror_process import MirrorOrder, MirrorProcess
from everstep.adapters.checkpoints.peer_hosts import PeerConfig, PeerHosts
from everstep.adapters.checkpoints.saver_process import SaverProcess
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.evidence_files import EvidenceFiles
from everstep.adapters.workers.guard import Guard
from everstep.adapters.workers.local_workers import LocalJob, LocalWorkers, Parts
from everstep.adapters.workers.rendezvous_store import RendezvousStores
from everstep.adapters.workers.roster import Roster
from everstep.adapters.workers.standby import Standby
from everstep.adapters.workers.worker_environment import RUN_VARIABLE, everstep_defaults
from everstep.adapters.workers.worker_logs import WorkerLogs
from everstep.adapters.workers.worker_notes import RosterPages
from everstep.cli.run_arguments import RunPlan
from everstep.domain.errors import ConfigError, WorldError
from everstep.domain.ids import HostId
from everstep.ports import AgentChannel, Board
from everstep.runtime.agent import Agent, AgentConfig, AgentPorts

_log = logging.getLogger(__name__)
_MIRROR_NOTES = "mirror.notes"
_START = secrets.token_hex(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One host's place in a job.

    Attributes:
        run: the run's id.
        number: of this node among those of the job on this machine; 0 for a job of one host.
        address: where this host's stores listen, reachable by all hosts of the job.
        place: where the host wants to stand among the others; None for by name.
        board: None for a job of one host.
    """

    run: str
    host: HostId
    address: str
    number: int = 0
    place: int | None = None
    board: Board | None = None

    @property
    def name(self) -> str:
        """What all starts of this run on this host have in common, and no other node on this machine has."""
        return f"{self.run}@{self.number}" if self.number else self.run

    @property
    def mark(self) -> str:
        """What every process of this start carries, so that an earlier start's guard, still at work, spares it."""
        return f"{self.name}.{_START}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """What `make_host` made. `workers` is to be closed."""

    workers: LocalWorkers
    evidence: EvidenceFiles
    pages: RosterPages


def make_host(plan: RunPlan, seat: Seat, clock: MonotonicClock, scratch: Path) -> HostParts:
    environment = dict(os.environ)
    environment[RUN_VARIABLE] = seat.mark
    if plan.worker_count > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    environment |= everstep_defaults(environment, _compile_cache(plan.run_dir))
    program = plan.program if plan.script_imports else None
    standby = Standby(environment=environment, preload=plan.preload, program=program) if plan.standby else None
    if standby is not None:
        standby.warm_up()
    has_torch = importlib.util.find_spec("torch") is not None
    stores = RendezvousStores(address=seat.address, port=plan.port, standby=standby, environment=environment)
    console = (sys.stdout.buffer, sys.stderr.buffer) if plan.console else None
    roster = Roster()
    job = LocalJob(
        mark=seat.mark,
        host=seat.host,
        program=plan.program,
        scratch=scratch,
        checkpoints=plan.run_dir.resolve() / "checkpoints",
        address=seat.address,
        rdzv_id=plan.rdzv_id or seat.run,
        virtual_local_rank=plan.virtual_local_rank,
        restart_count_max=plan.recovery.restarts.restart_count_max or 0,
        environment=environment,
    )
    saver = _saver(seat) if plan.program.python and has_torch else None
    parts = Parts(
        clock=clock,
        logs=WorkerLogs(plan.log_dir, choice=plan.logs, console=console),
        roster=roster,
        standby=standby,
        stores=stores if has_torch else None,
        saver=saver,
        mirror=_mirror(plan, job, clock),
        board=seat.board,
        peers=_peers(plan, seat, saver),
    )
    return HostParts(
        workers=LocalWorkers(job, parts),
        evidence=EvidenceFiles(
            plan.run_dir / "evidence", host=seat.host, roster=roster, clock=clock, shared=seat.board is not None
        ),
        pages=RosterPages(roster, scratch / _MIRROR_NOTES),
    )


def make_agent(plan: RunPlan, seat: Seat, parts: HostParts, channel: AgentChannel, clock: MonotonicClock) -> Agent:
    config = AgentConfig(
        host=seat.host,
        address=seat.address,
        worker_count=plan.worker_count,
        place=seat.place,
        report_s=_report_s(plan),
        stall=plan.stall,
    )
    ports = AgentPorts(workers=parts.workers, pages=parts.pages, evidence=parts.evidence, channel=channel, clock=clock)
    agent = Agent(config, ports)
    parts.workers.is_called_off = agent.is_called_off
    return agent


def _report_s(plan: RunPlan) -> float:
    """A lost host takes along what it has not reported yet; the ledger of many hosts must not grow for that."""
    return min(plan.report_s, max(1.0, 0.1 * plan.hosts.need)) if plan.hosts else plan.report_s


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


def _peers(plan: RunPlan, seat: Seat, saver: SaverProcess | None) -> PeerHosts | None:
    """This host's part in copies on other hosts; None for a job of one host, and where nothing is to be copied."""
    if seat.board is None or plan.hosts is None or not plan.program.python:
        return None
    config = PeerConfig(
        host=seat.host,
        folder=saver.path if saver is not None else None,
        address=seat.address,
        credentials=plan.hosts.credentials,
        rack=plan.hosts.rack,
    )
    return PeerHosts(config, seat.board)


def _saver(seat: Seat) -> SaverProcess | None:
    """The memory tier's folder and its saver; None where there is no room for them."""
    try:
        return SaverProcess(open_folder(seat.name))
    except WorldError as problem:
        _log.warning("checkpoints stay out of memory and go to disk only: %s", problem)
        return None


def has_left_memory(seat: Seat) -> bool:
    """Whether an earlier start of the run had to leave a state in memory, and nobody is at work on it."""
    folder = folder_of(seat.name)
    return (folder / JOB_NAME).exists() and is_free(folder)


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


def make_writable(folder: Path, flag: str) -> None:
    """Make the folder, and sure that it can be written.

    Raises:
        ConfigError: it can't; names the flag.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".everstep-probe-{secrets.token_hex(4)}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder} ({error.strerror}); give another folder with {flag}, or make room in this one"
        ) from error


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path("/tmp")
    folder = parent / f"everstep-{os.getuid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the guard may have been faster


@contextlib.contextmanager
def guarded(mark: str, scratch: Path) -> Iterator[None]:
    guard = Guard(run=mark, scratch=scratch)
    try:
        yield
    finally:
        guard.close()
