"""The `Workers` and `Pages` ports: real processes without torch, and the simulated host."""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.adapters.polling import wait_for

from everstep.adapters.clock import MonotonicClock
from everstep.adapters.workers.local_workers import LocalJob, LocalWorkers, Parts
from everstep.adapters.workers.processes import processes_of_run
from everstep.adapters.workers.roster import Roster
from everstep.adapters.workers.standby import Program
from everstep.adapters.workers.worker_environment import RUN_VARIABLE
from everstep.adapters.workers.worker_logs import LogChoice, WorkerLogs
from everstep.adapters.workers.worker_notes import RosterPages
from everstep.domain.causes import FaultKind
from everstep.domain.commands import HostShare, StartWorkers
from everstep.domain.errors import WorldError
from everstep.domain.ids import Attempt, HostId, Rank
from everstep.domain.phases import Phase
from everstep.ports import Exit, Pages, Workers
from everstep.sim.clock import SimClock
from everstep.sim.host import SimHost, SimHostView
from everstep.sim.training import SimTraining, TrainingConfig

HOST = HostId("here")
FIRST, COUNT = 2, 3
SCRIPT = """
import os, subprocess, sys, time
import everstep.worker
rank = int(os.environ["RANK"])
if "--stubborn" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--child" in sys.argv:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
while True:
    everstep.worker.step()
    time.sleep(0.01)
"""


@dataclass
class Place:
    """One host's workers, however they are made; `move` lets time go by."""

    workers: Workers
    pages: Pages
    move: Callable[[], object]

    def start(self, attempt: int = 1) -> tuple[int, ...]:
        others = HostShare(host=HostId("elsewhere"), first_rank=Rank(0), count=FIRST)
        mine = HostShare(host=HOST, first_rank=Rank(FIRST), count=COUNT)
        started = self.workers.start(
            StartWorkers(
                at_s=0.0,
                attempt=Attempt(attempt),
                shares=(others, mine),
                world_size=FIRST + COUNT,
                restart_count=attempt - 1,
                faults=(),
                rung=None,
                why="test",
            )
        )
        return started.pids

    def steps(self) -> dict[Rank, int]:
        self.move()
        return {view.rank: view.step for view in self.pages.views()}

    def all_step(self) -> bool:
        steps = self.steps()
        return len(steps) == COUNT and min(steps.values()) >= 2

    def exits(self, count: int) -> list[Exit]:
        found: list[Exit] = []

        def enough() -> bool:
            self.move()
            found.extend(self.workers.exits())
            return len(found) >= count

        wait_for(enough, f"{count} exits")
        return found


def simulated(_folder: Path) -> Iterator[Place]:
    clock = SimClock()
    training = SimTraining(TrainingConfig(steps=10_000), world_size=COUNT, rng=random.Random(1))
    host = SimHost(HOST, training=training, clock=clock)

    def move() -> None:
        clock.advance(0.05)
        training.advance(clock.now_s())

    yield Place(host, SimHostView(HOST, workers=host, clock=clock), move)


def make_local(folder: Path, *arguments: str) -> tuple[LocalWorkers, Place, str]:
    (folder / "scratch").mkdir(mode=0o700)
    (folder / "train.py").write_text(SCRIPT)
    run, clock, roster = f"contract-{folder.name}-{id(folder)}", MonotonicClock(), Roster()
    job = LocalJob(
        mark=run,
        host=HOST,
        program=Program(arguments=(sys.executable, str(folder / "train.py"), *arguments), python=False),
        scratch=folder / "scratch",
        checkpoints=folder / "checkpoints",
        address="127.0.0.1",
        rdzv_id=run,
        restart_count_max=0,
    )
    logs = WorkerLogs(folder / "logs", choice=LogChoice(), console=None)
    workers = LocalWorkers(job, Parts(clock=clock, logs=logs, roster=roster, standby=None, stores=None))
    return workers, Place(workers, RosterPages(roster), lambda: workers.wait(0.01)), run


def real(folder: Path) -> Iterator[Place]:
    workers, place, run = make_local(folder)
    yield place
    workers.close()
    assert processes_of_run(run) == []


@pytest.fixture(params=[real, simulated])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from request.param(tmp_path)


def test_every_rank_of_the_share_starts_with_a_page_of_its_own_and_steps(place: Place) -> None:
    pids = place.start()
    assert len(set(pids)) == COUNT
    assert [view.rank for view in place.pages.views()] == [2, 3, 4]
    wait_for(place.all_step, "all ranks to step")
    assert {view.phase for view in place.pages.views()} == {Phase.TRAINING}
    assert list(place.workers.exits()) == []
    assert place.workers.store_loss() == ""


def test_marks_are_told_once_in_their_order(place: Place) -> None:
    place.start()
    numbers: dict[Rank, list[int]] = {Rank(FIRST + n): [] for n in range(COUNT)}

    def five_each() -> bool:
        place.move()
        for view in place.pages.views():
            numbers[view.rank] += [mark.step for mark in view.marks if mark.is_step]
        return min(map(len, numbers.values())) >= 5

    wait_for(five_each, "five marks each")
    for steps in numbers.values():
        assert steps == list(range(1, len(steps) + 1))


def test_a_killed_rank_is_told_once_by_its_signal_and_its_page_stays(place: Place) -> None:
    pids = place.start()
    wait_for(place.all_step, "all ranks to step")
    place.workers.signal(Rank(3), FaultKind.KILL)
    (end, *others) = place.exits(1)
    assert (end.rank, end.pid, end.exit_code) == (3, pids[1], -9)
    assert 3 not in {other.rank for other in others}
    assert 3 not in {other.rank for other in place.workers.exits()}
    assert next(view for view in place.pages.views() if view.rank == 3).step >= 2


def test_a_frozen_rank_does_not_end(place: Place) -> None:
    place.start()
    wait_for(place.all_step, "all ranks to step")
    place.workers.signal(Rank(4), FaultKind.FREEZE)
    for _ in range(5):
        place.move()
    assert list(place.workers.exits()) == []
    place.workers.stop((Rank(4),), 5.0)


def test_a_rank_that_is_asked_to_go_ends_by_sigterm(place: Place) -> None:
    place.start()
    wait_for(place.all_step, "all ranks to step")
    place.workers.signal(Rank(2), FaultKind.MAINTENANCE)
    assert place.exits(1)[0].exit_code == -15


def test_after_a_stop_nothing_is_left_to_see_and_the_next_attempt_starts_anew(place: Place) -> None:
    place.start()
    wait_for(place.all_step, "all ranks to step")
    place.workers.stop((), 5.0)
    assert list(place.workers.exits()) == []
    assert list(place.pages.views()) == []
    assert list(place.pages.notes()) == []
    place.start(attempt=2)
    wait_for(place.all_step, "all ranks to step again")
    place.workers.stop((), 5.0)


def test_stopping_what_does_not_run_is_no_mistake(place: Place) -> None:
    assert place.workers.stop((), 0.0) == ()
    place.start()
    place.workers.stop((), 0.0)
    assert place.workers.stop((), 0.0) == ()


def test_a_real_stop_kills_the_stubborn_after_the_grace_and_names_them(tmp_path: Path) -> None:
    workers, place, run = make_local(tmp_path, "--stubborn", "--child")
    place.start()
    wait_for(place.all_step, "all ranks to step")
    assert workers.stop((Rank(2),), 0.2) == (3, 4)  # rank 2 got no grace
    assert processes_of_run(run) == []  # their children in other sessions are gone too
    workers.close()


def test_a_real_command_that_does_not_exist_may_work_later_and_leaves_nothing(tmp_path: Path) -> None:
    workers, place, run = make_local(tmp_path)
    broken = LocalJob(
        mark=run,
        host=HOST,
        program=Program(arguments=("/none/such",), python=False),
        scratch=tmp_path / "scratch",
        checkpoints=tmp_path,
        address="127.0.0.1",
        rdzv_id="r",
        restart_count_max=0,
        environment={RUN_VARIABLE: run},
    )
    logs = WorkerLogs(tmp_path / "logs2", choice=LogChoice(), console=None)
    parts = Parts(clock=MonotonicClock(), logs=logs, roster=Roster(), standby=None, stores=None)
    place.workers = LocalWorkers(broken, parts)
    with pytest.raises(WorldError, match="cannot start /none/such: No such file"):
        place.start()
    assert place.workers.stop((), 0.0) == ()
    workers.close()


def test_the_real_output_is_in_a_file_for_each_rank(tmp_path: Path) -> None:
    workers, place, _ = make_local(tmp_path)
    place.start()
    wait_for(place.all_step, "all ranks to step")
    workers.close()
    assert (tmp_path / "logs" / "attempt-0001" / "rank-3.stdout.log").read_text() == "rank 3 of 5\n"
