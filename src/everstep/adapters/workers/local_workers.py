"""The workers of this host as real processes: the `Workers` port over standby, store, logs and process table."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.mirror_process import MirrorProcess
from everstep.adapters.checkpoints.peer_hosts import PeerHosts
from everstep.adapters.checkpoints.saver_process import SaverProcess
from everstep.adapters.checkpoints.stop_page import mark_broken
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.evidence.operation_ring import RingReader, create_ring
from everstep.adapters.evidence.stacks import STACK_SIGNAL
from everstep.adapters.workers.processes import Watch, kill_run, read_stat, reap_orphans, send_signal
from everstep.adapters.workers.progress_page import PageReader, create_page
from everstep.adapters.workers.rendezvous_store import Meeting, RendezvousStores, Store, find_meeting, tell_meeting
from everstep.adapters.workers.roster import Roster, Worker
from everstep.adapters.workers.standby import ProcessOrder, Program, Standby, start_cold
from everstep.adapters.workers.waiting_forks import WaitingForks
from everstep.adapters.workers.worker_environment import Place, WorkerPaths, torchrun_environment
from everstep.adapters.workers.worker_logs import WorkerLogs
from everstep.domain.causes import FaultKind
from everstep.domain.commands import HostShare, StartWorkers
from everstep.domain.errors import ConfigError, WorldError
from everstep.domain.evidence import ProcessState
from everstep.domain.ids import HostId, Rank
from everstep.ports import Board, Exit, Started

_DIES_WITHIN_S = 5.0
_PAUSE_S = 0.02
_SAVED_WITHIN_S = 60.0
_MIRRORED_WITHIN_S = 3600.0  # it ends by itself when nothing moves for a minute
_FROM_OUTSIDE = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.FREEZE: signal.SIGSTOP,
    FaultKind.MAINTENANCE: signal.SIGTERM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """What this host is to run, and where.

    Attributes:
        mark: what every process of this start of the run carries in its environment.
        scratch: a 0700 folder in shared memory for pages and sockets.
        address: MASTER_ADDR of the attempts whose store this host holds.
        environment: what every worker's environment starts from.
        restart_count_max: for TORCHELASTIC_MAX_RESTARTS only.
        virtual_local_rank: every worker sees one device and has LOCAL_RANK 0, as with torchrun's flag.
    """

    mark: str
    host: HostId
    program: Program
    scratch: Path
    checkpoints: Path
    address: str
    rdzv_id: str
    restart_count_max: int
    virtual_local_rank: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The pieces that `LocalWorkers` is put together from. Those from `standby` on are None when they have no use."""

    clock: MonotonicClock
    logs: WorkerLogs
    roster: Roster
    standby: Standby | None
    stores: RendezvousStores | None
    saver: SaverProcess | None = None
    mirror: MirrorProcess | None = None
    board: Board | None = None
    peers: PeerHosts | None = None


class LocalWorkers:
    """The `Workers` port for one host. `close` ends everything it has started."""

    def __init__(self, job: LocalJob, parts: Parts) -> None:
        self._job = job
        self._clock = parts.clock
        self._logs = parts.logs
        self._roster = parts.roster
        self._standby = parts.standby
        self._stores = parts.stores
        self._saver = parts.saver
        self._mirror = parts.mirror
        self._board = parts.board
        self._peers = parts.peers
        self.is_called_off: Callable[[], bool] = lambda: False
        """Asked by a `start` that waits for other hosts: whether something else is wanted of this one meanwhile."""
        self._has_memory = parts.saver is not None
        self._is_first = False
        """Whether this host has rank 0: it brings the checkpoints of all to the mirror."""
        self._waiting = WaitingForks(parts.standby, parts.saver.path) if parts.standby and parts.saver else None
        self._attempt = 0
        self._watch = Watch()
        self._store: Store | None = None
        self._meeting = Meeting(address=job.address, port=0)
        self._store_loss = ""
        self._ended: dict[int, int] = {}
        self._oom_kills = _oom_kill_count()

    def start(self, command: StartWorkers) -> Started:
        """See `ports.Workers`."""
        group_rank, share = next((n, s) for n, s in enumerate(command.shares) if s.host == self._job.host)
        ranks = [Rank(share.first_rank + number) for number in range(share.count)]
        self._oom_kills = _oom_kill_count()
        self._store_loss = ""
        warm = self._warm()
        folder = self._job.scratch / f"a{command.attempt:04d}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if self._mirror is not None and self._is_first and group_rank:
            self._mirror.release()
        self._is_first = group_rank == 0
        self._meeting = self._meet(int(command.attempt), is_first=self._is_first)
        if self._peers is not None:
            self._has_memory = self._peers.prepare(command, self.is_called_off)
        outputs = self._logs.open(attempt=command.attempt, ranks=ranks)
        started_ns = time.monotonic_ns()
        try:
            paths = {rank: self._paths(folder, command.attempt, rank, started_ns) for rank in ranks}
            for path in paths.values():
                create_page(
                    Path(path.page), rank=path.rank, world_size=command.world_size, attempt=int(command.attempt)
                )
                create_ring(Path(path.ring), rank=path.rank)
            orders = [
                ProcessOrder(
                    environment=self._environment(command, group_rank, share, paths[rank]),
                    stdout=outputs[rank][0],
                    stderr=outputs[rank][1],
                )
                for rank in ranks
            ]
            pids, warm = self._launch(orders, ranks, warm=warm)
        finally:
            for pair in outputs.values():
                os.close(pair[0])
                os.close(pair[1])
        for rank, pid in zip(ranks, pids, strict=True):
            self._enrol(paths[rank], pid)
        self._attempt = int(command.attempt)
        if warm and self._stores is not None and self._store is not None:
            self._stores.keep_ready()
        return Started(pids=tuple(pids), warm=warm)

    def wait(self, timeout_s: float) -> None:
        self._watch.wait(timeout_s)
        if self._waiting is not None and self._roster.workers:
            pids = {int(worker.rank): worker.pid for worker in self._roster.workers.values()}
            self._waiting.ensure(attempt=self._attempt, workers=pids)
        if self._saver is not None:
            self._saver.ensure()
        if self._peers is not None:
            self._peers.ensure()
        if self._mirror is not None and self._is_first:
            self._mirror.ensure()
        self._logs.copy_to_console()

    def wake(self) -> None:
        """End a `wait` in another thread."""
        self._watch.wake()

    def exits(self) -> Sequence[Exit]:
        """See `ports.Workers`. The store's end is told by `store_loss`."""
        self._ended |= self._watch.ended()
        found = []
        for pid, code in self._ended.items():
            if self._store is not None and pid == self._store.pid:
                self._store_loss = f"the rendezvous store ended with {code}"
                self._store = None
            elif (worker := self._roster.by_pid(pid)) is not None:
                worker.exit_code = code
                found.append(self._describe(worker, code))
        self._ended.clear()
        return found

    def store_loss(self) -> str:
        return self._store_loss

    def signal(self, rank: Rank, kind: FaultKind) -> None:
        """See `ports.Workers`: a real signal, or an order on the page that the worker obeys at its next step."""
        worker = self._roster.workers[rank]
        if (number := _FROM_OUTSIDE.get(kind)) is not None:
            send_signal(worker.pid, number)
        else:
            worker.page.order(kind)

    def stop(self, kill_ranks: Sequence[Rank], grace_s: float) -> tuple[Rank, ...]:
        """See `ports.Workers`.

        Raises:
            WorldError: a process can't be killed; it hangs inside the kernel.
        """
        if kill_ranks or len(self._roster.living()) < len(self._roster.workers):
            self._tell_broken()
        for worker in self._roster.living():
            send_signal(worker.pid, signal.SIGKILL if worker.rank in kill_ranks else signal.SIGTERM)
        stubborn = self._await_end(grace_s)
        for worker in stubborn:
            send_signal(worker.pid, signal.SIGKILL)
        unkillable = self._await_end(_DIES_WITHIN_S) if stubborn else []
        if self._store is not None:
            send_signal(self._store.pid, signal.SIGKILL)
        left = kill_run(self._job.mark, besides=self._standing())
        self._watch.ended()
        reap_orphans(besides=self._standing())
        self._store = None
        self._logs.finish()
        self._forget_workers()
        if unkillable or left:
            raise WorldError(f"processes {sorted({w.pid for w in unkillable} | {*left})} cannot be killed")
        return tuple(worker.rank for worker in stubborn)

    def close(self) -> None:
        """End everything: workers, stores, standby."""
        self.stop((), 0.0)
        if self._stores is not None:
            self._stores.drop_reserve()
        if self._waiting is not None:
            self._waiting.close()
        if self._standby is not None:
            self._standby.close()
        kill_run(self._job.mark)
        if self._saver is not None:
            self._saver.close(within_s=_SAVED_WITHIN_S)
        if self._peers is not None:
            self._peers.close()  # after the savers, whose words it carries
        if self._mirror is not None and self._is_first:
            self._mirror.close(within_s=_MIRRORED_WITHIN_S)
        self._watch.close()

    def _standing(self) -> set[int]:
        """Processes that outlive an attempt."""
        standby = self._standby.pids if self._standby else set()
        waiting = self._waiting.pids if self._waiting else set()
        return {*standby, *waiting, self._stores.reserve_pid if self._stores else 0}

    def _warm(self) -> bool:
        if self._standby is None:
            return False
        self._standby.warm_up()
        try:
            return not self._standby.report().hazard
        except WorldError:
            return False

    def _launch(self, orders: list[ProcessOrder], ranks: list[Rank], *, warm: bool) -> tuple[list[int], bool]:
        if self._waiting is not None:
            with contextlib.suppress(WorldError):  # none, or not those: they are forked now
                return self._waiting.become(self._job.program, orders, ranks), True
        if warm and self._standby is not None:
            try:
                return self._standby.start(self._job.program, orders), True
            except WorldError:
                self._standby.close()  # a cold start is slow and works; the next attempt gets a new standby
        return [start_cold(self._job.program, order, environment=self._job.environment) for order in orders], False

    def _meet(self, attempt: int, *, is_first: bool) -> Meeting:
        """Where this attempt's ranks meet: at a fresh store of the first host, which tells the others."""
        if self._stores is None:
            return Meeting(address=self._job.address, port=0)
        if self._board is not None and not is_first:
            return find_meeting(self._board, attempt, self.is_called_off)
        try:
            self._store = self._stores.take(is_alive=lambda pid: read_stat(pid).state is not ProcessState.GONE)
        except (ConfigError, WorldError):
            if self._board is not None:
                tell_meeting(self._board, attempt, None)
            raise
        self._watch.add(self._store.pid)
        meeting = Meeting(address=self._job.address, port=self._store.port)
        if self._board is not None:
            tell_meeting(self._board, attempt, meeting)
        return meeting

    def _paths(self, folder: Path, attempt: int, rank: Rank, started_ns: int) -> WorkerPaths:
        def at(ending: str) -> str:
            return str(folder / f"{rank}.{ending}")

        return WorkerPaths(
            run=self._job.mark,
            attempt=attempt,
            rank=rank,
            page=at("page"),
            ring=at("ring"),
            server=at("sock"),
            stacks=at("stacks"),
            stack_signal=STACK_SIGNAL,
            error=at("error"),
            notes=at("notes"),
            checkpoints=str(self._job.checkpoints),
            memory=str(self._saver.path) if self._saver and self._has_memory else "",
            mirror=self._mirror.order.url if self._mirror else "",
            started_ns=started_ns,
            clock_zero_ns=self._clock.zero_ns,
        )

    def _environment(
        self, command: StartWorkers, group_rank: int, share: HostShare, paths: WorkerPaths
    ) -> dict[str, str]:
        place = Place(
            rank=paths.rank,
            local_rank=paths.rank - share.first_rank,
            world_size=command.world_size,
            local_world_size=share.count,
            group_rank=group_rank,
            group_world_size=len(command.shares),
            master_addr=self._meeting.address,
            master_port=self._meeting.port,
            agent_store=self._meeting.port > 0,
            restart_count=command.restart_count,
            restart_count_max=self._job.restart_count_max,
            rdzv_id=self._job.rdzv_id,
            error_file=f"{paths.error}.torch",
        )
        environment = torchrun_environment(place) | paths.to_environment()
        if self._job.virtual_local_rank:
            visible = self._job.environment.get("CUDA_VISIBLE_DEVICES", "")
            devices = visible.split(",") if visible else [str(number) for number in range(share.count)]
            environment |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[place.local_rank % len(devices)]}
        return environment

    def _enrol(self, paths: WorkerPaths, pid: int) -> None:
        self._watch.add(pid)
        self._roster.workers[Rank(paths.rank)] = Worker(
            rank=Rank(paths.rank),
            pid=pid,
            page=PageReader(Path(paths.page), to_run_s=self._clock.to_run_s),
            ring=RingReader(Path(paths.ring)),
            server=Path(paths.server),
            stacks=Path(paths.stacks),
            error=Path(paths.error),
            notes=Path(paths.notes),
        )

    def _describe(self, worker: Worker, code: int) -> Exit:
        self._logs.copy_to_console()
        record = _error_record(worker.error)
        at_ns = record.get("at_ns")
        return Exit(
            rank=worker.rank,
            pid=worker.pid,
            exit_code=code,
            at_s=self._clock.now_s(),
            error_type=str(record.get("type", "")),
            error_message=str(record.get("message", "")),
            error_where=str(record.get("where", "")),
            error_at_s=self._clock.to_run_s(at_ns) if isinstance(at_ns, int) else None,
            traceback=str(record.get("traceback", "")),
            last_lines="" if code == 0 else self._logs.last_lines(worker.rank),
            oom_killed=code == -signal.SIGKILL and _oom_kill_count() > self._oom_kills,
        )

    def _await_end(self, timeout_s: float) -> list[Worker]:
        """Wait for the living to end; those that still live afterwards."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for pid, code in self._watch.ended().items():
                if (worker := self._roster.by_pid(pid)) is not None:
                    worker.exit_code = code
            left_s = deadline_s - time.monotonic()
            if not (living := self._roster.living()) or left_s <= 0:
                return living
            self._watch.wait(min(left_s, _PAUSE_S))

    def _tell_broken(self) -> None:
        """No step will end any more: SIGTERM asks nobody to save one first."""
        for folder in {worker.notes.parent for worker in self._roster.workers.values()}:
            with contextlib.suppress(OSError):
                mark_broken(folder)

    def _forget_workers(self) -> None:
        folders = {worker.notes.parent for worker in self._roster.workers.values()}
        for worker in self._roster.workers.values():
            worker.page.close()
            if worker.ring is not None:
                worker.ring.close()
        self._roster.workers.clear()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _error_record(path: Path) -> dict[str, object]:
    """What the worker wrote about the exception that ended it; empty when it wrote none, or scribbled."""
    try:
        record = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return record if isinstance(record, dict) else {}


def _oom_kill_count() -> int:
    """How often this host's kernel has killed for memory since boot; 0 where it does not count."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
