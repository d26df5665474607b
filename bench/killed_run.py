"""One run that bench/checkpoint_kills.py kills parts of: its processes, and what memory, disk and mirror have of it.

It looks from outside, at files and /proc, and asks the run nothing.
"""

import contextlib
import filecmp
import os
import subprocess
import sys
from pathlib import Path

from everstep.adapters.checkpoints.memory_folder import folder_of
from everstep.adapters.checkpoints.memory_slots import RankSlots, SavePages, ranks_present
from everstep.adapters.ledger_file import read_entries
from everstep.adapters.workers.processes import processes_of_run
from everstep.domain.codec import Entry
from everstep.domain.errors import ConfigError, EverstepError, EvidenceError
from everstep.domain.events import RunStarted
from everstep.policy.checkpoints import SlotState, committed_steps
from everstep.worker.format import manifest as manifests
from everstep.worker.mirror.store_copies import FETCHED, HELD
from everstep.worker.saving.saver import TEMPORARY

SCRIPT = Path(__file__).resolve().parent / "kill_target.py"
WORLD_SIZE = 2


class KilledRun:
    """`everstep run` with a mirror in a plain folder: of all stores the one that tears objects most easily.

    Attributes:
        folder: the run directory. The mirror, and a log of what the run says, lie beside it.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.mirror = folder.with_name(f"{folder.name}-mirror")
        self.log = folder.with_name(f"{folder.name}.log")
        self._digest = folder / "digest"
        self._command = [
            *(str(Path(sys.executable).with_name("everstep")), "run", "--nproc-per-node", str(WORLD_SIZE)),
            *("--quiet", "--run-dir", str(folder), "--checkpoint-mirror", f"file://{self.mirror}"),
            *(str(SCRIPT), str(steps), str(self._digest)),
        ]
        self._run = ""
        self.agent = self._start()

    def again(self) -> None:
        """What a person does whose `everstep run` is gone: type it once more."""
        self.agent = self._start()

    def digest(self) -> str:
        """Of the final weights and the optimizer's state; empty until the job has ended well."""
        return self._digest.read_text() if self._digest.exists() else ""

    def entries(self) -> list[Entry]:
        return list(read_entries(self.folder / "ledger.jsonl"))

    def newest(self) -> int:
        """The newest step that is complete on all ranks in memory, or on disk; 0 when there is none.

        Memory is looked at first: it goes only when the disk has what was in it.
        """
        found = 0
        with contextlib.suppress(EverstepError, OSError):
            found = next(iter(committed_steps([slots.slots() for slots in self._slots()])), 0)
        return max(found, self._on_disk())

    def newest_in_mirror(self) -> int:
        """0 when no step is complete there."""
        with contextlib.suppress(OSError):
            return next(iter(manifests.complete_steps(self.mirror)), 0)
        return 0

    def under_way(self) -> list[str]:
        """Which saves are at work right now: to `memory`, to `disk`, to the `mirror`."""
        found = []
        with contextlib.suppress(EverstepError, OSError):
            if any(slot.state is SlotState.WRITING for slots in self._slots() for slot in slots.slots()):
                found.append("memory")
        with contextlib.suppress(OSError):
            names = os.listdir(self.folder / "checkpoints")
            found += ["disk"] * any(name.startswith(TEMPORARY) for name in names)
            found += ["mirror"] * any(name.startswith(HELD) for name in names)
        return found

    def torn_in_mirror(self) -> list[str]:
        """What is wrong in the mirror with steps that count as complete there, every byte read."""
        wrong = []
        with contextlib.suppress(FileNotFoundError):
            for step in manifests.complete_steps(self.mirror):
                folder = self.mirror / manifests.folder_name(step)
                try:
                    for entry in manifests.read(folder).each_file:
                        manifests.check(folder, entry)
                except (EvidenceError, ConfigError) as problem:
                    if (folder / manifests.MANIFEST_NAME).exists():  # else retention took it away meanwhile
                        wrong.append(f"step {step}: {problem}")
        return wrong

    def mirror_at_the_end(self) -> str:
        """What the mirror lacks when the job has ended: its newest step must be the disk's, byte for byte."""
        on_disk, there = self._on_disk(), self.newest_in_mirror()
        if on_disk != there or not there:
            return f"the newest step on disk is {on_disk}, in the mirror {there}"
        local, copy = (folder / manifests.folder_name(there) for folder in (self.folder / "checkpoints", self.mirror))
        names = sorted(path.name for path in local.iterdir())
        if names != sorted(path.name for path in copy.iterdir()):
            return f"step {there} has other files in the mirror"
        _, different, unreadable = filecmp.cmpfiles(local, copy, names, shallow=False)
        left = [name for name in os.listdir(local.parent) if name.startswith((HELD, FETCHED))]
        return (
            f"step {there}: {[*different, *unreadable]}, left over: {left}" if different or unreadable or left else ""
        )

    def alive(self) -> dict[str, list[int]]:
        """The processes of each kind of victim; kinds without any are left out."""
        uploaders = _pids_of(b"everstep.worker.mirror.upload", os.fsencode(self.folder))
        workers = self._workers()
        found = {"worker": workers, "all workers": workers, "saver": self._savers(), "uploader": uploaders}
        if self.agent.poll() is None:
            found["agent"] = [self.agent.pid]
        return {kind: pids for kind, pids in found.items() if pids}

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def _run_id(self) -> str:
        if not self._run:
            with contextlib.suppress(EverstepError, OSError):
                first = next(iter(read_entries(self.folder / "ledger.jsonl")), None)
                if first is not None and isinstance(first.body, RunStarted):
                    self._run = str(first.body.run)
        return self._run

    def _on_disk(self) -> int:
        with contextlib.suppress(OSError):
            return next(iter(manifests.complete_steps(self.folder / "checkpoints")), 0)
        return 0

    def _slots(self) -> list[RankSlots]:
        """Of all ranks; none before all have some."""
        memory = folder_of(self._run_id())
        if not self._run_id() or len(ranks_present(memory)) != WORLD_SIZE:
            return []
        return [RankSlots(memory, rank) for rank in range(WORLD_SIZE)]

    def _savers(self) -> list[int]:
        with contextlib.suppress(EverstepError, OSError):
            if self._run_id() and (memory := folder_of(self._run_id())).is_dir():
                pid = SavePages(memory).word().pid
                return [pid] if b"everstep.worker.saving.saver" in _proc(pid, "cmdline") else []
        return []

    def _workers(self) -> list[int]:
        """Forks of the zygote have its environment; only the ranks have mapped a progress page."""
        marked = processes_of_run(self._run_id()) if self._run_id() else []
        return [pid for pid in marked if b"LOCAL_RANK=" in _proc(pid, "environ") or b".page" in _proc(pid, "maps")]


def _proc(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _pids_of(*parts: bytes) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if all(part in _proc(pid, "cmdline") for part in parts)]
