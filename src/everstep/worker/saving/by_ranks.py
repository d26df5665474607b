"""Saving to disk as a protocol between ranks: temporary folder, files, manifest, rename.

It knows folders, files and what ranks must agree on; what is in the state it is given it does not know.
"""

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from everstep.domain.errors import ConfigError, EvidenceError
from everstep.domain.events import CheckpointFailed, CheckpointSaved
from everstep.domain.ids import Attempt
from everstep.domain.phases import Phase
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder, write_durably
from everstep.worker.format.layout import tensors_name
from everstep.worker.format.manifest import FileEntry, Manifest
from everstep.worker.format.publishing import publish, write_common, write_small
from everstep.worker.format.rank_file import write_rank_file
from everstep.worker.format.retention import remove_old
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.restoring.restore import REFUSED, shown
from everstep.worker.saving.checkpoint_form import Form
from everstep.worker.saving.memory_image import rest_of
from everstep.worker.saving.storage_watch import Answer, StorageWatch
from everstep.worker.state import OWN, TrainingState

_log = logging.getLogger(__name__)
_TEMPORARY = ".tmp-"
_PROBE_WITHIN_S = 2.0
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save ended; the same on every rank. `error` is empty when the checkpoint is complete and durable."""

    error: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Rank 0's word before a save: the folder is made, or why not."""

    step: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """One rank's word after writing its files."""

    entries: tuple[FileEntry, ...] = ()
    error: str = ""


class Checkpoints:
    """The checkpoints of a run in one directory. Every method is a collective.

    Args:
        directory: shared by all hosts.
        keep: complete checkpoints that stay.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path, ranks: Ranks, observer: Observer, *, keep: int) -> None:
        self._directory = directory
        self._ranks = ranks
        self._observer = observer
        self._keep = keep
        self._failure_told = False
        self._form = Form(ranks)
        self._watch = StorageWatch(observer, rank=ranks.rank)
        error = self._ask_directory() if ranks.leads else ""
        if error := self._tell(error):
            raise ConfigError(error)

    @property
    def attempt(self) -> int:
        paths = self._observer.paths
        return paths.attempt if paths else int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def leads(self) -> bool:
        return self._ranks.leads

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    def save(self, state: TrainingState, own: dict[str, Any], draft: Manifest) -> Saved:
        """Write one checkpoint. An error of the disk is told and returned, not raised: training goes on.

        Args:
            own: what OWN holds beside gradients.
            draft: the manifest, without its files.
        """
        started_s = time.monotonic()
        temporary = self._directory / f"{_TEMPORARY}{manifests.folder_name(draft.step)}-a{self.attempt:04d}"
        with self._observer.during(Phase.SAVING):
            plan = self._prepare(temporary, draft.step)
            if plan.error:
                saved = Saved(error=plan.error)
            else:
                tensors, small = self._form.capture(state)
                small[OWN] |= own
                written = self._write(temporary, tensors, small, draft.step)
                answers = self._ranks.gather(msgspec.json.encode(written))
                with self._watch.asking(draft.step, self.attempt):
                    saved = self._commit(temporary, [msgspec.json.decode(a, type=_Written) for a in answers], draft)
                saved = self._tell(saved)
        self._report(saved, draft.step, time.monotonic() - started_s)
        return saved

    def agree(self, number: Callable[[], int]) -> int:
        """Rank 0's number, on every rank."""
        return self._tell(number() if self._ranks.leads else 0)

    # Saving.

    def _ask_directory(self) -> str:
        """Why the directory cannot be used at all. A later attempt has trained already: it is told, and trains on."""
        answer = Answer(self._try_directory, name="directory")
        if not answer.is_there(_PROBE_WITHIN_S):
            _log.warning("everstep: %s has not answered for %g s; it goes on", self._directory, _PROBE_WITHIN_S)
            return ""
        error = answer.get()
        if error and self.attempt > (1 if self._observer.paths else 0):
            _log.warning("everstep: %s; it goes on, and saves there as soon as that works", error)
            return ""
        return error

    def _try_directory(self) -> str:
        probe = self._directory / f"{_TEMPORARY}probe"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"everstep")
            probe.unlink()
        except OSError as error:
            return (
                f"the checkpoint directory {self._directory} cannot be written ({error.strerror}); "
                "make it writable, or give attach(directory=...) another"
            )
        return ""

    def _prepare(self, temporary: Path, step: int) -> _Plan:
        plan = _Plan(step=step)
        if self._ranks.leads:
            try:
                with self._watch.asking(step, self.attempt):
                    if temporary.exists():
                        shutil.rmtree(temporary)
                    temporary.mkdir(parents=True)
            except OSError as error:
                plan = _Plan(step=step, error=f"{temporary.name}: {error.strerror}")
        plan = self._tell(plan)
        if plan.step != step:
            raise RuntimeError(
                f"rank {self._ranks.rank} saves step {step} and rank 0 step {plan.step}: the ranks' loops have parted; "
                "every rank must take the same number of batches"
            )
        return plan

    def _write(self, folder: Path, tensors: Sequence[Tensor], small: dict[str, Any], step: int) -> _Written:
        """This rank's files. One whose tensors are rank 0's, bit for bit, writes the rest alone."""
        rank, layout = self._ranks.rank, self._form.own_layout
        twin = self._form.is_twin(tensors)
        holder = 0 if twin else rank
        name, seal, digest = tensors_name(holder), 0, ""
        try:
            with self._watch.asking(step, self.attempt):
                if not twin:
                    seal, digest = write_rank_file(folder / name, layout, tensors, self._watch.moved)
                name = manifests.rest_name(rank)
                rest = write_small(folder, name, bytes(rest_of(small)), rank=rank)
        except OSError as error:
            return _Written(error=f"{name}: {error.strerror}")
        file = FileEntry(name=tensors_name(holder), rank=rank, size_bytes=layout.size_bytes, digest=digest, seal=seal)
        return _Written(entries=(file, rest))

    def _commit(self, temporary: Path, written: list[_Written], draft: Manifest) -> Saved:
        """The rename is the commit. Only rank 0 does this; only after it are older checkpoints removed."""
        if not self._ranks.leads:
            return Saved()
        error = next((answer.error for answer in written if answer.error), "")
        manifest = draft
        if not error:
            first = written[0].entries[0]
            files = [entry for answer in written for entry in answer.entries]
            files = [e if e.digest else dataclasses.replace(e, digest=first.digest, seal=first.seal) for e in files]
            try:
                files = [*write_common(temporary, self._form.content, self._form.metadata), *files]
                manifest = dataclasses.replace(draft, files=tuple(files), layout=self._form.name)
                write_durably(temporary / manifests.MANIFEST_NAME, manifests.encode(manifest))
                manifests.read(temporary)  # a rank on a host that does not share the directory shows here
                sync_folder(temporary)
                publish(temporary, self._directory / manifests.folder_name(manifest.step))
            except EvidenceError as missing:
                error = f"{missing}: the directory must be one that all hosts share"
            except OSError as problem:
                error = f"{temporary.name}: {problem.strerror}"
        try:
            self._prune(temporary, keep_leftovers=bool(error))
        except OSError as problem:
            _log.warning("everstep cannot remove old checkpoints in %s: %s", self._directory, problem.strerror)
        return Saved(error=error, size_bytes=manifest.size_bytes)

    def _prune(self, temporary: Path, *, keep_leftovers: bool) -> None:
        if keep_leftovers:
            if temporary.exists():
                shutil.rmtree(temporary)
            return
        remove_old(self._directory, self._keep, f"{_TEMPORARY}old-")
        refused = sorted(self._directory.glob(f"{REFUSED}*"), key=lambda path: path.stat().st_mtime)
        for leftover in [*self._directory.glob(f"{_TEMPORARY}*"), *refused[:-1]]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    # Telling.

    def _tell(self, message: _Message) -> _Message:
        """Rank 0's message, on every rank."""
        return msgspec.json.decode(self._ranks.broadcast(msgspec.json.encode(message)), type=type(message))

    def _report(self, saved: Saved, step: int, duration_s: float) -> None:
        if not self._ranks.leads:
            return
        now_s, attempt = self._observer.notes.now_s(), Attempt(self.attempt)
        path = shown(self._observer, self._directory, step)
        if not saved.error:
            self._failure_told = False
            self._observer.notes.write(
                CheckpointSaved(
                    at_s=now_s,
                    attempt=attempt,
                    step=step,
                    path=path,
                    size_bytes=saved.size_bytes,
                    duration_s=duration_s,
                )
            )
            return
        self._observer.notes.write(CheckpointFailed(at_s=now_s, attempt=attempt, step=step, reason=saved.error))
        if not self._failure_told:
            self._failure_told = True
            reason = f"the save of step {step} failed, {saved.error}; training goes on, older checkpoints are untouched"
            _log.warning("everstep: %s", reason)
