"""What `attach` gives to a training script: a loop that continues where the last attempt was saved, and saves itself.

It knows the order of things; how state, data and files are kept is told in state.py, data.py and checkpoint.py.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch

from everstep.adapters.checkpoints.peer_files import ROSTER_NAME
from everstep.adapters.checkpoints.stop_page import StopPage
from everstep.domain.errors import ConfigError, WorldError
from everstep.domain.phases import Phase
from everstep.worker.data import randomness
from everstep.worker.data.feed import Feed, copy_of
from everstep.worker.ddp_buckets import Buckets
from everstep.worker.exactness import doubts_at_resume, doubts_at_save, iterations_until_settled
from everstep.worker.format.manifest import Manifest
from everstep.worker.observer import Observer, current
from everstep.worker.ranks import Ranks
from everstep.worker.restoring.restore import Restored, Restoring
from everstep.worker.resume_promise import checkpoint_directory, keep_promise
from everstep.worker.saving.by_ranks import Checkpoints
from everstep.worker.saving.memory_tier import MemoryTier, draft_of, memory_folder
from everstep.worker.saving.schedule import SaveConfig, Schedule, job_mtbf_s
from everstep.worker.state import Sharing, TrainingState, versions_of
from everstep.worker.stopping import Stopping
from everstep.worker.withheld_steps import marks_of, withheld_steps

_log = logging.getLogger(__name__)
_MEMORY_AFTER_STEPS = 2
"""Steps of an attempt before the memory tier is opened: the first makes the optimizer's state, the next is timed."""
_FINAL_WITHIN_S = 10.0
_attached = False


def attach(
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    directory: str | Path | None = None,
    save_every_steps: int | None = None,
    save_every_s: float = 30.0,
    save_within_s: float = 600.0,
    keep: int = 2,
    rehearse: bool | Literal["auto"] = "auto",
) -> "Run":
    """Restore the newest complete checkpoint, if there is one, and give the run. A collective, once per rank.

    Args:
        model: as it trains: plain, wrapped in DistributedDataParallel, or sharded by fully_shard.
        extra: more objects with state_dict and load_state_dict, by name: a GradScaler, an averaged model.
        directory: shared by all hosts; `everstep run` gives one, else ./everstep-checkpoints.
        save_every_steps: a fixed interval instead of a measured one.
        save_every_s: the shortest measured interval, and the first.
        save_within_s: the longest.
        keep: complete checkpoints that stay on disk.
        rehearse: whether the first step after a resume runs once for show; docs/attach.md says why.

    Raises:
        ConfigError: called twice, something that cannot be saved, or a checkpoint that this run cannot use.
    """
    global _attached  # noqa: PLW0603 - one run per process is the point
    if _attached:
        raise ConfigError("attach() was called twice in one process; keep the run that the first call gave")
    config = SaveConfig(
        every_steps=save_every_steps, every_s=save_every_s, within_s=save_within_s, keep=keep, rehearse=rehearse
    )
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra or {})
    state.capture(weights=True)  # what cannot be saved is told now and not after ten steps
    observer = current()
    ranks = Ranks()
    checkpoints = Checkpoints(checkpoint_directory(directory, observer), ranks, observer, keep=keep)
    _attached = True
    observer.counted_by_attach = True
    observer.notes.part("attached")
    with observer.during(Phase.RESTORING):
        memory = memory_folder(observer)
        restored = Restoring(state, checkpoints.directory, memory, ranks, observer, checkpoints.attempt).run()
        keep_promise(restored=restored is not None)
        tier = MemoryTier(memory, ranks, observer, config)
        buckets = Buckets(state, (extra or {}).values())
        if restored is not None and config.rehearse is not True:
            buckets.settle(restored.own.get("buckets", ""), ranks)
        run = Run(config, state, checkpoints, tier, buckets, restored)
        run.stopping = _stopping(memory, ranks, observer)
    if restored is not None:
        observer.notes.part("restored")
    return run


def _stopping(memory: Path | None, ranks: Ranks, observer: Observer) -> Stopping | None:
    """How this rank hears of an announced stop; None where the ranks have no memory, or not one, to agree in."""
    if memory is None or observer.paths is None or (memory / ROSTER_NAME).exists():
        return None
    try:
        page = StopPage(memory, attempt=observer.paths.attempt, world_size=ranks.world_size)
    except WorldError:
        return None
    stopping = Stopping(page, ranks.rank, Path(observer.paths.page).parent)
    stopping.watch()
    return stopping


def _rehearsals(config: SaveConfig, state: TrainingState, buckets: Buckets) -> int:
    if config.rehearse is False or buckets.are_settled:
        return 0
    return max(iterations_until_settled(state.ddp), int(config.rehearse is True))


class Run:
    """A run in training; `attach` makes it."""

    def __init__(
        self,
        config: SaveConfig,
        state: TrainingState,
        checkpoints: Checkpoints,
        memory: MemoryTier,
        buckets: Buckets,
        restored: Restored | None,
    ) -> None:
        self._config = config
        self._state = state
        self._checkpoints = checkpoints
        self._observer = observer = current()
        self._memory = memory
        self._buckets = buckets
        self._leads = checkpoints.leads
        self._resume: dict[str, Any] | None = None  # position and random numbers, until the loop stands there
        self._position: dict[str, Any] | None = None  # where the loop before stood
        self._feed: Feed | None = None
        self._loader: Any = None
        self._loop = 0
        self._metrics: dict[str, float] = {}
        self._rehearsing = self._in_body = self._left_early = self._save_asked = False
        self._step = self._saved_step = 0
        self._rehearsals = 0  # still to come
        self._has_other_slots = False  # those in memory are of another number of ranks
        self.stopping: Stopping | None = None
        """Set by `attach`: hears of an announced stop."""
        self._before: tuple[Callable[[], None] | None, list[int]] = None, []  # reads again what was restored
        if restored is not None:
            self._step = restored.manifest.step
            self._saved_step = self._step if restored.is_on_disk else 0
            self._rehearsals = _rehearsals(config, state, buckets)
            self._resume = restored.own
            self._position = self._resume["data"]
            if self._rehearsals:
                self._before = restored.again, versions_of(state)
            self._tell_doubts(doubts_at_resume(restored.manifest))
            self._has_other_slots = restored.manifest.world_size != checkpoints.world_size
        self._memory_wait = _MEMORY_AFTER_STEPS
        self._memory_opens_after = self._step + self._memory_wait
        interval = restored.manifest.interval_steps if restored else None
        self._schedule = Schedule(
            config,
            step=self._step,
            interval_steps=interval,
            mtbf_s=lambda: job_mtbf_s(observer, checkpoints.world_size),
        )

    @property
    def step(self) -> int:
        """Steps finished, over all attempts."""
        return self._step

    @property
    def rehearsing(self) -> bool:
        """Whether this step is run for show: its effect on what was attached is undone."""
        return self._rehearsing

    @property
    def metrics(self) -> dict[str, float]:
        """What was last logged."""
        return dict(self._metrics)

    def steps(self, loader: Iterable[Any], *, until: int) -> Iterator[Any]:
        """The batches from the next one on, epoch after epoch, until `until` steps are finished over all attempts.

        A step has ended when the loop asks for the next batch; leave the loop by `until` rather than by `break`.

        Raises:
            ConfigError: `until` is not above 0, or the loader is not the one that was saved.
        """
        if until <= 0:
            raise ConfigError(f"run.steps(until={until}) must be at least 1")
        self._loop += 1
        feed = Feed(loader, self._observer.beat)
        feed.agree(self._checkpoints.agree)
        return self._iterate(feed, loader, until)

    def log(self, *, loss: float | None = None, **metrics: float) -> None:
        """Report numbers of this step; ignored in a rehearsal."""
        if self._rehearsing:
            return
        if loss is not None:
            metrics["loss"] = loss
            self._observer.log_loss(float(loss))
        self._metrics = {**self._metrics, **metrics}

    def save(self) -> None:
        """Save now, or inside of the loop at the end of this step. A collective.

        Raises:
            ConfigError: the loop was left by `break`, so that it is unknown whether its last step counts.
        """
        if self._left_early:
            raise ConfigError(
                "run.save() after a break cannot know whether the last step counts; call it before the break"
            )
        if self._rehearsing:
            return
        if self._in_body:
            self._save_asked = True
        else:
            self._save()

    def evaluating(self) -> AbstractContextManager[None]:
        """Mark an evaluation, which may take longer than a step: `with run.evaluating():`."""
        self._memory.finish()  # an evaluation may put other weights in for a while
        return self._observer.during(Phase.EVALUATING)

    def _iterate(self, feed: Feed, loader: Any, until: int) -> Iterator[Any]:
        self._left_early = False
        self._begin(feed, over=self._step >= until)
        if self._step >= until:
            if self._memory.spans_hosts and self._memory.is_wanted and not self._has_other_slots:
                # What was restored may be in memory alone: the savers of the hosts write for this attempt only then.
                self._memory.open(self._state, self._checkpoints.directory, self._step)
            return
        self._feed, self._loader = feed, loader
        warm = False
        while self._step < until:
            self._observer.fetch_batch()
            batch = feed.next()
            if not warm:
                self._observer.enter(Phase.WARMING_UP)
                warm = True
            if self._rehearsals:
                yield from self._rehearse(batch)
                self._observer.notes.part("rehearsed")
            self._state.begin_body()
            self._in_body = True
            try:
                yield batch
            except GeneratorExit:
                self._left_early, self._save_asked = True, False
                self._memory.finish()
                raise
            finally:
                self._in_body = False
            self._finish_step(until)

    def _begin(self, feed: Feed, *, over: bool) -> None:
        """Stand at the restored position. The random numbers come last: standing there draws some.

        Args:
            over: this loop has nothing to do. The checkpoint may still be from its end.
        """
        if self._resume is None:
            return
        position = self._resume["data"]
        loop = position["loop"] if position is not None else self._loop
        if over and loop > self._loop:
            return
        with self._observer.during(Phase.RESTORING):
            if loop > self._loop:
                self._tell_doubts([f"the checkpoint stands in loop {loop} of the script, not in loop {self._loop}"])
            elif position is not None and loop == self._loop and not over:
                feed.resume(position)
                self._tell_doubts(feed.changes(position))
            randomness.put_back_own(self._resume["random"])
        self._resume = None

    def _rehearse(self, batch: Any) -> Iterator[Any]:
        """Steps for show, so that DDP settles its order of sums; after each everything is as it was before."""
        self._memory.finish()
        again, versions = self._before
        self._before = None, []
        if versions != versions_of(self._state):
            again = None
        before = self._state.snapshot(weights=again is None)
        after_fetch = randomness.capture()
        while self._rehearsals:
            self._rehearsals -= 1
            self._state.begin_body()
            marks = marks_of(self._state)
            self._rehearsing = True
            try:
                with withheld_steps(self._state.optimizer):
                    yield copy_of(batch)
            finally:
                self._rehearsing = False
            if not self._state.stepped:
                self._tell_doubts(["the optimizer did not step in the rehearsal"])
            if again is not None and marks != marks_of(self._state):
                again()
            self._state.put_back(before, keep=self._rehearsals > 0)
            randomness.put_back(after_fetch)
            self._observer.beat()

    def _finish_step(self, until: int) -> None:
        self._step += 1
        self._observer.finish_step(self._step)
        self._memory.note_step()
        self._memory.tell_news(self._checkpoints.directory, self._checkpoints.attempt)
        due = self._schedule.due(self._step)
        if self.stopping is not None and self.stopping.due(self._step):
            self._stop(self.stopping, until)
        if self._save_asked or self._step == until:
            self._save()
        elif self._step >= self._memory_opens_after and self._memory.is_wanted:
            if self._has_other_slots:  # they make room, so what they hold must be somewhere else first
                self._save()
                self._has_other_slots = False
            with self._observer.during(Phase.SAVING):
                self._memory.open(self._state, self._checkpoints.directory, self._step)
            self._memory_wait *= 2  # if it was too early, in the middle of a first accumulation
            self._memory_opens_after = self._step + self._memory_wait
            if self._memory.is_on(self._step):
                self._save_to_memory()
        elif self._memory.is_on(self._step):
            if self._memory.due(self._step, stepped=self._state.stepped):
                self._save_to_memory()
        elif due:
            self._save()
        if self._step == until and self._saved_step != self._step:
            self._keep_final()

    def _keep_final(self) -> None:
        """The disk did not take the last step. In memory it waits for the saver, and for the same command again."""
        is_kept = False
        if self._memory.is_on(self._step):
            self._save_to_memory()
            is_kept = self._memory.await_all(self._step, _FINAL_WITHIN_S)
        if self._leads:
            where = "in memory alone, for the saver to try again" if is_kept else "on no disk"
            _log.warning("everstep: the final state, step %d, is %s: its save failed", self._step, where)

    def _stop(self, stopping: Stopping, until: int) -> None:
        """Save the step that all ranks save, where this is it, and leave if this rank was asked to."""
        if stopping.begin_save(self._step):
            if self._memory.is_on(self._step) and self._step < until:
                self._save_to_memory()
                self._memory.await_all(self._step, stopping.patience_s())
            else:
                self._save()
        stopping.leave()

    def _save(self) -> None:
        self._save_asked = False
        self._memory.finish()
        if self._saved_step == self._step:
            return
        started_s = time.monotonic()
        saved = self._checkpoints.save(self._state, self._own(), self._draft())
        if not saved.error:
            self._saved_step = self._step
        interval = self._checkpoints.agree(lambda: self._schedule.decide(time.monotonic() - started_s))
        self._schedule.agree(self._step, interval)

    def _save_to_memory(self) -> None:
        self._memory.save(self._step, self._own(), self._draft())

    def _draft(self) -> Manifest:
        unsettled = self._state.ddp if not self._buckets.record else None
        doubts = doubts_at_save(unsettled, self._config.rehearse, self._loader)
        replicated = self._state.sharing is Sharing.REPLICATED
        return draft_of(self._step, self._checkpoints.world_size, self._schedule.interval_steps, doubts, replicated)

    def _own(self) -> dict[str, Any]:
        """Where this rank stands in its data and its random numbers, and how DDP sums."""
        if self._feed is not None:
            self._position = {**self._feed.position(), "loop": self._loop}
        return {"random": randomness.capture_own(), "data": self._position, "buckets": self._buckets.record}

    def _tell_doubts(self, doubts: list[str]) -> None:
        if doubts and self._leads:
            _log.warning("everstep: the resume may not be bit-identical: %s", "; ".join(doubts))
