"""A run's checkpoints in an object store: uploaded whole with the manifest last, tested when they are fetched.

A step is complete there if and only if its manifest is there, undamaged, and every file has its size. Nothing complete
is ever overwritten. It knows stores and manifests, and imports no torch; when to do what is `upload`'s.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.worker.format import manifest as manifests
from everstep.worker.format.durable import sync_folder
from everstep.worker.format.manifest import Manifest

_log = logging.getLogger(__name__)
HELD = ".mirroring-"
FETCHED = ".fetching-"
_AT_ONCE = 4
"""Files in flight; one connection to an object store is slower than most disks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredStep:
    """What the mirror has of one step; `problem` is empty when that is complete."""

    step: int
    manifest: Manifest | None = None
    problem: str = ""


class Mirror:
    """The checkpoints of one run in one store.

    Args:
        moved: called as bytes go, from any thread.
    """

    def __init__(self, store: ObjectStore, moved: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._moved = moved

    def steps(self) -> Iterator[MirroredStep]:
        """Newest first; each manifest is read when its turn comes.

        Raises:
            WorldError: the store fails, as in every method.
        """
        sizes = self._store.sizes()
        for step in sorted({s for name in sizes if (s := _step_of(name)) is not None}, reverse=True):
            yield self._look(step, sizes)

    def upload(self, directory: Path, step: int) -> Manifest:
        """Bring a complete step of the disk there, unless it is there already.

        Raises:
            EvidenceError: it is damaged here; nothing of it is published.
            OSError: it is gone from the disk meanwhile, or cannot be read.
        """
        folder = manifests.folder_name(step)
        found = self._look(step, self._store.sizes(folder))
        if found.manifest is not None:
            return found.manifest
        with _held(directory / folder) as held:
            manifest = manifests.read(held)
            for entry in manifest.each_file:
                manifests.check(held, entry, self._moved)
            self._store.remove(f"{folder}/{manifests.MANIFEST_NAME}")  # one that is damaged
            names = [name for name in _files(held) if name != manifests.MANIFEST_NAME]
            self._all(names, lambda name: self._store.put(held / name, f"{folder}/{name}", self._moved))
            sealed = (held / manifests.MANIFEST_NAME).read_bytes()
            sizes = self._store.sizes(folder)
            for name in names:
                if (got := sizes.get(f"{folder}/{name}")) != (expected := (held / name).stat().st_size):
                    raise WorldError(
                        f"{self._store.url}: {name} arrived with {got} of {expected} bytes", retryable=True
                    )
        self._store.write(f"{folder}/{manifests.MANIFEST_NAME}", sealed)
        if (found := self._look(step, self._store.sizes(folder))).problem:
            raise WorldError(f"{self._store.url}: {found.problem}", retryable=True)
        return manifest

    def prune(self, uploaded: int, keep: int) -> list[int]:
        """Remove what is older than the `keep` newest complete steps up to `uploaded`, which was just read back.

        Steps newer than it stay, whatever they are: they are another run's, or this run went back.
        """
        sizes, complete, removed = self._store.sizes(), 0, []
        for step in sorted({s for name in sizes if (s := _step_of(name)) is not None and s <= uploaded}, reverse=True):
            if complete < keep and self._look(step, sizes).manifest is not None:
                complete += 1
            elif complete:  # the newest complete one has been seen: this is not it
                folder = f"{manifests.folder_name(step)}/"
                names = [name for name in sizes if name.startswith(folder)]
                for name in sorted(names, key=lambda name: not name.endswith(manifests.MANIFEST_NAME)):
                    self._store.remove(name)  # the manifest first: a half removed step must not look complete
                removed.append(step)
        return removed

    def fetch(self, directory: Path, *, newer_than: int) -> tuple[int | None, list[tuple[int, str]]]:
        """Bring the newest complete step into a directory, tested; and the steps that could not be used, with why.

        Raises:
            OSError: the disk here fails.
        """
        refused: list[tuple[int, str]] = []
        for leftover in directory.glob(f"{FETCHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for found in self.steps():
            if found.step <= newer_than:
                break
            if found.manifest is None:
                refused.append((found.step, found.problem))
                continue
            try:
                self.fetch_step(found.manifest, directory / manifests.folder_name(found.step))
            except EvidenceError as problem:
                refused.append((found.step, str(problem)))
                continue
            return found.step, refused
        return None, refused

    def fetch_step(self, manifest: Manifest, target: Path) -> None:
        """Bring one step to a folder that does not exist yet; it appears whole or not at all.

        Raises:
            EvidenceError: a file is missing there or is not what was uploaded.
            OSError: the disk here fails.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{FETCHED}{target.name}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        folder = manifests.folder_name(manifest.step)
        try:
            there = {name.removeprefix(f"{folder}/") for name in self._store.sizes(folder)}
            names = there | {entry.name for entry in manifest.each_file}
            self._all(sorted(names), lambda name: self._get(f"{folder}/{name}", temporary / name))
            for entry in manifest.each_file:
                manifests.check(temporary, entry, self._moved)
            if manifests.read(temporary).digest != manifest.digest:
                raise EvidenceError(f"{manifests.MANIFEST_NAME} changed while the step was fetched")
            sync_folder(temporary)
            temporary.rename(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _get(self, name: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._store.get(name, local, self._moved)
        except FileNotFoundError as error:
            raise EvidenceError(f"{name} is missing in {self._store.url}") from error
        with local.open("rb") as file:
            os.fsync(file.fileno())

    def _look(self, step: int, sizes: dict[str, int]) -> MirroredStep:
        folder = manifests.folder_name(step)
        try:
            manifest = manifests.decode(self._store.read(f"{folder}/{manifests.MANIFEST_NAME}"))
        except FileNotFoundError:
            return MirroredStep(step=step, problem=f"{folder} has no {manifests.MANIFEST_NAME}: its upload never ended")
        except (EvidenceError, ConfigError) as error:
            return MirroredStep(step=step, problem=str(error))
        for entry in manifest.each_file:
            found = sizes.get(f"{folder}/{entry.name}")
            if found is None:
                return MirroredStep(step=step, problem=f"{entry.name} is missing")
            if found != entry.size_bytes:
                return MirroredStep(step=step, problem=f"{entry.name} has {found} bytes, expected {entry.size_bytes}")
        return MirroredStep(step=step, manifest=manifest)

    def _all(self, names: Iterable[str], work: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="everstep-mirror") as pool:
            for future in [pool.submit(work, name) for name in names]:
                future.result()


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[Path]:
    """The same files under another name, so that retention on disk does not take them away during a slow upload."""
    held = folder.parent / f"{HELD}{folder.name}"
    shutil.rmtree(held, ignore_errors=True)
    try:
        try:
            held.mkdir()
            for name in _files(folder):
                (held / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(folder / name, held / name)
        except OSError:
            if not folder.is_dir():
                raise
            yield folder  # no links here, or nothing may be written: a step that is pruned meanwhile is given up
        else:
            yield held
    finally:
        shutil.rmtree(held, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if not path.is_dir()]


def _step_of(name: str) -> int | None:
    folder, _, rest = name.partition("/")
    return manifests.step_of(folder) if rest else None
