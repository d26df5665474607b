"""Hosts for the tests of copies: each a memory folder with a replicator, told of the others as a launcher would."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.memory_folder import MemoryFolder, open_folder
from everstep.adapters.checkpoints.memory_slots import RankSlots, SlotHeader, image_path, ranks_present, rest_path
from everstep.adapters.checkpoints.peer_files import (
    COPIES_NAME,
    CREDENTIALS_NAME,
    PeerRoster,
    Readiness,
    read_address,
    read_readiness,
    write_roster,
)
from everstep.adapters.checkpoints.peer_line import make_credentials
from everstep.policy.checkpoints import SlotState
from everstep.policy.peers import Host, place
from everstep.policy.replication import Version
from everstep.worker.format import layout as layouts
from everstep.worker.format.manifest import Manifest
from everstep.worker.format.seal import seal_of
from everstep.worker.format.trailer import pack
from everstep.worker.peers.shard_store import version_of

WITHIN_S = 30.0
TWO = {"a": (0, 1), "b": (2, 3)}
MB = 1 << 20


def wait_for(condition: Callable[[], object], what: str, *, within_s: float = WITHIN_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {within_s} s in vain for {what}"
        time.sleep(0.01)


class SimulatedHost:
    """A folder and a process."""

    def __init__(self, name: str, parent: Path, credentials: Path) -> None:
        self.name = name
        self._parent = parent
        self._credentials = credentials
        self._held: MemoryFolder | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._write_end = -1
        self.errors = parent / f"{name}.err"
        self.come_up()

    @property
    def folder(self) -> Path:
        assert self._held is not None
        return self._held.path

    def come_up(self) -> None:
        """With an empty memory."""
        self._held = open_folder(self.name, parent=self._parent)
        shutil.copytree(self._credentials, self.folder / CREDENTIALS_NAME)
        self.start()

    def start(self) -> None:
        read_end, self._write_end = os.pipe()
        command = [sys.executable, "-m", "everstep.worker.peers.replicator", str(read_end), str(self.folder)]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(command, pass_fds=[read_end], stderr=errors, start_new_session=True)
        os.close(read_end)
        pid = str(self.process.pid)
        wait_for(lambda: read_address(self.folder) and f"{pid}" and self.process.poll() is None, "an address")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.end()

    def lose(self) -> None:
        """The host is gone with all that it had."""
        self.kill()
        assert self._held is not None
        self._held.release()
        shutil.rmtree(self.folder)

    def stop(self) -> None:
        """In good order; it must end by itself."""
        assert self.process is not None
        os.close(self._write_end)
        assert self.process.wait(10) == 0

    def end(self) -> None:
        """The run is over; the replicator ends when its host's saver has."""
        if self._write_end >= 0:
            os.close(self._write_end)
        self._write_end = -1

    def copies(self, shard: int) -> list[Version]:
        return complete(self.folder / COPIES_NAME, shard)

    def is_receiving(self) -> bool:
        """Whether a copy is being written now."""
        folder = self.folder / COPIES_NAME
        headers = [RankSlots(folder, shard) for shard in ranks_present(folder)]
        return any(slot.state is SlotState.WRITING for found in headers for slot in found.slots())

    def ready(self) -> Readiness | None:
        return read_readiness(self.folder)


def complete(folder: Path, shard: int) -> list[Version]:
    """The versions of a shard that a folder says it holds; each must have the bytes that its header promises."""
    if not folder.exists():
        return []
    headers, found = RankSlots(folder, shard), []
    for slot in range(3):
        header = headers.read(slot)
        if header.state is not SlotState.COMPLETE:
            continue
        image = image_path(folder, shard, slot).read_bytes()
        if headers.read(slot) == header:  # else it was overwritten meanwhile
            assert (len(image), seal_of(image)) == (header.image_bytes, header.image_seal)
            found.append(version_of(header))
    return found


def write_shard(folder: Path, shard: int, slot: int, step: int, content: bytes, *, of: int, attempt: int = 1) -> None:
    """A slot as a rank would leave it."""
    rest = f"rest of {shard} at {step}".encode()
    image_path(folder, shard, slot).write_bytes(content)
    rest_path(folder, shard, slot).write_bytes(rest)
    header = SlotHeader(
        state=SlotState.COMPLETE,
        step=step,
        layout="a" * 32,
        image_bytes=len(content),
        rest_bytes=len(rest),
        image_seal=seal_of(content),
        rest_seal=zlib.crc32(rest),
        attempt=attempt,
        facts=f'{{"world_size":{of}}}'.encode(),
    )
    RankSlots(folder, shard).write(slot, header)


class Cluster:
    """Some hosts of one job."""

    def __init__(self, parent: Path, ranks: Mapping[str, Sequence[int]]) -> None:
        self._ranks = {name: tuple(found) for name, found in ranks.items()}
        self.credentials = parent / "credentials"
        make_credentials(self.credentials)
        self.hosts = {name: SimulatedHost(name, parent, self.credentials) for name in ranks}
        self.generation = 0

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            if host.process is not None and host.process.poll() is None:
                host.kill()

    def memories(self) -> list[str]:
        """The memory folder of each rank."""
        owners = {rank: name for name, ranks in self._ranks.items() for rank in ranks}
        return [str(self.hosts[owners[rank]].folder) for rank in sorted(owners)]

    def tell(self, *, restoring: bool = False, bytes_per_s: float = 0.0) -> None:
        """A new roster to all."""
        self.generation += 1
        keepers = dict(place([Host(name=name) for name in self.hosts]).keepers)
        addresses = {name: read_address(host.folder) for name, host in self.hosts.items()}
        for name, host in self.hosts.items():
            roster = PeerRoster(
                generation=self.generation,
                host=name,
                addresses=addresses,
                ranks=self._ranks,
                keepers=keepers,
                restoring=restoring,
                bytes_per_s=bytes_per_s,
            )
            write_roster(host.folder, roster)

    def restore(self) -> list[Readiness]:
        """What a launcher does before each attempt."""
        self.tell(restoring=True)
        return self.wait_ready()

    def wait_ready(self) -> list[Readiness]:
        """Until every host says that the ranks may start."""

        def all_ready() -> bool:
            found = [host.ready() for host in self.hosts.values()]
            return all(ready is not None and ready.generation == self.generation for ready in found)

        wait_for(all_ready, f"all hosts to be ready; {self.errors()}")
        return [ready for host in self.hosts.values() if (ready := host.ready()) is not None]

    def held_by_all(self) -> list[Version]:
        """The versions of which every shard has its copies on both its hosts, newest last."""
        keepers = place([Host(name=name) for name in self.hosts]).keepers
        common: set[Version] | None = None
        for owner, ranks in self._ranks.items():
            for place_ in {owner, keepers[owner]}:
                for rank in ranks:
                    held = set(self.hosts[place_].copies(rank))
                    common = held if common is None else common & held
        return sorted(common or ())

    def errors(self) -> str:
        return "".join(host.errors.read_text() for host in self.hosts.values() if host.errors.exists())


def save(cluster: Cluster, step: int, *, slot: int, size: int = MB + 1000) -> None:
    for rank, folder in enumerate(cluster.memories()):
        write_shard(Path(folder), rank, slot, step, bytes([rank, step]) * (size // 2), of=len(cluster.memories()))


def steps(cluster: Cluster) -> list[int]:
    return [version.step for version in cluster.held_by_all()]


LAYOUT = layouts.encode(
    layouts.Layout(
        torch="2.13", ranks=(layouts.RankLayout(pieces=(), table_at=0),), values=(), parameters=(), states={}
    )
)


def write_slot(folder: Path, rank: int, slot: int, step: int, *, of: int, size: int = MB, attempt: int = 1) -> None:
    """A slot that a saver can write to disk: it tells its layout."""
    content = bytes([rank + 1, step % 256]) * (size // 2) + pack(LAYOUT, b"metadata")
    rest = f"rest of {rank} at {step}".encode()
    headers = RankSlots(folder, rank)
    headers.write(slot, SlotHeader(state=SlotState.WRITING))
    image_path(folder, rank, slot).write_bytes(content)
    rest_path(folder, rank, slot).write_bytes(rest)
    draft = Manifest(
        step=step, world_size=of, torch="2.13", thread_count=1, interval_steps=1, inexact_because=(), files=()
    )
    header = SlotHeader(
        state=SlotState.COMPLETE,
        step=step,
        layout=layouts.digest_of(LAYOUT),
        image_bytes=len(content),
        rest_bytes=len(rest),
        image_seal=seal_of(content),
        rest_seal=zlib.crc32(rest),
        attempt=attempt,
        facts=msgspec.json.encode(draft),
    )
    headers.write(slot, header)


class SaverOfHost:
    """The saver of a simulated host, as a process."""

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._write_end = -1

    def start(self) -> None:
        read_end, self._write_end = os.pipe()
        command = [sys.executable, "-m", "everstep.worker.saving.saver", str(read_end), str(self._host.folder)]
        with self._host.errors.open("ab") as errors:
            self._process = subprocess.Popen(command, pass_fds=[read_end], stderr=errors, start_new_session=True)
        os.close(read_end)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            os.close(self._write_end)

    def end(self) -> None:
        """The run is over; it does what is left by itself."""
        os.close(self._write_end)

    def wait(self, within_s: float) -> int:
        assert self._process is not None
        return self._process.wait(within_s)
