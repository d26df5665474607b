"""Resuming as a protocol between ranks: rank 0 looks once at memory and disk and elects, every rank tests and loads.

A damaged holding is told, and the election is held again without it. It knows where shards lie; what is inside of them
it does not know.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from everstep.adapters.checkpoints.memory_slots import (
    SLOT_COUNT,
    RankSlots,
    SavePages,
    SlotHeader,
    image_path,
    ranks_present,
    rest_path,
)
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.domain.events import CheckpointRefused, CheckpointRestored
from everstep.domain.ids import Attempt
from everstep.policy.checkpoints import Holding, SlotState, Tier, elect
from everstep.worker.format import layout as layouts
from everstep.worker.format import manifest as manifests
from everstep.worker.format.layout import LAYOUT_NAME, Layout
from everstep.worker.format.manifest import FileEntry, Manifest, crc32_digest
from everstep.worker.format.trailer import unpack
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.restoring import slot_maps
from everstep.worker.restoring.checkpoint_reading import Reading
from everstep.worker.restoring.mending import Mending
from everstep.worker.restoring.reading import Source
from everstep.worker.restoring.storage_listing import StorageListing
from everstep.worker.saving.memory_image import remove
from everstep.worker.state import TrainingState

_log = logging.getLogger(__name__)
REFUSED = "refused-"
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint, which the attached objects now have.

    Attributes:
        own: what each rank has of its own: random numbers, and its place in the data.
        path: where it came from, for people.
        is_on_disk: all of it came from there; else some of it may be in memory alone.
        again: puts parameters and the optimizer's state back once more, until the next save; None where it cannot.
    """

    manifest: Manifest
    own: dict[str, Any]
    path: str
    is_on_disk: bool = False
    again: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Rank 0's word: what to load (None: nothing), from which tier each shard; or why the job must end.

    `waits`: storage has not answered yet; ask again.
    """

    manifest: Manifest | None = None
    tiers: tuple[Tier, ...] = ()
    error: str = ""
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A shard that failed its test."""

    shard: int
    tier: Tier
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A rank's word after it has read; `touched`: the state is not what it was before."""

    problems: tuple[_Problem, ...] = ()
    touched: bool = False


class Restoring:
    """One restore. `run` is a collective.

    Args:
        directory: of the checkpoints on disk.
        memory: the run's folder in shared memory; None where there is none.
    """

    def __init__(
        self, state: TrainingState, directory: Path, memory: Path | None, ranks: Ranks, observer: Observer, attempt: int
    ) -> None:
        self._state = state
        self._directory = directory
        self._memory = memory
        self._ranks = ranks
        self._observer = observer
        self._attempt = attempt
        self._damaged: dict[Holding, str] = {}
        self._passed_over: set[int] = set()
        self._storage = StorageListing(directory, observer, attempt)
        self._mending = Mending(memory, observer.beat)

    def run(self) -> Restored | None:
        """Put the newest checkpoint that every rank could verify into the attached objects; None when there is none.

        Raises:
            ConfigError: there is one that this run cannot use, and to start afresh would lose it.
            WorldError: one was found damaged when half of it was read, and there is no other; start the script again.
        """
        started_s, touched = time.monotonic(), False
        while True:
            choice = self._tell(self._elect() if self._ranks.leads else _Choice())
            if choice.error:
                raise ConfigError(choice.error)
            if choice.waits:
                self._observer.beat()
                continue
            if choice.manifest is None:
                slot_maps.release_later()
                self._forget_memory_after(0)
                if touched:
                    raise WorldError(
                        "the only checkpoint was found damaged while it was read into the model, which is spoilt now; "
                        "start the script again: it begins afresh",
                        retryable=True,
                    )
                return None
            reading, problems = self._read_mended(choice.manifest, choice.tiers)
            answer = msgspec.json.encode(_Answer(problems=problems, touched=reading.has_begun))
            answers = [msgspec.json.decode(word, type=_Answer) for word in self._ranks.gather(answer)]
            touched = touched or any(answer.touched for answer in answers)
            if found := [problem for answer in answers for problem in answer.problems]:
                if self._ranks.leads:
                    self._note_damage(choice.manifest, found)
                continue
            own = reading.settle()
            self._forget_memory_after(choice.manifest.step)
            path = self._shown(choice.manifest.step, choice.tiers)
            if self._ranks.leads:
                self._note_restored(choice.manifest.step, path, time.monotonic() - started_s)
            slot_maps.release_later()
            is_on_disk = all(tier is Tier.DISK for tier in choice.tiers)
            return Restored(manifest=choice.manifest, own=own, path=path, is_on_disk=is_on_disk, again=reading.again())

    # Electing, on rank 0.

    def _elect(self) -> _Choice:
        memory = self._in_memory()
        holdings = [_holding(manifest, shard, Tier.MEMORY) for shard, manifest in memory]
        in_memory = elect(holdings, self._damaged).step
        if in_memory is not None and self._memory and in_memory < SavePages(self._memory).word().durable:
            in_memory = None  # the saver made a newer one durable, so the disk is worth waiting for
        try:
            disk = self._storage.ask(self._newest_on_disk, in_memory)
        except ConfigError as error:
            return _Choice(error=str(error))
        if disk is None:
            return _Choice(waits=True)
        holdings += [_holding(m, shard, Tier.DISK) for m in disk for shard in range(m.world_size)]
        election = elect(holdings, self._damaged)
        if election.step is None:
            return _Choice()
        first = election.sources[0]
        chosen = next(
            m
            for m in [*disk, *(m for shard, m in memory if shard == 0), *(m for _, m in memory)]
            if (m.step, m.layout, m.world_size) == (first.step, first.layout, first.shard_count)
        )
        return _Choice(manifest=chosen, tiers=tuple(source.tier for source in election.sources))

    def _newest_on_disk(self) -> list[Manifest]:
        """The manifest of the newest complete folder; damaged ones before it are set aside."""
        for step in manifests.all_steps(self._directory):
            if step in self._passed_over:
                continue
            try:
                return [manifests.read(self._directory / manifests.folder_name(step))]
            except EvidenceError as error:
                self._refuse(step, str(error))
        return []

    def _in_memory(self) -> list[tuple[int, Manifest]]:
        """Rank and manifest of each complete slot."""
        found = []
        for rank in ranks_present(self._memory) if self._memory else []:
            for _, header in self._headers(rank):
                if header.state is SlotState.COMPLETE:
                    try:
                        found.append((rank, msgspec.json.decode(header.facts, type=Manifest)))
                    except msgspec.MsgspecError:
                        continue  # another version's
        return found

    # Reading, on every rank.

    def _read_mended(self, manifest: Manifest, tiers: Sequence[Tier]) -> tuple[Reading, tuple[_Problem, ...]]:
        """Read; what is found damaged in memory is brought again from a copy, where there is one, and read again."""
        has_begun = False
        while True:
            reading = Reading(self._state, manifest, self._ranks, self._observer.beat)
            problems = self._read(reading, manifest, tiers)
            reading.has_begun = has_begun = reading.has_begun or has_begun
            # A layout that is nowhere to be had is every shard's problem; a copy of this rank's own slot has it.
            own = [p for p in problems if p.tier is Tier.MEMORY and (len(problems) == 1 or p.shard == self._ranks.rank)]
            if not own or not self._mend(manifest, own[0]):
                return reading, problems

    def _mend(self, manifest: Manifest, problem: _Problem) -> bool:
        try:
            slot, header = self._slot(manifest.step, problem.shard)
        except EvidenceError:
            return False
        what = f"the memory of rank {problem.shard} at step {manifest.step} is damaged ({problem.reason})"
        return self._mending.mend(problem.shard, slot, header, what)

    def _read(self, reading: Reading, manifest: Manifest, tiers: Sequence[Tier]) -> tuple[_Problem, ...]:
        """Read what this rank needs, all of it tested. What is wrong is told by shard."""
        shard = 0
        try:
            layout = self._layout(manifest, tiers)
            if layout is None:
                reason = "its layout is gone or was changed"
                return tuple(_Problem(shard=n, tier=tier, reason=reason) for n, tier in enumerate(tiers))
            shard = reading.rest_of
            reading.take_rest(self._rest(manifest, shard, tiers[shard]))
            sources = {}
            for shard in reading.prepare(layout):
                sources[shard] = self._source(manifest, layout, shard, tiers[shard])
                sources[shard].check_size()
            for shard, source in sources.items():
                reading.read(shard, source)
        except EvidenceError as error:
            return (_Problem(shard=shard, tier=tiers[shard], reason=str(error)),)
        return ()

    def _layout(self, manifest: Manifest, tiers: Sequence[Tier]) -> Layout | None:
        """From memory or disk, wherever shards come from."""
        for shard, tier in sorted(enumerate(tiers), key=lambda found: (found[1], found[0] != self._ranks.rank)):
            try:
                if tier is Tier.MEMORY:
                    slot, _ = self._slot(manifest.step, shard)
                    assert self._memory is not None
                    layout, _, _ = unpack(image_path(self._memory, shard, slot), manifest.layout)
                else:
                    content = (self._directory / manifests.folder_name(manifest.step) / LAYOUT_NAME).read_bytes()
                    layout = layouts.decode(content, manifest.layout)
            except (OSError, EvidenceError):
                continue
            if len(layout.ranks) == manifest.world_size:
                return layout
        return None

    def _source(self, manifest: Manifest, layout: Layout, shard: int, tier: Tier) -> Source:
        if tier is Tier.MEMORY:
            slot, header = self._slot(manifest.step, shard)
            assert self._memory is not None
            path, size_bytes, seal = image_path(self._memory, shard, slot), header.image_bytes, header.image_seal
        else:
            entry = self._on_disk(manifest, shard).tensors_of(shard)
            if entry is None:
                raise EvidenceError(f"{manifests.MANIFEST_NAME} names no tensors of rank {shard}")
            path = self._directory / manifests.folder_name(manifest.step) / entry.name
            size_bytes, seal = entry.size_bytes, entry.seal
        return Source(path=path, name=path.name, layout=layout.ranks[shard], size_bytes=size_bytes, seal=seal)

    def _rest(self, manifest: Manifest, shard: int, tier: Tier) -> bytes:
        if tier is Tier.MEMORY:
            slot, header = self._slot(manifest.step, shard)
            assert self._memory is not None
            path = rest_path(self._memory, shard, slot)
            entry = FileEntry(
                name=path.name, rank=shard, size_bytes=header.rest_bytes, digest=crc32_digest(header.rest_seal)
            )
            return bytes(manifests.read_verified(self._memory, entry))
        found = self._on_disk(manifest, shard).entry(manifests.rest_name(shard), shard)
        if found is None:
            raise EvidenceError(f"{manifests.MANIFEST_NAME} names no rest of rank {shard}")
        return bytes(manifests.read_verified(self._directory / manifests.folder_name(manifest.step), found))

    def _on_disk(self, manifest: Manifest, shard: int) -> Manifest:
        """The manifest with files; one from a slot's header has none."""
        if manifest.files:
            return manifest
        found = manifests.read(self._directory / manifests.folder_name(manifest.step))
        if found.layout != manifest.layout:
            raise EvidenceError(f"rank {shard}'s shard of step {manifest.step} on disk has another layout")
        return found

    # Memory.

    def _headers(self, rank: int) -> list[tuple[int, SlotHeader]]:
        assert self._memory is not None
        try:
            headers = RankSlots(self._memory, rank)
        except WorldError as error:
            _log.warning("everstep does not use the memory of rank %d: %s", rank, error)
            return []
        return [(slot, headers.read(slot)) for slot in range(SLOT_COUNT)]

    def _slot(self, step: int, rank: int) -> tuple[int, SlotHeader]:
        for slot, header in self._headers(rank):
            if header.state is SlotState.COMPLETE and header.step == step:
                return slot, header
        raise EvidenceError(f"rank {rank} holds no step {step} in memory any more")

    def _forget_memory_after(self, step: int) -> None:
        """What this rank's memory holds of later steps belongs to a course of events that did not happen."""
        if self._memory is None or self._ranks.rank not in ranks_present(self._memory):
            return
        try:
            headers = RankSlots(self._memory, self._ranks.rank)
        except WorldError as error:
            _log.warning("everstep does not use the memory of rank %d: %s", self._ranks.rank, error)
            return
        for slot in range(SLOT_COUNT):
            header = headers.read(slot)
            if header.state is not SlotState.EMPTY and (header.state is SlotState.WRITING or header.step > step):
                headers.write(slot, SlotHeader(layout=header.layout))

    # Refusing and telling, on rank 0.

    def _note_damage(self, manifest: Manifest, problems: Sequence[_Problem]) -> None:
        for problem in problems:
            holding = _holding(manifest, problem.shard, problem.tier)
            if holding in self._damaged:
                continue
            self._damaged[holding] = problem.reason
            if problem.tier is Tier.DISK:
                if manifest.step not in self._passed_over:
                    self._refuse(manifest.step, problem.reason)
                continue
            where = f"the memory of rank {problem.shard} at step {manifest.step}"
            _log.warning("everstep does not use %s: %s", where, problem.reason)
            self._note_refused(f"memory/{manifests.folder_name(manifest.step)}", problem.reason)
            self._remove_slot(manifest.step, problem.shard)

    def _remove_slot(self, step: int, rank: int) -> None:
        """A damaged slot is laid out anew; its header would make others believe in it."""
        assert self._memory is not None
        headers = RankSlots(self._memory, rank)
        if (slot := headers.find(step)) is not None:
            headers.write(slot, SlotHeader())
            remove(image_path(self._memory, rank, slot))

    def _refuse(self, step: int, reason: str) -> None:
        """Set a damaged checkpoint aside, so that its step can be saved again; the last one stays as evidence."""
        folder = self._directory / manifests.folder_name(step)
        _log.warning("everstep does not use %s: %s; it tries the one before", folder, reason)
        self._note_refused(shown(self._observer, self._directory, step), reason)
        self._passed_over.add(step)
        aside = self._directory / f"{REFUSED}{folder.name}-a{self._attempt:04d}"
        try:
            if aside.exists():
                shutil.rmtree(aside)
            folder.rename(aside)
        except OSError as error:
            _log.warning("everstep cannot set %s aside: %s", folder, error.strerror)

    def _note_refused(self, path: str, reason: str) -> None:
        notes = self._observer.notes
        notes.write(CheckpointRefused(at_s=notes.now_s(), attempt=Attempt(self._attempt), path=path, reason=reason))

    def _note_restored(self, step: int, path: str, duration_s: float) -> None:
        notes = self._observer.notes
        notes.write(
            CheckpointRestored(
                at_s=notes.now_s(), attempt=Attempt(self._attempt), step=step, path=path, duration_s=duration_s
            )
        )

    def _shown(self, step: int, tiers: Sequence[Tier]) -> str:
        on_disk = shown(self._observer, self._directory, step)
        if not tiers or Tier.MEMORY not in tiers:
            return on_disk
        return "memory" if Tier.DISK not in tiers else f"memory and {on_disk}"

    def _tell(self, message: _Message) -> _Message:
        return msgspec.json.decode(self._ranks.broadcast(msgspec.json.encode(message)), type=type(message))


def _holding(manifest: Manifest, shard: int, tier: Tier) -> Holding:
    return Holding(step=manifest.step, layout=manifest.layout, shard=shard, shard_count=manifest.world_size, tier=tier)


def shown(observer: Observer, directory: Path, step: int) -> str:
    """The path for the ledger: relative to the run directory where the checkpoints lie inside it."""
    folder = directory / manifests.folder_name(step)
    paths = observer.paths
    if paths and paths.checkpoints and directory == Path(paths.checkpoints):
        return str(folder.relative_to(directory.parent))
    return str(folder)
