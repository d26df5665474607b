"""Starts real ranks for the tests of saving and resuming, and reads what they wrote; it knows no checkpoint inside."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
KILLED = -9


class Launcher:
    """One process that has torch imported and forks ranks."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        command = [sys.executable, str(SCRIPTS / "launcher.py")]
        self.process = subprocess.Popen(
            command, env=environment, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, order: dict[str, Any]) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    assert launcher.process.stdin is not None
    launcher.process.stdin.close()
    launcher.process.wait(timeout=30)


class Lab:
    """One test's folder: attempts of a training with checkpoints in `directory`."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self.folder = folder
        self.directory = folder / "checkpoints"
        self._attempt = 0

    def start(self, name: str, **spec: Any) -> list[int]:
        self._attempt += 1
        whole = {"directory": str(self.directory), "out": str(self.folder / name), "attempt": self._attempt, **spec}
        return self._launcher.ask({"start": whole})

    def wait(self) -> list[int]:
        return self._launcher.ask({"wait": True})

    def train(self, name: str, *, code: int = 0, **spec: Any) -> list[list[dict[str, Any]]]:
        """Run an attempt to its end; the digests of each step, per rank. Every rank must end with `code`."""
        self.start(name, **spec)
        codes = self.wait()
        assert codes == [code] * spec["world"], f"{codes}\n{self.errors(name)}"
        return [self.steps(name, rank) for rank in range(spec["world"])]

    def steps(self, name: str, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def errors(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}.err.*")))

    def notes(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        path = self.folder / f"{name}.notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(kind, json.loads(body)) for kind, _, body in (line.partition(" ") for line in lines)]

    def refusals(self, name: str) -> list[str]:
        return [body["reason"] for kind, body in self.notes(name) if kind == "CheckpointRefused"]

    def failed_saves(self, name: str) -> list[str]:
        return [body["reason"] for kind, body in self.notes(name) if kind == "CheckpointFailed"]

    def restored_step(self, name: str) -> int | None:
        return next((body["step"] for kind, body in self.notes(name) if kind == "CheckpointRestored"), None)


@pytest.fixture
def lab(launcher: Launcher, tmp_path: Path) -> Lab:
    return Lab(launcher, tmp_path)
