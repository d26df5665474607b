"""One end of a line between two hosts while it is open: frames in order both ways, heartbeats, and how it ended.

A thread of its own reads and writes, so a busy agent is not a silent host. It knows frames, not what they mean.
"""

import contextlib
import logging
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from everstep.adapters.hosts.host_messages import HEARTBEAT
from everstep.domain.errors import EvidenceError

_log = logging.getLogger(__name__)
_FRAME = struct.Struct("<I")
_PIECE_BYTES = 1 << 18
_PIECES_AT_ONCE = 64
_ENDS_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineConfig:
    """Attributes:
    beat_s: something is said at least so often.
    silence_s: an end that says nothing for so long is gone.
    frame_bytes_max: no message is longer.
    waiting_bytes_max: what may wait for the other end to take it.
    """

    beat_s: float = 1.0
    silence_s: float = 8.0
    frame_bytes_max: int = 64 << 20
    waiting_bytes_max: int = 256 << 20


class HostLine:
    """One end of an open line. `start` it once; `send` from any thread, also from a signal handler.

    Args:
        connection: greeted and trusted (`peer_line`); from now on this line's alone.
        take: called with each frame, in order, in the line's thread. An EvidenceError from it ends the line.
        ended: called once with the reason, as the last thing.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        take: Callable[[bytes], None],
        ended: Callable[[str], None],
        config: LineConfig | None = None,
    ) -> None:
        self._socket = connection
        self._take = take
        self._ended = ended
        self._config = config or LineConfig()
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._out, self._in = bytearray(), bytearray()
        self._closing = ""
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="everstep-line", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Hand over a frame; it goes out after those before it, or is lost with the line."""
        self._frames.put(frame)
        self._wake_up()

    def close(self, reason: str) -> None:
        """End the line after what was handed over has gone out; safe in the line's own thread."""
        self._closing = self._closing or reason
        self._wake_up()

    def join(self) -> None:
        """Wait for the line's thread; not from within it."""
        if self._thread.ident is not None:  # else it has not begun, and ends as soon as it does
            self._thread.join(_ENDS_WITHIN_S)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups wait already, or the line has ended
            self._wake.send(b"!")

    def _serve(self) -> None:
        try:
            reason = self._pump()
        except EvidenceError as error:
            reason = f"it said what makes no sense: {error}"
        except ConnectionResetError as error:
            reason = error.strerror or "it was reset"
        except OSError as error:
            reason = f"the connection broke ({error.strerror or type(error).__name__})"
        except Exception as error:  # outermost frame
            _log.exception("a line between hosts failed")
            reason = f"a defect of everstep: {error!r}"
        for end in (self._socket, self._woken, self._wake):
            with contextlib.suppress(OSError):
                end.close()
        self._ended(self._closing or reason)

    def _pump(self) -> str:
        """Serve until the end; its reason."""
        config, poll = self._config, select.poll()
        self._socket.setblocking(False)
        poll.register(self._woken, select.POLLIN)
        heard_s = said_s = time.monotonic()
        closes_s = float("inf")
        more = True  # what came with the greeting may lie in TLS's buffer, where no poll sees it
        while True:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            for descriptor, _ in poll.poll(0 if more else config.beat_s / 2 * 1000):
                if descriptor == self._woken.fileno():
                    self._woken.recv(4096)
            heard, more = self._read()
            now_s = time.monotonic()
            if heard:
                heard_s = now_s
            if now_s - heard_s > config.silence_s:
                return f"nothing was heard from it for {config.silence_s:g} s"
            if now_s - said_s >= config.beat_s and not self._out:
                said_s = now_s
                self._frames.put(HEARTBEAT)
            self._write()
            if len(self._out) > config.waiting_bytes_max:
                return "it takes nothing that is sent"
            if self._closing:
                closes_s = min(closes_s, now_s + _ENDS_WITHIN_S)
                if now_s >= closes_s or (not self._out and self._frames.empty()):
                    return self._closing

    def _read(self) -> tuple[bool, bool]:
        """Take what has come: whether anything did, and whether there may be more right now."""
        heard = False
        for _ in range(_PIECES_AT_ONCE):
            try:
                piece = self._socket.recv(_PIECE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return heard, False
            if not piece:
                raise ConnectionResetError(0, "it was closed from there")
            heard = True
            self._in += piece
            self._take_frames()
        return heard, True

    def _take_frames(self) -> None:
        start = 0
        while len(self._in) - start >= _FRAME.size:
            (size,) = _FRAME.unpack_from(self._in, start)
            if size > self._config.frame_bytes_max:
                raise EvidenceError(f"a message of {size} bytes, over {self._config.frame_bytes_max}")
            end = start + _FRAME.size + size
            if len(self._in) < end:
                break
            frame = bytes(self._in[start + _FRAME.size : end])
            start = end
            if frame != HEARTBEAT:
                self._take(frame)
        del self._in[:start]

    def _write(self) -> None:
        while not self._frames.empty():
            frame = self._frames.get()
            if len(frame) > self._config.frame_bytes_max:
                raise EvidenceError(f"a message of {len(frame)} bytes was to be sent, over the line's limit")
            self._out += _FRAME.pack(len(frame)) + frame
        try:
            while self._out:
                with memoryview(self._out)[:_PIECE_BYTES] as piece:
                    count = self._socket.send(piece)
                del self._out[:count]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
