"""A coordinator and hosts with real lines between them, over loopback with TLS; no test of its own."""

import contextlib
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from everstep.adapters.channel import LocalChannel
from everstep.adapters.checkpoints.peer_line import Credentials, address_of, listen, load_credentials, make_credentials
from everstep.adapters.clock import MonotonicClock
from everstep.adapters.hosts.board import LocalBoard
from everstep.adapters.hosts.host_joining import HostBoard, HostEnd, Welcomed, join
from everstep.adapters.hosts.host_line import LineConfig
from everstep.adapters.hosts.host_messages import Hello
from everstep.adapters.hosts.host_switchboard import HostSwitchboard, Terms
from everstep.domain.events import Event
from everstep.domain.ids import HostId

QUICK = LineConfig(beat_s=0.1, silence_s=1.0)
TERMS = Terms(
    run="run-1",
    host=HostId("h0"),
    host_count_max=3,
    everstep="1",
    nnodes="3",
    program=("train.py",),
    rdzv_id="",
    line=QUICK,
)
HELLO = Hello(host="h1", instance="i", everstep="1", nnodes="3", program=("train.py",), rdzv_id="")


def hello(**changes: object) -> Hello:
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    return Hello(**(fields | changes))


@dataclass
class Center:
    """The coordinator's side."""

    folder: Path
    terms: Terms = TERMS
    clock: MonotonicClock = field(default_factory=lambda: MonotonicClock(start_at_s=1000.0))
    board: LocalBoard = field(default_factory=LocalBoard)
    wakes: list[int] = field(default_factory=list)
    address: str = "127.0.0.1:0"
    unread: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.folder / "secret").exists():
            make_credentials(self.folder)
        self.credentials = self.load()
        self.channel = LocalChannel(wake=lambda: self.wakes.append(1))
        self.switchboard = self._open()

    def _open(self) -> HostSwitchboard:
        listener = listen(self.address)
        self.address = address_of(listener)
        board, clock = self.board, self.clock
        switchboard = HostSwitchboard(
            listener, self.credentials, self.terms, channel=self.channel, board=board, clock=clock
        )
        switchboard.start()
        return switchboard

    def load(self) -> Credentials:
        return load_credentials(self.folder, encrypted=True)

    def join(self, host: str = "h1", instance: str = "i") -> "Host":
        joined = Host(join(self.address, self.credentials, hello(host=host, instance=instance)))
        self._await_seat(HostId(host))
        return joined

    def _await_seat(self, host: HostId) -> None:
        """A host has joined a moment before the coordinator's side can tell it anything."""
        ends_s = time.monotonic() + 20.0
        while host not in self.switchboard.hosts:
            assert time.monotonic() < ends_s, f"{host} has joined and has no line"
            time.sleep(0.001)


@dataclass
class Host:
    """Another host's side."""

    welcomed: Welcomed
    config: LineConfig = QUICK

    def __post_init__(self) -> None:
        self.board = HostBoard()
        self.wakes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.end = HostEnd(
            self.welcomed.connection, board=self.board, wake=lambda: self.wakes.put(1), config=self.config
        )


@contextlib.contextmanager
def center(folder: Path, **changes: object) -> Iterator[Center]:
    made = Center(folder, terms=replace(TERMS, **changes))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.switchboard.close()
