"""What a replicator's threads know together: the roster, every host's last report, and the leader's word.

A watch on each other host keeps it fresh; a host that does not answer has no report, and then nothing is decided.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from everstep.adapters.checkpoints.leader_page import LeaderWord
from everstep.adapters.checkpoints.peer_files import PeerRoster
from everstep.adapters.checkpoints.peer_line import Credentials, connect
from everstep.domain.errors import EvidenceError
from everstep.policy.replication import HostReport, Members, Version, Word
from everstep.worker.peers.service import News, Page, look

_log = logging.getLogger(__name__)
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_NEVER = 0


def members_of(roster: PeerRoster) -> Members:
    return Members(ranks=roster.ranks, keepers=roster.keepers)


class Board:
    """Shared by threads; every method is safe from any of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._roster: PeerRoster | None = None
        self._credentials: Credentials | None = None
        self._news: News | None = None
        self._others: dict[str, HostReport] = {}
        self._word: Word | None = None
        self.failed: Version | None = None
        self.restored = _NEVER
        self.missing: tuple[int, ...] = ()
        self.moved_bytes = 0

    @property
    def roster(self) -> PeerRoster | None:
        return self._roster

    @property
    def word(self) -> Word | None:
        return self._word

    def follow(self, roster: PeerRoster, credentials: Credentials) -> None:
        with self._changed:
            self._roster, self._credentials = roster, credentials
            self._others = {host: report for host, report in self._others.items() if host in roster.ranks}
            self._changed.notify_all()

    def access(self) -> tuple[PeerRoster, Credentials] | None:
        """Roster and credentials of one moment."""
        with self._changed:
            if self._roster is None or self._credentials is None:
                return None
            return self._roster, self._credentials

    def tell(self, report: HostReport, pages: tuple[Page, ...], saver: LeaderWord | None) -> None:
        """What this host says of itself; where it leads, also what its saver does."""
        with self._changed:
            before = self._news
            news = News(serial=before.serial if before else 1, report=report, pages=pages)
            if saver is not None:
                news = replace(news, word=self._word, saver=saver)
            if news != before:
                self._news = replace(news, serial=news.serial + 1)
                self._changed.notify_all()

    def lead(self, word: Word | None) -> None:
        """The leader's own word; others hear it with the next news."""
        with self._changed:
            if word != self._word:
                self._word = word
                self._changed.notify_all()

    def hear(self, host: str, news: News | None) -> None:
        """What another host says; None when it does not answer."""
        with self._changed:
            if news is None or self._roster is None or host not in self._roster.ranks:  # a watch that is being closed
                self._others.pop(host, None)
                return
            self._others[host] = news.report
            if news.word is not None and members_of(self._roster).leader == host:
                self._word = news.word
            self._changed.notify_all()

    def reports(self) -> dict[str, HostReport]:
        with self._changed:
            own = {self._news.report.host: self._news.report} if self._news else {}
            return self._others | own

    def news(self, serial: int, *, within_s: float) -> News | None:
        """News after `serial`; what there is when none comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._news is not None and self._news.serial > serial, within_s)
            return self._news

    def wait(self, within_s: float) -> None:
        """Until anything changes."""
        with self._changed:
            self._changed.wait(within_s)


class Watch:
    """Keeps one other host's report fresh, in a thread of its own.

    Args:
        mirror: sees all news before the board does.
    """

    def __init__(self, host: str, address: str, board: Board, mirror: Callable[[str, News], None]) -> None:
        self.address = address
        self._host = host
        self._board = board
        self._mirror = mirror
        self._is_closing = threading.Event()
        self._has_heard = False
        self._thread = threading.Thread(target=self._run, name=f"everstep-watch-{host}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Asks it to end; it does with its next answer, or within the time of a silent line."""
        self._is_closing.set()

    def _run(self) -> None:
        failures = 0
        while not self._is_closing.is_set():
            self._has_heard = False
            try:
                self._follow()
            except EvidenceError as problem:
                if failures == 0:
                    _log.warning("everstep does not believe host %s: %s", self._host, problem)
            except OSError as problem:
                _log.debug("host %s: %s", self._host, problem)
            except Exception:  # outermost frame
                _log.exception("everstep has a defect in watching host %s", self._host)
            if not self._is_closing.is_set():
                self._board.hear(self._host, None)
            failures = 0 if self._has_heard else failures + 1
            self._is_closing.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])

    def _follow(self) -> None:
        access = self._board.access()
        if access is None:
            return
        with connect(self.address, access[1]) as line:
            serial = 0
            while not self._is_closing.is_set():
                news = look(line, serial)
                if news.report.host != self._host:
                    raise EvidenceError(f"host {news.report.host} answers in its place")
                if news.serial != serial and not self._is_closing.is_set():
                    serial = news.serial
                    self._mirror(self._host, news)
                    self._board.hear(self._host, news)
                    self._has_heard = True
