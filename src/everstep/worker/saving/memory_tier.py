"""The memory tier as `attach` uses it: opened by all ranks together, then saved to without a collective.

It knows when to save and which slot to take; docs/attach.md tells what it survives. Where it cannot be used, it says
why once, and checkpoints go to disk alone.
"""

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.adapters.checkpoints.memory_folder import taken_bytes
from everstep.adapters.checkpoints.memory_slots import (
    FACTS_BYTES_MAX,
    SLOT_COUNT,
    RankSlots,
    SavePages,
    SavePlan,
    SaverWord,
    SlotHeader,
    image_path,
    ranks_present,
    rest_path,
)
from everstep.adapters.checkpoints.peer_files import read_roster
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.domain.events import CheckpointFailed, CheckpointSaved
from everstep.domain.ids import Attempt
from everstep.domain.phases import Phase
from everstep.policy.checkpoints import Slot, SlotState, committed_steps, slot_to_write
from everstep.policy.peers import wards_of
from everstep.policy.saver_cost import SaverCost
from everstep.policy.staging import CommitWatch, Course, Pace, Way, way_of
from everstep.worker.format import layout as layouts
from everstep.worker.format.dcp_metadata import complete
from everstep.worker.format.layout import Offer
from everstep.worker.format.manifest import Manifest, folder_name
from everstep.worker.format.trailer import pack
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.saving.host_pins import HostPins
from everstep.worker.saving.memory_image import Image, lay_out, remove, write_rest
from everstep.worker.saving.memory_room import room_bytes
from everstep.worker.saving.memory_state import Bulk, Unfit, shares_of
from everstep.worker.saving.parallel_groups import Group, arrange_keepers, arranged, groups_led_by
from everstep.worker.saving.replicas import agree_on_replicas
from everstep.worker.saving.saver_order import SaverOrder, order_saver
from everstep.worker.saving.schedule import SaveConfig, best_interval_s, job_mtbf_s
from everstep.worker.saving.staging import Staged, Stager, frozen, pin
from everstep.worker.saving.storage_watch import Patience, tell_delay
from everstep.worker.state import OWN, TrainingState

_log = logging.getLogger(__name__)
_ROOM_SHARE = 0.5
"""The slots of all ranks may take at most this share of the memory that is free."""
_ASSUMED_BYTES_PER_S = 2e9
_COPY_COUNT = 2
"""Of several hosts each keeps two copies of its own ranks' slots, and of those whose keeper it is (decision 0015)."""
_LONG_BYTES = 1 << 30
"""From this size on a save is a phase of its own, so that its silence is not taken for a hang's."""
_AHEAD_STEPS = 32
"""How far ahead a new stride is announced: no rank of a job that trains together is that far from another."""
_REVIEW_STEPS = 64
"""So often the ranks of several hosts hear from rank 0 whether to go on as they do, all at once."""
_SILENT_S = 10.0
"""Over several hosts, where news of a complete step comes some saves later."""
_WAIT_FOR_STEP_MAX = 16
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bid:
    """One rank's word before the tier is opened.

    Attributes:
        host: the rank's, where the job has several.
        groups: the parallel groups that it is the first rank of, there.
        there_bytes, room_bytes: what the run's folder on this host has taken, and what is still free.
    """

    unfit: str = ""
    is_early: bool = False
    size_bytes: int = 0
    offer: Offer | None = None
    host: str = ""
    groups: tuple[Group, ...] = ()
    there_bytes: int = 0
    room_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """Rank 0's word: the layout of all together and the first stride, or why not; `is_early` is worth another try."""

    problem: str = ""
    is_early: bool = False
    layout: str = ""
    stride: int = 0


class MemoryTier:
    """One rank's side. `open` is a collective, the rest is not.

    Args:
        folder: the run's folder in shared memory; None where nobody gave one.
    """

    def __init__(self, folder: Path | None, ranks: Ranks, observer: Observer, config: SaveConfig) -> None:
        self._folder = folder
        self._ranks = ranks
        self._observer = observer
        self._config = config
        self._closed = folder is None
        self._layout, self._trailer = "", b""
        self._bulk: Bulk | None = None
        self._images: list[Image] = []
        self._headers: list[RankSlots] = []
        self._pages: SavePages | None = None
        self._pace = Pace()
        self._stager = Stager()
        self._saver_cost = SaverCost()
        self._saver_every_s = config.every_s
        self._directory = Path()
        self._is_long = False
        self._roster = read_roster(folder) if folder is not None else None
        self._host_pins = HostPins(folder, self._roster) if folder is not None and self._roster is not None else None
        self._orders_saver = self._host_pins.orders(ranks.rank) if self._host_pins else ranks.leads
        self._turn = 0  # saves that were due, alike on every rank
        self._may_overlap = self._untested = True
        self._saves_told = self._failures_told = 0
        self._disk_patience = Patience()
        self._deferred = 0
        self._commits = CommitWatch()

    @property
    def spans_hosts(self) -> bool:
        """Whether other hosts have a part in it. The same on every rank.

        Then a changed plan reaches all ranks by a collective, since news of it might reach some late.
        """
        return self._roster is not None

    @property
    def is_wanted(self) -> bool:
        """Whether `open` may still succeed. The same on every rank."""
        return not self._closed and self._pages is None

    def is_on(self, step: int) -> bool:
        """Whether saves after `step` go to memory. The same on every rank."""
        return self._pages is not None and not self._pages.plan().is_off(step)

    def open(self, state: TrainingState, directory: Path, step: int) -> None:
        """Lay out the slots, or say why not, or leave it for later. A collective, also where it fails."""
        assert self._folder is not None
        share, count = shares_of(state.sharing, self._ranks.rank, self._ranks.world_size)
        bid = self._bid(state, share, count, agree_on_replicas(state, self._ranks))
        bids = [msgspec.json.decode(b, type=_Bid) for b in self._ranks.gather(msgspec.json.encode(bid))]
        opening = self._tell(self._judge(bids) if self._ranks.leads else _Opening())
        if opening.is_early:
            return
        problem = opening.problem
        if not problem:
            self._layout = opening.layout
            self._trailer = self._ranks.broadcast(self._trailer)
            mine = self._lay_out(_groups_of(bids))
            problem = next((p.decode() for p in self._ranks.gather(mine.encode()) if p), "")
        if problem:
            self._close(problem)
            return
        self._directory = directory
        if self._orders_saver:
            self._order_saver()
        if self._ranks.leads:
            self._start_plan(step, opening.stride)
        self._share_plan()
        self._is_long = self._bulk is not None and self._bulk.size_bytes >= _LONG_BYTES
        register_optimizer_step_pre_hook(torch.compiler.disable(self._hold_writers))  # a compiled step calls it too

    def note_step(self) -> None:
        """A step has ended; called before anything is saved."""
        self._pace.copied(waited_s=0.0, busy_s=self._stager.busy_s())
        self._pace.end_step(time.monotonic())

    def due(self, step: int, *, stepped: bool) -> bool:
        """Whether to save to memory now; called once for each step.

        Args:
            stepped: the optimizer stepped; in the middle of an accumulation the save waits for it, but not for ever.
        """
        assert self._pages is not None
        if self.spans_hosts and step % _REVIEW_STEPS == 0:
            self._review(step)
        every = self._config.every_steps
        wanted = self._deferred > 0 or self._pages.plan().due(step) or bool(every and step % every == 0)
        if not wanted:
            return False
        if not stepped and self._deferred < _WAIT_FOR_STEP_MAX:
            self._deferred += 1
            return False
        self._deferred = 0
        return True

    def save(self, step: int, own: dict[str, object], draft: Manifest) -> None:
        """Copy this rank's state to a free slot. Never raises for want of room or fit: it stops and says so once.

        Args:
            own: what OWN holds beside gradients: `random` as `randomness.capture` gave it, and `data`.
        """
        assert self._bulk is not None
        if not self._is_long:
            self._save(step, own, draft)
            return
        with self._observer.during(Phase.SAVING):
            self._save(step, own, draft)

    def finish(self) -> None:
        """Wait until the save under way is whole. Call it before anything but an optimizer changes the state."""
        try:
            problem = self._stager.finish()
        except (Unfit, OSError) as error:
            self._give_up(f"saving to memory stopped: {error}")
            return
        if problem:
            self._may_overlap = False
            _log.warning("everstep: rank %d: %s; from now on training waits for each copy", self._ranks.rank, problem)

    def await_all(self, step: int, timeout_s: float) -> bool:
        """Whether `step` is complete on all ranks in time; what counts else is the last one that is."""
        self.finish()
        deadline_s = time.monotonic() + timeout_s
        while step not in committed_steps([headers.slots() for headers in self._headers]):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _save(self, step: int, own: dict[str, object], draft: Manifest) -> None:
        assert self._bulk is not None
        assert self._pages is not None
        began_s = time.monotonic()
        self.finish()
        plan = self._pages.plan()
        way = way_of(plan.at(step).way, self._turn) if self._may_overlap else Way.IN_LINE
        self._turn += 1
        slots = [headers.slots() for headers in self._headers]
        pins = self._pins(slots)
        slot = slot_to_write(self._ranks.rank, slots, pins)
        if slot is not None:
            try:
                self._write(slot, step, own, draft, way)
            except (Unfit, OSError) as problem:
                self._give_up(f"saving to memory stopped at step {step}: {problem}")
                return
        now_s = time.monotonic()
        self._pace.saved(way, stall_s=now_s - began_s, now_s=now_s)
        if self._ranks.leads:
            newest = next(iter(committed_steps(slots)), 0)
            held = pins & {found.step for found in slots[self._ranks.rank]} - {newest}
            if len(held) < SLOT_COUNT - 1:  # else there is no slot for another step, as long as the disk hangs
                self._commits.note(newest, now_s)
            if not self.spans_hosts:
                self._adjust(step, plan, from_step=step + max(_AHEAD_STEPS, 4 * plan.at(step).stride))

    def _hold_writers(self, *_: object) -> None:
        """An optimizer is about to step."""
        if (waited_s := self._stager.hold_writers()) > 0:
            self._pace.copied(waited_s=waited_s, busy_s=0.0)

    def tell_news(self, directory: Path, attempt: int) -> None:
        """What the saver has done since the last call, as notes. For rank 0."""
        if self._pages is None or not self._ranks.leads:
            return
        word, notes = self._pages.word(), self._observer.notes
        self._pace_saver(word)
        if word.saves != self._saves_told:
            self._saves_told = word.saves
            shown = folder_name(word.durable)
            paths = self._observer.paths
            inside = paths is not None and directory == Path(paths.checkpoints)
            notes.write(
                CheckpointSaved(
                    at_s=notes.now_s(),
                    attempt=Attempt(attempt),
                    step=word.durable,
                    path=f"{directory.name}/{shown}" if inside else str(directory / shown),
                    size_bytes=word.size_bytes,
                    duration_s=word.took_s,
                )
            )
        if word.failures != self._failures_told:
            self._failures_told = word.failures
            assert self._folder is not None
            reason = _first_line(self._folder / "saver.error")
            notes.write(CheckpointFailed(at_s=notes.now_s(), attempt=Attempt(attempt), step=word.failed, reason=reason))
            _log.warning("everstep: %s; training goes on, and the newest state is in memory", reason)
        silent_s = word.silent_s(time.monotonic_ns())
        if self._disk_patience.is_over(silent_s, usual_s=word.took_s):
            step = word.pinned or word.durable
            reason = f"the disk has not answered for {silent_s:.0f} s; training goes on, in memory only"
            tell_delay(self._observer, attempt, step=step, waited_s=silent_s, reason=reason)

    def _pace_saver(self, word: SaverWord) -> None:
        """Tell the saver another interval where what its saves cost, and how often the job fails, ask for it."""
        busy = word.pinned > 0
        self._saver_cost.end_step(time.monotonic(), is_busy=busy, saves=word.saves, took_s=word.took_s)
        pause_s = self._saver_cost.pause_s()
        if busy or pause_s is None or self._config.every_steps is not None:
            return
        every_s = best_interval_s(self._config, pause_s, job_mtbf_s(self._observer, self._ranks.world_size))
        if not self._saver_every_s * 0.7 <= every_s <= self._saver_every_s * 1.3:
            self._saver_every_s = every_s
            self._order_saver()

    # Opening.

    def _bid(self, state: TrainingState, share: int, count: int, replicas: frozenset[str]) -> _Bid:
        if not state.optimizer.state:
            return _Bid(is_early=True)
        try:
            self._bulk = Bulk(state, share=share, share_count=count, replicas=replicas)
        except Unfit as problem:
            return _Bid(unfit=str(problem))
        assert self._folder is not None
        return _Bid(
            size_bytes=self._bulk.size_bytes,
            offer=self._bulk.offer,
            host=self._roster.host if self._roster else "",
            groups=groups_led_by(self._ranks.rank, state) if self._roster else (),
            there_bytes=taken_bytes(self._folder),
            room_bytes=int(room_bytes(self._folder)),
        )

    def _judge(self, bids: list[_Bid]) -> _Opening:
        if any(bid.is_early for bid in bids):
            return _Opening(is_early=True)
        if unfit := next((bid.unfit for bid in bids if bid.unfit), ""):
            return _Opening(problem=unfit)
        keepers = arranged(self._roster, _groups_of(bids)).keepers if self._roster else {}
        for host in sorted({bid.host for bid in bids}):
            wards = wards_of(keepers, host)
            kept = [bid for bid in bids if bid.host in wards]
            if problem := self._lack_of_room([bid for bid in bids if bid.host == host], kept):
                return _Opening(problem=problem)
        stall_s = max(bid.size_bytes for bid in bids) / _ASSUMED_BYTES_PER_S
        name = self._complete_layout([bid.offer for bid in bids if bid.offer is not None])
        return _Opening(layout=name, stride=self._pace.stride_for(stall_s))

    def _lack_of_room(self, own: list[_Bid], kept: list[_Bid]) -> str:
        """What does not fit in the memory of one host with these ranks, which keeps copies of those."""
        times = SLOT_COUNT + (_COPY_COUNT if self.spans_hosts else 0)
        need = times * sum(bid.size_bytes for bid in own) + _COPY_COUNT * sum(bid.size_bytes for bid in kept)
        room = own[0].room_bytes
        if need - own[0].there_bytes <= room * _ROOM_SHARE:
            return ""
        what = f"{times} slots and copies" if self.spans_hosts else f"{times} slots"
        where = f" on host {own[0].host}" if own[0].host else ""
        beside = f", and {_COPY_COUNT} copies for each of {len(kept)} of other hosts," if kept else ""
        return (
            f"{what} for each of {len(own)} ranks{where}{beside} take {need / 1e9:.1f} GB, and of "
            f"{room / 1e9:.1f} GB of free memory they may take half"
        )

    def _complete_layout(self, offers: list[Offer]) -> str:
        """Make what tells where everything is, for whoever restores and for the saver; the layout's name."""
        layout, metadata = complete(offers)
        content = layouts.encode(layout)
        self._trailer = pack(content, metadata)
        return layouts.digest_of(content)

    def _lay_out(self, groups: list[Group]) -> str:
        """Make or take over this rank's slots; what went wrong."""
        assert self._bulk is not None
        assert self._folder is not None
        rank = self._ranks.rank
        try:
            self._headers = [RankSlots(self._folder, number) for number in range(self._ranks.world_size)]
            paths = [image_path(self._folder, rank, slot) for slot in range(SLOT_COUNT)]
            self._images = []
            for slot, path in enumerate(paths):
                image = self._taken_over(slot, path)
                if image is None:
                    self._headers[rank].write(slot, SlotHeader())
                    lay_out(path, self._bulk.offer.rank, self._trailer)
                    image = Image(path, self._bulk.offer.rank)
                pin(image)
                self._images.append(image)
                self._observer.beat()
            if self._ranks.leads:
                self._drop_others()
            if self._roster is not None and self._orders_saver:
                arrange_keepers(self._folder, self._roster, groups)
            self._pages = SavePages(self._folder)
        except (OSError, WorldError, EvidenceError, ConfigError, Unfit) as error:
            return f"rank {rank}: {error}"
        return ""

    def _drop_others(self) -> None:
        """Free what ranks have left that there are no more."""
        assert self._folder is not None
        for rank in ranks_present(self._folder):
            if rank >= self._ranks.world_size:
                headers = RankSlots(self._folder, rank)
                for slot in range(SLOT_COUNT):
                    headers.write(slot, SlotHeader())
                    remove(image_path(self._folder, rank, slot))
                    remove(rest_path(self._folder, rank, slot))

    def _taken_over(self, slot: int, path: Path) -> Image | None:
        """The slot of an earlier attempt, where it has the same layout; what it holds stays."""
        assert self._bulk is not None
        header = self._headers[self._ranks.rank].read(slot)
        if header.layout != self._layout or not path.exists():
            return None
        try:
            return Image(path, self._bulk.offer.rank)
        except EvidenceError:
            return None

    def _order_saver(self) -> None:
        assert self._folder is not None
        order = SaverOrder(
            directory=str(self._directory),
            world_size=self._ranks.world_size,
            every_steps=self._config.every_steps,
            every_s=self._saver_every_s,
            keep=self._config.keep,
            attempt=self._observer.paths.attempt if self._observer.paths else 0,
        )
        order_saver(self._folder, order)

    def _start_plan(self, step: int, stride: int) -> None:
        assert self._pages is not None
        word = self._pages.word()
        self._saves_told, self._failures_told = word.saves, word.failures
        course = Course(stride=stride, way=Way.TRIAL)
        self._pages.write_plan(SavePlan(from_step=step, course=course, world_size=self._ranks.world_size))

    def _close(self, problem: str) -> None:
        """The tier stays shut in this attempt; what an earlier one left is not needed any more."""
        self._closed = True
        self._pages = None
        self._images = []
        if self._folder is not None:
            for slot in range(SLOT_COUNT):
                if self._headers:
                    self._headers[self._ranks.rank].write(slot, SlotHeader())
                remove(image_path(self._folder, self._ranks.rank, slot))
                remove(rest_path(self._folder, self._ranks.rank, slot))
        if self._ranks.leads:
            _log.warning("everstep keeps no checkpoints in memory: %s; they go to disk only", problem)

    def _tell(self, message: _Opening) -> _Opening:
        return msgspec.json.decode(self._ranks.broadcast(msgspec.json.encode(message)), type=_Opening)

    # Saving.

    def _write(self, slot: int, step: int, own: dict[str, object], draft: Manifest, way: Way) -> None:
        """Copy to a slot, or begin to: all that may change before the next step of the optimizer is copied at once."""
        assert self._bulk is not None
        if not self._images:
            return  # given up
        headers, image = self._headers[self._ranks.rank], self._images[slot]
        writing, facts = SlotHeader(state=SlotState.WRITING, step=step, layout=self._layout), self._facts(draft)
        if way is Way.IN_LINE:
            tensors, small = self._bulk.capture()
            headers.write(slot, writing)
            small[OWN] |= own
            image.copy_in(tensors)
            self._complete(slot, step, small, facts)
            return
        loud, small = self._bulk.capture_loud()
        headers.write(slot, writing)
        image.copy_in(loud, at=len(self._bulk.quiet))
        kept = frozen(small)
        kept[OWN] |= {**own, "data": frozen(own["data"])}  # random numbers are copies already
        staged = Staged(
            image=image,
            tensors=self._bulk.quiet,
            complete=lambda: self._complete(slot, step, kept, facts),
            discard=lambda: headers.write(slot, SlotHeader()),
            has_moved=self._bulk.has_moved_inside,
            is_test=self._untested,
        )
        self._untested = False
        self._stager.begin(staged)

    def _facts(self, draft: Manifest) -> bytes:
        facts = msgspec.json.encode(replace(draft, layout=self._layout))
        if len(facts) > FACTS_BYTES_MAX:
            doubt = "everstep had more doubts than it could keep"
            facts = msgspec.json.encode(replace(draft, layout=self._layout, inexact_because=(doubt,)))
        return facts

    def _complete(self, slot: int, step: int, small: dict[str, Any], facts: bytes) -> None:
        """The tensors are in the slot: add the rest, and say so. Runs in the thread where copies overlap."""
        assert self._folder is not None
        image = self._images[slot]
        rest_bytes, rest_seal = write_rest(rest_path(self._folder, self._ranks.rank, slot), small)
        self._headers[self._ranks.rank].write(
            slot,
            SlotHeader(
                state=SlotState.COMPLETE,
                step=step,
                layout=self._layout,
                image_bytes=image.size_bytes,
                rest_bytes=rest_bytes,
                image_seal=image.seal(),
                rest_seal=rest_seal,
                attempt=self._observer.paths.attempt if self._observer.paths else 0,
                facts=facts,
            ),
        )

    def _share_plan(self) -> None:
        """Rank 0's plan in the folder of this rank's host, when that is another one."""
        assert self._pages is not None
        told = self._ranks.broadcast(msgspec.json.encode(self._pages.plan()))
        plan = msgspec.json.decode(told, type=SavePlan)
        if plan != self._pages.plan():
            self._pages.write_plan(plan)

    def _pins(self, slots: list[list[Slot]]) -> set[int]:
        """Steps that the saver reads, or is to read because the script asked for them."""
        assert self._pages is not None
        word = self._pages.word()
        pins = {word.pinned, *(self._host_pins.steps(slots) if self._host_pins else ())}
        if every := self._config.every_steps:
            durable = self._host_pins.durable() if self._host_pins else word.durable
            wanted = [s for s in committed_steps(slots) if s % every == 0 and s > durable]
            pins.update(wanted[:1])
        return pins

    def _give_up(self, problem: str) -> None:
        """This rank saves no more, so nothing is complete on all ranks any more; rank 0 sees that and ends the plan."""
        self._images = []
        _log.warning("everstep: rank %d: %s; checkpoints go to disk only", self._ranks.rank, problem)

    def _review(self, step: int) -> None:
        """Whether all ranks go on as they do. A collective, at the same step on all."""
        assert self._pages is not None
        if self._ranks.leads:
            self._adjust(step, self._pages.plan(), from_step=step + 1)
        self._share_plan()

    def _adjust(self, step: int, plan: SavePlan, *, from_step: int) -> None:
        """Announce another course where the measured cost asks for it, or the end of the tier where it does no good."""
        assert self._pages is not None
        if step < plan.later_from:
            return  # announced, and not there yet
        start, now = plan.later_from or plan.from_step, plan.at(step)
        wanted = self._pace.decide(now)
        if self._commits.are_missing(time.monotonic(), patience_s=_SILENT_S if self.spans_hosts else 0.0):
            wanted = Course(stride=0, way=Way.IN_LINE)
            _log.warning("everstep: no save to memory was complete on all ranks of late; checkpoints go to disk only")
        if wanted == now:
            return
        self._pages.write_plan(
            SavePlan(from_step=start, course=now, later_from=from_step, later=wanted, world_size=plan.world_size)
        )
        self._pace.announced()


def _groups_of(bids: list[_Bid]) -> list[Group]:
    return [group for bid in bids for group in bid.groups]


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return "a checkpoint could not be made durable"


def memory_folder(observer: Observer) -> Path | None:
    """The folder that `everstep run` gave; None outside of it."""
    given = observer.paths.memory if observer.paths else ""
    return Path(given) if given and os.path.isdir(given) else None  # noqa: PTH112


def draft_of(step: int, world_size: int, interval_steps: int, doubts: tuple[str, ...], replicated: bool) -> Manifest:
    """A manifest without its files."""
    return Manifest(
        step=step,
        world_size=world_size,
        torch=str(torch.__version__),
        thread_count=torch.get_num_threads(),
        interval_steps=interval_steps,
        inexact_because=doubts,
        files=(),
        replicated=replicated,
    )
