"""A host's end of its line to the coordinator: finds it, joins, takes the time from it, and is its agent's channel.

Knows nothing of workers. A line that is lost stays lost; joining again makes another one.
"""

import queue
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from everstep.adapters.checkpoints.peer_line import Credentials, Line, connect
from everstep.adapters.hosts.board import KEY_BYTES_MAX, VALUE_BYTES_MAX, LocalBoard
from everstep.adapters.hosts.host_line import HostLine, LineConfig
from everstep.adapters.hosts.host_messages import (
    Hello,
    Ping,
    Pong,
    Posted,
    Ready,
    Refusal,
    Welcome,
    frame_of,
    message_of,
)
from everstep.domain.commands import FinishJob, HostCommand
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.domain.events import Event

_ROUND_TRIPS = 8
_READ_SLICE_S = 0.2
_LOOKED_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
    """A host that may begin.

    Attributes:
        zero_ns: this host's CLOCK_MONOTONIC at second 0 of the coordinator's clock.
        address: by which this host reached the coordinator, so that others of the job reach it there.
    """

    connection: socket.socket
    run: str
    zero_ns: int
    address: str


class Stranger(EvidenceError):
    """Whoever answers at the endpoint is not this job's coordinator."""


class Refused(WorldError):
    """The coordinator is there and does not let this host join, for now."""


def join(endpoint: str, credentials: Credentials, hello: Hello) -> Welcomed:
    """Join the job at `HOST:PORT`, now or not at all.

    Raises:
        ConfigError: this host can never join as it was started.
        Stranger: somebody else answers there.
        Refused: the coordinator does, and asking again may help.
        WorldError: nobody answers, or whoever does leaves, as a coordinator does that ends, or a tunnel before it.
    """
    try:
        line = connect(endpoint, credentials)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise WorldError("whoever was there has closed the line", retryable=True) from error
    except (ssl.SSLError, EvidenceError) as error:
        raise Stranger(str(error)) from error
    except OSError as error:
        raise WorldError(error.strerror or str(error), retryable=True) from error
    try:
        return _joined(line, hello)
    except OSError as error:
        line.close()
        raise WorldError(f"the coordinator was there and left ({error})", retryable=True) from error
    except (ConfigError, WorldError, EvidenceError):
        line.close()
        raise


def is_anybody_at(endpoint: str) -> bool:
    """Whether anything accepts connections at `HOST:PORT`."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOKED_WITHIN_S).close()
    except OSError:
        return False
    return True


def _joined(line: Line, hello: Hello) -> Welcomed:
    line.send(frame_of(hello))
    answer = message_of(line.receive())
    if isinstance(answer, Refusal):
        if answer.final:
            raise ConfigError(answer.reason)
        raise Refused(answer.reason, retryable=True)
    if not isinstance(answer, Welcome):
        raise EvidenceError(f"the coordinator answered with {type(answer).__name__}")
    zero_ns = _zero_ns(line)
    line.send(frame_of(Ready()))
    connection = line.release()
    address = str(connection.getsockname()[0])
    return Welcomed(connection=connection, run=answer.run, zero_ns=zero_ns, address=address)


def _zero_ns(line: Line) -> int:
    """Second 0 of the coordinator's clock on this host's: from the shortest of several round trips, half a trip each
    way (Cristian 1989), so it is wrong by at most half of that trip."""
    best_ns = best_zero_ns = 0
    for number in range(_ROUND_TRIPS):
        asked_ns = time.monotonic_ns()
        line.send(frame_of(Ping()))
        answer = message_of(line.receive())
        took_ns = time.monotonic_ns() - asked_ns
        if not isinstance(answer, Pong):
            raise EvidenceError(f"the coordinator answered with {type(answer).__name__}")
        if number == 0 or took_ns < best_ns:
            best_ns, best_zero_ns = took_ns, asked_ns + took_ns // 2 - int(answer.now_s * 1e9)
    return best_zero_ns


class HostEnd:
    """The agent's end: an `AgentChannel`.

    Args:
        board: where the coordinator's values go.
        wake: called after each command and at the end of the line.

    Attributes:
        end: the job's end, once the coordinator has told it.
        lost: why the line is gone; empty while it is there.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        board: "HostBoard",
        wake: Callable[[], None],
        config: LineConfig | None = None,
    ) -> None:
        self._commands: queue.SimpleQueue[HostCommand] = queue.SimpleQueue()
        self._board = board
        self._wake = wake
        self.end: FinishJob | None = None
        self.lost = ""
        self._line = HostLine(connection, take=self._take, ended=self._ended, config=config)
        board.connect(self._line)
        self._line.start()

    def send(self, event: Event) -> None:
        self._line.send(frame_of(event))

    def receive(self) -> Sequence[HostCommand]:
        commands = []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def close(self) -> None:
        self._line.close("it was closed here")
        self._line.join()

    def _take(self, frame: bytes) -> None:
        message = message_of(frame)
        if isinstance(message, Posted):
            self._board.take(message.key, message.value)
            return
        if isinstance(message, FinishJob):
            self.end = message
            self._line.close("the job is over")
        elif isinstance(message, get_args(HostCommand)):
            self._commands.put(message)
        else:
            raise EvidenceError(f"a {type(message).__name__} is not for a host to do")
        self._wake()

    def _ended(self, reason: str) -> None:
        self._board.disconnect()
        self.lost = reason or "the line has ended"
        self._wake()


class HostBoard:
    """The `Board` port of a host without the coordinator: values come from there, so all hosts agree on the newest."""

    def __init__(self) -> None:
        self._seen = LocalBoard()
        self._line: HostLine | None = None
        self.watch: Callable[[str, bytes], None] = lambda _key, _value: None
        """Called with each value that the coordinator tells; must not wait for anything."""

    def connect(self, line: HostLine) -> None:
        """A new coordinator's board may know nothing of what an old one's knew."""
        self._seen = LocalBoard()
        self._line = line

    def disconnect(self) -> None:
        self._line = None

    def take(self, key: str, value: bytes) -> None:
        """The coordinator tells a value."""
        self._seen.post(key, value)
        self.watch(key, value)

    def post(self, key: str, value: bytes) -> None:
        """See `ports.Board`."""
        assert len(key.encode()) <= KEY_BYTES_MAX
        assert len(value) <= VALUE_BYTES_MAX
        line = self._line
        if line is None:
            raise WorldError(f"{key!r} cannot be told to the other hosts: the coordinator is away", retryable=True)
        line.send(frame_of(Posted(key=key, value=value)))

    def read(self, key: str, *, within_s: float) -> bytes:
        """See `ports.Board`."""
        ends_s = time.monotonic() + within_s
        while True:
            left_s = ends_s - time.monotonic()
            try:
                return self._seen.read(key, within_s=max(0.0, min(left_s, _READ_SLICE_S)))
            except WorldError:
                if self._line is None:
                    raise WorldError(f"{key!r} cannot be read: the coordinator is away", retryable=True) from None
                if left_s <= _READ_SLICE_S:
                    raise WorldError(f"no host has posted {key!r} within {within_s:g} s", retryable=True) from None
