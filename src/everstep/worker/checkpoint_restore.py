"""Resuming as a protocol between ranks: rank 0 looks once at memory and disk and elects, every rank tests and loads.

A damaged holding is told, and the election is held again without it. It knows where shards lie; what is inside of them
it does not know.
"""

import io
import logging
import pickle
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from everstep.adapters.memory_slots import (
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
from everstep.worker import checkpoint_manifest as manifests
from everstep.worker.checkpoint_manifest import FileEntry, Manifest
from everstep.worker.memory_image import load_image, load_rest, remove
from everstep.worker.memory_state import assemble, checked, weights_of
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.state import Parts
from everstep.worker.storage_listing import StorageListing

_log = logging.getLogger(__name__)
REFUSED = "refused-"
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint.

    Attributes:
        path: where it came from, for people.
        mapped: its WEIGHTS once more, in memory that nobody writes to until a save; None where there is no such.
    """

    manifest: Manifest
    parts: Parts
    path: str
    mapped: dict[str, Any] | None = None


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
class _Loaded:
    """What a rank has read: images by shard, and its own rest; from files that ranks wrote, the parts themselves."""

    images: dict[int, dict[str, Any]]
    rest: dict[str, Any] | None = None
    parts: Parts | None = None


class Restoring:
    """One restore. `run` is a collective.

    Args:
        directory: of the checkpoints on disk.
        memory: the run's folder in shared memory; None where there is none.
    """

    def __init__(self, directory: Path, memory: Path | None, ranks: Ranks, observer: Observer, attempt: int) -> None:
        self._directory = directory
        self._memory = memory
        self._ranks = ranks
        self._observer = observer
        self._attempt = attempt
        self._damaged: dict[Holding, str] = {}
        self._passed_over: set[int] = set()
        self._told: set[str] = set()
        self._storage = StorageListing(directory, observer, attempt)

    def run(self) -> Restored | None:
        """The newest checkpoint that every rank could verify; None when there is none.

        Raises:
            ConfigError: there is one that this run cannot use, and to start afresh would lose it.
        """
        started_s = time.monotonic()
        while True:
            choice = self._tell(self._elect() if self._ranks.leads else _Choice())
            if choice.error:
                raise ConfigError(choice.error)
            if choice.waits:
                self._observer.beat()
                continue
            if choice.manifest is None:
                self._forget_memory_after(0)
                return None
            loaded, problems = self._load(choice.manifest, choice.tiers)
            answers = [
                msgspec.json.decode(answer, type=list[_Problem])
                for answer in self._ranks.gather(msgspec.json.encode(problems))
            ]
            if found := [problem for answer in answers for problem in answer]:
                if self._ranks.leads:
                    self._note_damage(choice.manifest, found)
                continue
            parts, mapped = self._parts(choice.manifest, choice.tiers, loaded)
            self._forget_memory_after(choice.manifest.step)
            path = self._shown(choice.manifest.step, choice.tiers)
            if self._ranks.leads:
                self._note_restored(choice.manifest.step, path, time.monotonic() - started_s)
            return Restored(manifest=choice.manifest, parts=parts, path=path, mapped=mapped)

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
        tiers = tuple(source.tier for source in election.sources)
        return _Choice(manifest=chosen, tiers=tiers, error=self._misfit(chosen))

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

    def _misfit(self, manifest: Manifest) -> str:
        if manifest.world_size == self._ranks.world_size:
            return ""
        return (
            f"{self._directory / manifests.folder_name(manifest.step)} was saved by {manifest.world_size} ranks and "
            f"this job has {self._ranks.world_size}: start it with "
            f"{manifest.world_size}, or give attach() another directory"
        )

    # Loading, on every rank.

    def _load(self, manifest: Manifest, tiers: Sequence[Tier]) -> tuple[_Loaded, list[_Problem]]:
        """Test and read what this rank needs. A shard in memory is tested by its own rank alone, all by all on disk."""
        rank, loaded = self._ranks.rank, _Loaded(images={})
        if not manifest.layout:
            return self._load_files(manifest)
        for shard in range(manifest.world_size) if manifest.replicated else [rank]:
            if shard != rank and tiers[shard] is Tier.MEMORY:
                continue
            try:
                if tiers[shard] is Tier.MEMORY:
                    loaded.images[shard], rest = self._from_memory(manifest.step, shard)
                else:
                    loaded.images[shard], rest = self._from_disk(manifest, shard, whole=shard == rank)
            except EvidenceError as error:
                return loaded, [_Problem(shard=shard, tier=tiers[shard], reason=str(error))]
            if shard == rank:
                loaded = _Loaded(images=loaded.images, rest=rest)
            self._observer.beat()
        return loaded, []

    def _parts(self, manifest: Manifest, tiers: Sequence[Tier], loaded: _Loaded) -> tuple[Parts, dict[str, Any] | None]:
        """All that was tested, put together, and its WEIGHTS unshared; other ranks' memory is mapped only now."""
        if loaded.parts is not None:
            return loaded.parts, None
        assert loaded.rest is not None
        if not manifest.replicated:
            images = [loaded.images[self._ranks.rank]]
            return assemble(images, 0, loaded.rest), weights_of(images, loaded.rest)
        for shard in range(manifest.world_size):
            if shard not in loaded.images:
                assert tiers[shard] is Tier.MEMORY
                slot, header = self._slot(manifest.step, shard)
                assert self._memory is not None
                path = image_path(self._memory, shard, slot)
                loaded.images[shard] = load_image(path, size_bytes=header.image_bytes, seal=None)
        images = [loaded.images[shard] for shard in range(manifest.world_size)]
        return assemble(images, self._ranks.rank, loaded.rest), weights_of(images, loaded.rest)

    def _from_memory(self, step: int, shard: int) -> tuple[dict[str, Any], dict[str, Any]]:
        slot, header = self._slot(step, shard)
        assert self._memory is not None
        image, rest = image_path(self._memory, shard, slot), rest_path(self._memory, shard, slot)
        return (
            load_image(image, size_bytes=header.image_bytes, seal=header.image_seal),
            load_rest(rest, size_bytes=header.rest_bytes, seal=header.rest_seal),
        )

    def _from_disk(self, manifest: Manifest, shard: int, *, whole: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        folder = self._directory / manifests.folder_name(manifest.step)
        image, rest = (entry for entry in manifest.files if entry.rank == shard)
        found = self._read(folder, image, manifest)
        return checked(found, str(folder / image.name)), self._read(folder, rest, manifest) if whole else {}

    def _load_files(self, manifest: Manifest) -> tuple[_Loaded, list[_Problem]]:
        """Files that the ranks wrote: a rank's own, and before it rank 0's where parts are not in it."""
        folder = self._directory / manifests.folder_name(manifest.step)
        own = manifest.files[self._ranks.rank]
        entries = [own] if own.parts == manifest.files[0].parts else [manifest.files[0], own]
        parts: Parts = {}
        for entry in entries:
            try:
                parts |= self._read(folder, entry, manifest)
            except EvidenceError as error:
                return _Loaded(images={}), [_Problem(shard=entry.rank, tier=Tier.DISK, reason=str(error))]
        return _Loaded(images={}, parts=parts), []

    def _read(self, folder: Path, entry: FileEntry, manifest: Manifest) -> dict[str, Any]:
        content = manifests.read_verified(folder, entry)
        self._observer.beat()
        try:
            found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ConfigError(
                f"{folder / entry.name} is undamaged and torch {torch.__version__} cannot read it "
                f"(written by {manifest.torch}): {error}"
            ) from error
        self._observer.beat()
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
