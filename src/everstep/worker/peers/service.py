"""What a replicator answers its peers: what its host holds, and the bytes of a shard; it only ever reads.

Nobody can write through it, and whoever is not of the job learns nothing.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from everstep.adapters.checkpoints.leader_page import LeaderWord
from everstep.adapters.checkpoints.memory_slots import FACTS_BYTES_MAX, SLOT_COUNT, SlotHeader
from everstep.adapters.checkpoints.peer_line import Credentials, Line, Pace, answer, connect
from everstep.domain.errors import EvidenceError, WorldError
from everstep.policy.replication import HostReport, Version, Word
from everstep.worker.peers.shard_store import PIECE_BYTES, Fill, ShardStore

_log = logging.getLogger(__name__)
LOOK_WITHIN_S = 0.5
"""How long an answer waits for news."""
_IDLE_S = 30.0
_LINES_MAX = 256
_ACCEPT_S = 0.2
LAYOUT_BYTES_MAX = 32
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A look at what is new since `serial`, or, with a version, a shard's bytes.

    Attributes:
        urgent: without a limit of speed: somebody waits for it.
    """

    serial: int = 0
    shard: int = 0
    version: Version | None = None
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The header of one slot of one of the host's own ranks."""

    shard: int
    slot: int
    header: SlotHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """All that a host tells.

    Attributes:
        word, saver: the leader's, and its saver's.
    """

    serial: int
    report: HostReport
    pages: tuple[Page, ...] = ()
    word: Word | None = None
    saver: LeaderWord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What follows: the bytes of the slot's two files; without a header, nothing."""

    header: SlotHeader | None = None


class PeerService:
    """Listens, and answers each line in a thread of its own.

    Args:
        news: gives what is newer than a serial, or after a while what there is.
        rate: bytes per second while training runs.
    """

    def __init__(
        self,
        listener: socket.socket,
        stores: tuple[ShardStore, ...],
        news: Callable[[int], News | None],
        rate: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._stores = stores
        self._news = news
        self._rate = rate
        self._pace = Pace()
        self._credentials: Credentials | None = None
        self._lines = threading.BoundedSemaphore(_LINES_MAX)
        self._is_closing = threading.Event()
        self._turned_away = 0
        self._thread = threading.Thread(target=self._accept, name="everstep-peer-service", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def admit(self, credentials: Credentials) -> None:
        """Whom to answer from now on; nobody before."""
        self._credentials = credentials

    def close(self, *, within_s: float) -> None:
        self._is_closing.set()
        self._thread.join(within_s)
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(_ACCEPT_S)
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # out of descriptors, for a while
                _log.warning("everstep cannot take a peer's line: %s", error.strerror)
                time.sleep(_ACCEPT_S)
                continue
            if self._credentials is None or not self._lines.acquire(blocking=False):
                connection.close()
                continue
            name = "everstep-peer-line"
            threading.Thread(target=self._serve, args=(connection, self._credentials), name=name, daemon=True).start()

    def _serve(self, connection: socket.socket, credentials: Credentials) -> None:
        try:
            # An OSError: the line has ended or broken, or a stranger does not speak TLS.
            with contextlib.suppress(OSError), answer(connection, credentials) as line:
                while not self._is_closing.is_set():
                    self._answer_one(line)
        except (EvidenceError, WorldError) as stranger:
            self._turned_away += 1
            if self._turned_away == 1:
                _log.warning("everstep turns away a line to its saver: %s", stranger)
        finally:
            self._lines.release()

    def _answer_one(self, line: Line) -> None:
        request = decoded(line.receive(within_s=_IDLE_S), Request)
        if request.version is not None:
            self._send_shard(line, request, request.version)
            return
        news = self._news(request.serial)
        if news is None:
            raise ConnectionAbortedError  # no roster yet
        line.send(msgspec.msgpack.encode(news))

    def _send_shard(self, line: Line, request: Request, version: Version) -> None:
        for store in self._stores:
            found = store.find(request.shard, version)
            if found is None:
                continue
            slot, header = found
            with contextlib.ExitStack() as stack:
                try:
                    views = stack.enter_context(store.reading(request.shard, slot, header))
                except EvidenceError:
                    continue
                line.send(msgspec.msgpack.encode(Offer(header=header)))
                for view in views:
                    for at in range(0, len(view), PIECE_BYTES):
                        with view[at : at + PIECE_BYTES] as piece:
                            self._pace.wait(len(piece), 0.0 if request.urgent else self._rate())
                            line.send_bytes(piece)
            return
        line.send(msgspec.msgpack.encode(Offer()))


def look(line: Line, serial: int) -> News:
    """What a peer tells that is newer than `serial`; after `LOOK_WITHIN_S` what it told before.

    Raises:
        OSError, EvidenceError: the line broke, or the peer talks nonsense.
    """
    line.send(msgspec.msgpack.encode(Request(serial=serial)))
    news = decoded(line.receive(), News)
    for page in news.pages:
        _check(page.header)
        if not 0 <= page.slot < SLOT_COUNT:
            raise EvidenceError(f"a peer tells of a slot {page.slot}")
    if news.saver is not None:
        _check_word(news.saver)
    return news


def fetch(
    address: str,
    credentials: Credentials,
    request: Request,
    take: Callable[[SlotHeader, Fill], None],
    go_on: Callable[[], bool],
) -> bool:
    """Bring a shard from the peer at `address` into a slot; False when it has none of this version.

    Args:
        take: fills the slot with what `Fill` brings.
        go_on: asked at every piece.

    Raises:
        OSError, EvidenceError: the line broke or fell silent, or the bytes are not what was announced.
    """
    assert request.version is not None
    with connect(address, credentials) as line:
        line.send(msgspec.msgpack.encode(request))
        offer = decoded(line.receive(), Offer)
        if offer.header is None:
            return False
        header, version = offer.header, request.version
        _check(header)
        if (header.attempt, header.step, header.layout) != (version.attempt, version.step, version.layout):
            raise EvidenceError(f"a peer offers step {header.step} where {version.step} was asked for")

        def fill(piece: memoryview) -> None:
            if not go_on():
                raise InterruptedError("not wanted any more")
            line.receive_bytes(piece)

        take(header, fill)
    return True


def _check(header: SlotHeader) -> None:
    """Whether a page in shared memory can hold it."""
    try:
        header.pack()
    except (struct.error, ValueError) as error:
        raise EvidenceError(f"a peer sends a header that makes no sense: {error}") from error
    if len(header.facts) > FACTS_BYTES_MAX or len(header.layout.encode()) > LAYOUT_BYTES_MAX:
        raise EvidenceError("a peer sends a header that is too long")


def _check_word(word: LeaderWord) -> None:
    """Whether the page can hold it."""
    try:
        word.pack()
    except (struct.error, ValueError) as error:
        raise EvidenceError(f"a peer's saver says what makes no sense: {error}") from error
    if len(word.layout.encode()) > LAYOUT_BYTES_MAX:
        raise EvidenceError("a peer's saver speaks of a layout with a name that is too long")


def decoded(content: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise EvidenceError(f"a peer talks nonsense: {error}") from error
