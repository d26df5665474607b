"""The coordinator's end of the lines to all other hosts: who may join, their events in, commands and the board out.

It plugs each host into the coordinator's `LocalChannel`; whatever else happens on a line ends as HostLost there.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from everstep.adapters.channel import LocalChannel
from everstep.adapters.checkpoints.peer_line import Credentials, Line, answer
from everstep.adapters.clock import MonotonicClock
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
from everstep.domain.codec import is_command
from everstep.domain.commands import FinishJob
from everstep.domain.errors import EvidenceError
from everstep.domain.events import HostLost, RunResumed, RunStarted, Ticked
from everstep.domain.ids import HostId

_log = logging.getLogger(__name__)
_GREETED_AT_ONCE_MAX = 64
_OF_ONE_ADDRESS_MAX = 32
_JOINS_WITHIN_S = 10.0
_TOLD_WITHIN_S = 5.0
_PAUSE_S = 0.02
_NOT_FROM_AGENTS = (RunStarted, RunResumed, Ticked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a host must bring to join.

    Attributes:
        run: the run's id.
        host: the coordinator's own.
        host_count_max: more hosts than this have no place.
        everstep, nnodes, program, rdzv_id: as on the coordinator's host.
        line: of every line.
    """

    run: str
    host: HostId
    host_count_max: int
    everstep: str
    nnodes: str
    program: tuple[str, ...]
    rdzv_id: str
    line: LineConfig = field(default_factory=LineConfig)

    def objection(self, hello: Hello) -> str:
        """Why this host can never join; empty when it may."""
        for flag, theirs, ours in (
            ("everstep", hello.everstep, self.everstep),
            ("--nnodes", hello.nnodes, self.nnodes),
            ("--rdzv-id", hello.rdzv_id, self.rdzv_id),
            ("the command", " ".join(hello.program), " ".join(self.program)),
        ):
            if theirs != ours:
                return (
                    f"{flag} is {theirs or 'not given'} on {hello.host} and {ours or 'not given'} on the "
                    f"coordinator's host {self.host}: it must be the same on all hosts of a job"
                )
        return ""


@dataclass(slots=True)
class _Seat:
    """A host that has joined, or is about to."""

    instance: str
    node_rank: int | None = None
    line: HostLine | None = None


class HostSwitchboard:
    """Serves until `finish` or `close`.

    Args:
        listener: a listening socket, this one's from now on.
        channel: where the hosts are plugged in.
        board: what all hosts see.
        clock: the run's clock.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        terms: Terms,
        *,
        channel: LocalChannel,
        board: LocalBoard,
        clock: MonotonicClock,
    ) -> None:
        self._listener = listener
        self._credentials = credentials
        self._terms = terms
        self._channel = channel
        self._board = board
        self._clock = clock
        self._seats: dict[HostId, _Seat] = {}
        self._lock = threading.Lock()
        self._greeting = threading.BoundedSemaphore(_GREETED_AT_ONCE_MAX)
        self._greeted: Counter[str] = Counter()
        self._over = threading.Event()
        self._end: FinishJob | None = None
        self._thread = threading.Thread(target=self._accept, name="everstep-hosts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Those that have joined, by name."""
        with self._lock:
            return tuple(sorted(host for host, seat in self._seats.items() if seat.line is not None))

    def finish(self, end: FinishJob) -> None:
        """Tell all hosts that the job is over, wait a moment for them to have heard it, and close."""
        self._over.set()
        frame = frame_of(end)
        with self._lock:
            self._end = end  # for a host that has all but joined
            lines = [seat.line for seat in self._seats.values() if seat.line is not None]
        for line in lines:
            line.send(frame)
        deadline_s = time.monotonic() + _TOLD_WITHIN_S
        while self._seats and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)  # a host that has heard it closes its line
        self.close()

    def close(self) -> None:
        """Cut all lines and stop listening. May be called twice."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            lines = [seat.line for seat in self._seats.values() if seat.line is not None]
        for line in lines:
            line.close("the coordinator ends")
        for line in lines:
            line.join()

    # --- joining

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                if self._over.is_set():
                    return
                time.sleep(_PAUSE_S)  # too many open files, or the stranger has left already
                continue
            if self._greeted[address] >= _OF_ONE_ADDRESS_MAX:
                connection.close()  # others must get through, too; a host asks again
                continue
            self._greeting.acquire()  # a greeting ends within seconds
            with self._lock:
                self._greeted[address] += 1
            try:
                threading.Thread(
                    target=self._greet, args=(connection, address), name="everstep-greeting", daemon=True
                ).start()
            except RuntimeError as error:  # no more threads can be had just now
                _log.warning("%s cannot be greeted (%s)", address, error)
                connection.close()
                self._greeting_is_over(address)

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            self._admit(answer(connection, self._credentials))
        except (OSError, EvidenceError) as error:
            _log.info("%s was turned away: %s", address, error)
        finally:
            self._greeting_is_over(address)

    def _greeting_is_over(self, address: str) -> None:
        with self._lock:
            self._greeted[address] -= 1
            if not self._greeted[address]:
                del self._greeted[address]
        self._greeting.release()

    def _admit(self, line: Line) -> None:
        """Take a greeted host in, or tell it why not.

        Raises:
            OSError, EvidenceError: it left, or does not speak as a host does.
        """
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(line)
            hello = message_of(line.receive())
            if not isinstance(hello, Hello):
                raise EvidenceError("a host must say first who it is")
            host = HostId(hello.host)
            refusal = self._refusal(host, hello)
            if refusal is not None:
                line.send(frame_of(refusal))
                return
            on_failure.callback(self._vacate, host, hello.instance)
            line.send(frame_of(Welcome(run=self._terms.run)))
            ends_s = time.monotonic() + _JOINS_WITHIN_S
            while not isinstance(message := message_of(line.receive()), Ready):
                if not isinstance(message, Ping) or time.monotonic() > ends_s:
                    raise EvidenceError(f"{host} did not finish joining")
                line.send(frame_of(Pong(now_s=self._clock.now_s())))
            self._open(host, hello.instance, line.release())
            on_failure.pop_all()

    def _refusal(self, host: HostId, hello: Hello) -> Refusal | None:
        """Why the host cannot join now; None when it has a seat from now on."""
        if objection := self._terms.objection(hello):
            _log.warning("%s cannot join: %s", host, objection)
            return Refusal(reason=objection, final=True)
        if self._over.is_set():
            return Refusal(reason="the job is at its end", final=False)
        with self._lock:
            seat = self._seats.get(host)
        if seat is not None and seat.instance == hello.instance and seat.line is not None:
            seat.line.close("it has joined again")  # its end broke, and ours has not noticed yet
            seat.line.join()
        with self._lock:
            if host in self._seats or host == self._terms.host:
                reason = f"there is a host {host} already; each machine or container needs a hostname of its own"
                return Refusal(reason=reason, final=False)
            if len(self._seats) + 1 >= self._terms.host_count_max:
                here = ", ".join(sorted((self._terms.host, *self._seats)))
                return Refusal(reason=f"the job has all its hosts ({here})", final=False)
            rank = hello.node_rank
            if rank is not None and (other := next((h for h, s in self._seats.items() if s.node_rank == rank), "")):
                return Refusal(reason=f"host {other} has --node-rank {rank} already; give each its own", final=False)
            self._seats[host] = _Seat(hello.instance, rank)
        return None

    def _open(self, host: HostId, instance: str, connection: socket.socket) -> None:
        line = HostLine(
            connection,
            take=lambda frame: self._take(host, frame),
            ended=lambda reason: self._lost(host, instance, reason),
            config=self._terms.line,
        )
        self._channel.plug(host, lambda command: line.send(frame_of(command)))
        self._board.follow(host, lambda key, value: line.send(frame_of(Posted(key=key, value=value))))
        with self._lock:
            self._seats[host].line = line
            end = self._end
        line.start()
        if end is not None:
            line.send(frame_of(end))
        elif self._over.is_set():
            line.close("the coordinator ends")

    def _vacate(self, host: HostId, instance: str) -> bool:
        with self._lock:
            seat = self._seats.get(host)
            if seat is None or seat.instance != instance:
                return False
            del self._seats[host]
            return True

    # --- serving

    def _take(self, host: HostId, frame: bytes) -> None:
        message = message_of(frame)
        if isinstance(message, Posted):
            if len(message.key.encode()) > KEY_BYTES_MAX or len(message.value) > VALUE_BYTES_MAX:
                raise EvidenceError("a value for the board is too long")
            self._board.post(message.key, message.value)
            return
        is_event = not is_command(message) and hasattr(message, "at_s")  # type: ignore[arg-type]
        if not is_event or isinstance(message, _NOT_FROM_AGENTS) or getattr(message, "host", host) != host:
            raise EvidenceError(f"a {type(message).__name__} is not for {host} to say")
        self._channel.post(message)  # type: ignore[arg-type]

    def _lost(self, host: HostId, instance: str, reason: str) -> None:
        self._channel.unplug(host)
        self._board.unfollow(host)
        if not self._over.is_set():
            sentence = f"the line to host {host} has ended: {reason}"
            self._channel.post(HostLost(at_s=self._clock.now_s(), host=host, reason=sentence))
        self._vacate(host, instance)
