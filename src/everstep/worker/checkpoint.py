"""Saving and restoring as a protocol between ranks: temporary folder, files, manifest, rename; and back by election.

It knows folders, files and what ranks must agree on; what is in the state it is given it does not know.
"""

import dataclasses
import io
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec
import torch

from everstep.domain.errors import ConfigError, EvidenceError
from everstep.domain.events import CheckpointFailed, CheckpointRefused, CheckpointRestored, CheckpointSaved
from everstep.domain.ids import Attempt
from everstep.domain.phases import Phase
from everstep.worker import checkpoint_manifest as manifests
from everstep.worker.checkpoint_file import Sink, digest_of, sync_folder, write_durably
from everstep.worker.checkpoint_manifest import FileEntry, Manifest
from everstep.worker.observer import Observer
from everstep.worker.ranks import Ranks
from everstep.worker.state import Parts

_log = logging.getLogger(__name__)
_TEMPORARY, _REFUSED = ".tmp-", "refused-"
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save ended; the same on every rank. `error` is empty when the checkpoint is complete and durable."""

    error: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint in memory."""

    manifest: Manifest
    parts: Parts
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Rank 0's word before a save: the folder is made (or why not), and the digests of the parts that may be shared."""

    step: int
    error: str = ""
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """One rank's word after writing its file."""

    entry: FileEntry | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Rank 0's word before a restore: what to load (None: nothing), or why the job must end."""

    manifest: Manifest | None = None
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
        self._refused: set[int] = set()
        self._failure_told = False
        error = self._try_directory() if ranks.leads else ""
        if error := self._tell(error):
            raise ConfigError(error)

    @property
    def attempt(self) -> int:
        paths = self._observer.paths
        return paths.attempt if paths else int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    def save(self, parts: Parts, shared: tuple[str, ...], draft: Manifest) -> Saved:
        """Write one checkpoint. An error of the disk is told and returned, not raised: training goes on.

        Args:
            parts: this rank's state.
            shared: names of the parts that a rank leaves out when rank 0 has the very same.
            draft: the manifest, without its files.
        """
        started_s = time.monotonic()
        temporary = self._directory / f"{_TEMPORARY}{manifests.folder_name(draft.step)}-a{self.attempt:04d}"
        with self._observer.during(Phase.SAVING):
            plan = self._prepare(temporary, draft.step, {name: parts[name] for name in shared})
            if plan.error:
                saved = Saved(error=plan.error)
            else:
                mine = {name: part for name, part in parts.items() if not self._same_as_leader(name, part, plan)}
                written = self._write(temporary, mine)
                answers = self._ranks.gather(msgspec.json.encode(written))
                saved = self._commit(temporary, [msgspec.json.decode(a, type=_Written) for a in answers], draft)
                saved = self._tell(saved)
        self._report(saved, draft.step, time.monotonic() - started_s)
        return saved

    def restore(self) -> Restored | None:
        """The newest checkpoint that every rank could verify; None when there is none.

        Raises:
            ConfigError: there is one that this run cannot use, and to start afresh would lose it.
        """
        started_s = time.monotonic()
        while True:
            choice = self._tell(self._elect() if self._ranks.leads else _Choice())
            if choice.error:
                raise ConfigError(choice.error)
            if choice.manifest is None:
                return None
            folder = self._directory / manifests.folder_name(choice.manifest.step)
            parts, problem = self._load(folder, choice.manifest)
            problems = [answer.decode() for answer in self._ranks.gather(problem.encode())]
            if worst := next((p for p in problems if p), ""):
                if self._ranks.leads:
                    self._refuse(choice.manifest.step, worst)
                continue
            if self._ranks.leads:
                self._note_restored(choice.manifest.step, time.monotonic() - started_s)
            return Restored(manifest=choice.manifest, parts=parts, path=str(folder))

    def agree(self, number: Callable[[], int]) -> int:
        """Rank 0's number, on every rank."""
        return self._tell(number() if self._ranks.leads else 0)

    # Saving.

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

    def _prepare(self, temporary: Path, step: int, shared: Parts) -> _Plan:
        plan = _Plan(step=step)
        if self._ranks.leads:
            try:
                if temporary.exists():
                    shutil.rmtree(temporary)
                temporary.mkdir()
            except OSError as error:
                plan = _Plan(step=step, error=f"{temporary.name}: {error.strerror}")
            if self._ranks.world_size > 1 and not plan.error:
                plan = _Plan(step=step, digests={name: digest_of(part) for name, part in shared.items()})
        plan = self._tell(plan)
        if plan.step != step:
            raise RuntimeError(
                f"rank {self._ranks.rank} saves step {step} and rank 0 step {plan.step}: the ranks' loops have parted; "
                "every rank must take the same number of batches"
            )
        return plan

    def _same_as_leader(self, name: str, part: dict[str, Any], plan: _Plan) -> bool:
        return not self._ranks.leads and name in plan.digests and plan.digests[name] == digest_of(part)

    def _write(self, folder: Path, parts: Parts) -> _Written:
        name = manifests.file_name(self._ranks.rank)
        try:
            with (folder / name).open("xb", buffering=0) as file:
                sink = Sink(file, self._observer.beat)
                torch.save(parts, cast("IO[bytes]", sink))
                sink.finish()
                os.fsync(file.fileno())
        except OSError as error:
            return _Written(error=f"{name}: {error.strerror}")
        entry = FileEntry(
            name=name,
            rank=self._ranks.rank,
            size_bytes=sink.size_bytes,
            digest=sink.seal.hexdigest(),
            parts=tuple(sorted(parts)),
        )
        return _Written(entry=entry)

    def _commit(self, temporary: Path, written: list[_Written], draft: Manifest) -> Saved:
        """The rename is the commit. Only rank 0 does this; only after it are older checkpoints removed."""
        if not self._ranks.leads:
            return Saved()
        error = next((answer.error for answer in written if answer.error), "")
        files = tuple(answer.entry for answer in written if answer.entry is not None)
        manifest = dataclasses.replace(draft, files=files)
        if not error:
            try:
                write_durably(temporary / manifests.MANIFEST_NAME, manifests.encode(manifest))
                manifests.read(temporary)  # a rank on a host that does not share the directory shows here
                sync_folder(temporary)
                temporary.rename(self._directory / manifests.folder_name(manifest.step))
                sync_folder(self._directory)
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
        for step in manifests.complete_steps(self._directory)[self._keep :]:
            old = self._directory / manifests.folder_name(step)
            old.rename(self._directory / f"{_TEMPORARY}old-{old.name}")
        refused = sorted(self._directory.glob(f"{_REFUSED}*"), key=lambda path: path.stat().st_mtime)
        for leftover in [*self._directory.glob(f"{_TEMPORARY}*"), *refused[:-1]]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    # Restoring.

    def _elect(self) -> _Choice:
        try:
            steps = [step for step in manifests.all_steps(self._directory) if step not in self._refused]
        except OSError as error:
            return _Choice(error=f"the checkpoint directory {self._directory} cannot be listed: {error.strerror}")
        for step in steps:
            try:
                manifest = manifests.read(self._directory / manifests.folder_name(step))
            except EvidenceError as error:
                self._refuse(step, str(error))
            except ConfigError as error:
                return _Choice(error=str(error))
            else:
                return _Choice(manifest=manifest, error=self._misfit(manifest))
        return _Choice()

    def _misfit(self, manifest: Manifest) -> str:
        if manifest.world_size == self._ranks.world_size:
            return ""
        return (
            f"{self._directory / manifests.folder_name(manifest.step)} was saved by {manifest.world_size} ranks and "
            f"this job has {self._ranks.world_size}: start it with "
            f"{manifest.world_size}, or give attach() another directory"
        )

    def _load(self, folder: Path, manifest: Manifest) -> tuple[Parts, str]:
        """This rank's parts, its own before rank 0's; and what is wrong with the files."""
        own = manifest.files[self._ranks.rank]
        entries = [own] if own.parts == manifest.files[0].parts else [manifest.files[0], own]
        parts: Parts = {}
        for entry in entries:
            try:
                content = manifests.read_verified(folder, entry)
            except EvidenceError as error:
                return {}, str(error)
            self._observer.beat()
            try:
                parts |= torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError) as error:
                raise ConfigError(
                    f"{folder / entry.name} is undamaged and torch {torch.__version__} cannot read it "
                    f"(written by {manifest.torch}): {error}"
                ) from error
            self._observer.beat()
        return parts, ""

    def _refuse(self, step: int, reason: str) -> None:
        """Set a damaged checkpoint aside, so that its step can be saved again; the last one stays as evidence."""
        folder = self._directory / manifests.folder_name(step)
        _log.warning("everstep does not use %s: %s; it tries the one before", folder, reason)
        self._observer.notes.write(
            CheckpointRefused(
                at_s=self._observer.notes.now_s(), attempt=Attempt(self.attempt), path=self._shown(step), reason=reason
            )
        )
        self._refused.add(step)
        aside = self._directory / f"{_REFUSED}{folder.name}-a{self.attempt:04d}"
        try:
            if aside.exists():
                shutil.rmtree(aside)
            folder.rename(aside)
        except OSError as error:
            _log.warning("everstep cannot set %s aside: %s", folder, error.strerror)

    # Telling.

    def _tell(self, message: _Message) -> _Message:
        """Rank 0's message, on every rank."""
        return msgspec.json.decode(self._ranks.broadcast(msgspec.json.encode(message)), type=type(message))

    def _report(self, saved: Saved, step: int, duration_s: float) -> None:
        if not self._ranks.leads:
            return
        now_s, attempt, path = self._observer.notes.now_s(), Attempt(self.attempt), self._shown(step)
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

    def _note_restored(self, step: int, duration_s: float) -> None:
        self._observer.notes.write(
            CheckpointRestored(
                at_s=self._observer.notes.now_s(),
                attempt=Attempt(self.attempt),
                step=step,
                path=self._shown(step),
                duration_s=duration_s,
            )
        )

    def _shown(self, step: int) -> str:
        """The path for the ledger: relative to the run directory where the checkpoints lie inside it."""
        folder = self._directory / manifests.folder_name(step)
        paths = self._observer.paths
        if paths and paths.checkpoints and self._directory == Path(paths.checkpoints):
            return str(folder.relative_to(self._directory.parent))
        return str(folder)
