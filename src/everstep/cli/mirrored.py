"""`everstep checkpoints` on a mirror: list, verify, prune and fetch what an object store has of a run."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.cli.checkpoint_rows import row
from everstep.domain.errors import ConfigError, EvidenceError, ExitCode
from everstep.worker.format.manifest import Manifest, folder_name
from everstep.worker.mirror.store_copies import Mirror, MirroredStep


class MirrorShelf:
    """The steps of one mirror, newest first, or the one that was asked for.

    Raises:
        ConfigError: the URL cannot be used, or the step is not there.
        WorldError: the store fails.
    """

    def __init__(self, url: str, step: int | None) -> None:
        self.url = url
        self._mirror = Mirror(ObjectStore(url))
        self.steps = [found for found in self._mirror.steps() if step is None or found.step == step]
        if step is not None and not self.steps:
            raise ConfigError(f"{url} has no checkpoint of step {step}; list shows what it has")

    def verify(self) -> int:
        """Fetch every file once and test it. Returns the exit code."""
        damaged = 0
        for found in self.steps:
            problem = found.problem or self._problem(found)
            damaged += bool(problem)
            sys.stdout.write(f"step {found.step}: {problem or 'every file is as it was uploaded'}\n")
        if not self.steps:
            sys.stdout.write(f"{self.url} has no checkpoint\n")
        return ExitCode.SCRIPT_BUG if damaged else ExitCode.DONE

    def prune(self, keep: int) -> int:
        """Remove all but the newest complete ones. Returns the exit code."""
        newest = next((found.step for found in self.steps if found.manifest is not None), None)
        if newest is not None:
            for step in self._mirror.prune(newest, keep):
                sys.stdout.write(f"removed step {step}\n")
        return ExitCode.DONE

    def fetch(self, directory: Path) -> Path:
        """Bring the newest complete one into a folder; its path."""
        manifest = self._newest()
        target = directory / folder_name(manifest.step)
        if target.exists():
            raise ConfigError(f"{target} exists already; give another folder with --out")
        self._mirror.fetch_step(manifest, target)
        return target

    def _newest(self) -> Manifest:
        for found in self.steps:
            if found.manifest is not None:
                return found.manifest
        raise ConfigError(f"{self.url} has no complete checkpoint")

    def _problem(self, found: MirroredStep) -> str:
        assert found.manifest is not None
        with tempfile.TemporaryDirectory(prefix="everstep-verify-") as folder:
            try:
                self._mirror.fetch_step(found.manifest, Path(folder) / folder_name(found.step))
            except EvidenceError as problem:
                return str(problem)
        return ""

    def rows(self) -> Iterator[str]:
        """One line for each."""
        for found in self.steps:
            yield row(found.step, "in the mirror", found.manifest or found.problem)
