"""The replicator: one process per host that copies its shards to other hosts and brings back what a lost one had.

It needs no torch, and no rank ever waits for it: it shows the ranks of this host the headers of the others' slots,
takes a copy of the version that the leader names (policy/replication.py), and fetches those it keeps for other hosts.
When the pipe that it was given closes, it ends. What is in memory stays for whoever owns the folder.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from everstep.adapters.checkpoints.leader_page import LeaderPage
from everstep.adapters.checkpoints.memory_folder import share_lock
from everstep.adapters.checkpoints.memory_slots import JOB_NAME, SLOT_COUNT, SavePages, ranks_present
from everstep.adapters.checkpoints.peer_files import (
    COPIES_NAME,
    CREDENTIALS_NAME,
    PeerPin,
    PeerProgress,
    PeerRoster,
    Readiness,
    read_address,
    read_readiness,
    read_roster,
    roster_stamp,
    write_address,
    write_readiness,
)
from everstep.adapters.checkpoints.peer_line import Credentials, address_of, listen, load_credentials
from everstep.adapters.checkpoints.saver_process import KEPT_NAME
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.policy.replication import HeldShard, HostReport, next_word
from everstep.worker.peers.board import Board, Watch, members_of
from everstep.worker.peers.mover import Mover, Stores
from everstep.worker.peers.service import LOOK_WITHIN_S, News, Page, PeerService
from everstep.worker.peers.shard_store import ShardStore

_log = logging.getLogger(__name__)
POLL_S = 0.02
_NICENESS = 10
_CLOSED_WITHIN_S = 2.0
_LINGER_S = 600.0
_STARTED_WITHIN_S = 5.0
_LAST_WORD_S = 2 * LOOK_WITHIN_S
_ANY_PORT = "127.0.0.1:0"


class Replicator:
    """The work on one folder.

    Args:
        address: where to listen; by default on loopback alone.

    Raises:
        WorldError: the folder is gone or full.
        OSError: the address cannot be used.
    """

    def __init__(self, folder: Path, address: str = _ANY_PORT) -> None:
        self._folder = folder
        self._stores = Stores(slots=ShardStore(folder), copies=ShardStore(folder / COPIES_NAME), pin=PeerPin(folder))
        self._stores.pin.write(0)  # a dead one's pin holds nothing
        self._pages = SavePages(folder)
        self._leader = LeaderPage(folder)
        self._progress = PeerProgress(folder)
        self._board = Board()
        self._watches: dict[str, Watch] = {}
        self._credentials: Credentials | None = None
        self._roster_stamp = 0, 0
        self._told = ""
        self._ready_told = 0
        self._led: tuple[HostReport, tuple[Page, ...]] | None = None
        """What this host last said, where it leads."""
        if (ready := read_readiness(folder)) is not None:
            # A dead one brought everything back, and ranks may run: nothing of theirs may be touched again.
            self._ready_told = self._board.restored = ready.generation
        listener = _listen(folder, address)
        stores = (self._stores.copies, self._stores.slots)
        self._service = PeerService(listener, stores, self._news, self._rate)
        self._mover = Mover(self._board, self._stores)
        self._service.start()
        self._mover.start()
        write_address(folder, address_of(listener))

    def turn(self) -> None:
        """Look at the folder and at what others said, and say what is new."""
        self._follow_roster()
        roster = self._board.roster
        if roster is None:
            return
        # Asked first: who is told that all is restored must see the slots as they are after it.
        failed, restored, missing = self._board.failed, self._board.restored, self._board.missing
        pages = tuple(
            Page(shard=rank, slot=slot, header=self._stores.slots.header(rank, slot))
            for rank in roster.ranks[roster.host]
            for slot in range(SLOT_COUNT)
        )
        slots = self._held(self._stores.slots, roster.ranks[roster.host])
        if roster.restoring and restored != roster.generation:
            # Ranks may have moved: a header that another host's rank had here is nothing without its files.
            slots = tuple(item for item in slots if self._stores.slots.has_files(item.shard, item.slot))
        report = HostReport(
            host=roster.host,
            generation=roster.generation,
            slots=slots,
            copies=self._held(self._stores.copies, tuple(ranks_present(self._stores.copies.folder))),
            failed=failed,
            restored=restored,
            missing=missing,
            moved_bytes=self._board.moved_bytes,
        )
        members = members_of(roster)
        leads = members.leader == roster.host
        self._board.tell(report, pages, self._leader.read() if leads else None)
        self._led = (report, pages) if leads else None
        if leads:
            word = next_word(
                self._board.word,
                members,
                self._board.reports(),
                generation=roster.generation,
                restoring=roster.restoring,
            )
            self._board.lead(word)
        reports = self._board.reports()
        self._progress.write(sum(1 + found.moved_bytes for found in reports.values()))
        self._tell_ready(roster)

    def linger(self) -> None:
        """Carry the savers' words as long as this host's one is at work for the last time, and a moment longer."""
        began_s = time.monotonic()
        while self._has_work_beside(time.monotonic() - began_s):
            self.turn()
            time.sleep(POLL_S)
        if self._led is not None:
            self._board.tell(*self._led, self._leader.read())
            time.sleep(_LAST_WORD_S)

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._mover.close(within_s=_CLOSED_WITHIN_S)
        self._service.close(within_s=_CLOSED_WITHIN_S)

    def _has_work_beside(self, waited_s: float) -> bool:
        """Whether this host's saver is at work, or may be starting."""
        if not (self._folder / JOB_NAME).exists() or (self._folder / KEPT_NAME).exists():
            return False  # there was nothing to save, or it has ended and removed the folder, or left it
        return waited_s < (_LINGER_S if _lives(self._pages.word().pid) else _STARTED_WITHIN_S)

    def _follow_roster(self) -> None:
        if (stamp := roster_stamp(self._folder)) == self._roster_stamp:
            return
        try:
            roster = read_roster(self._folder)
            if roster is None or roster == self._board.roster:
                return
            if self._credentials is None or self._board.roster is None:
                self._credentials = load_credentials(self._folder / CREDENTIALS_NAME, encrypted=roster.encrypted)
        except (EvidenceError, ConfigError, WorldError) as problem:
            self._tell_once(str(problem))
            return
        self._roster_stamp = stamp
        self._board.follow(roster, self._credentials)
        self._service.admit(self._credentials)
        peers = {host: address for host, address in roster.addresses.items() if host != roster.host}
        for host, watch in list(self._watches.items()):
            if peers.get(host) != watch.address:
                watch.close()
                del self._watches[host]
        for host, address in peers.items():
            if host not in self._watches:
                self._watches[host] = Watch(host, address, self._board, self._mirror)
                self._watches[host].start()

    def _mirror(self, host: str, news: News) -> None:
        """Show the ranks of this host another host's slots by their headers, and what rank 0's saver does."""
        roster = self._board.roster
        if roster is None or host not in roster.ranks:
            return
        for page in news.pages:
            owned = page.shard in roster.ranks[host]
            if owned and self._stores.slots.header(page.shard, page.slot) != page.header:
                self._stores.slots.write_header(page.shard, page.slot, page.header)
        if news.saver is not None and 0 in roster.ranks[host] and news.saver != self._leader.read():
            self._leader.write(news.saver)

    @staticmethod
    def _held(store: ShardStore, shards: tuple[int, ...]) -> tuple[HeldShard, ...]:
        return tuple(item for shard in shards for item in store.held(shard))

    def _tell_ready(self, roster: PeerRoster) -> None:
        """The ranks may start once every host has what it is to have, and this host sees that."""
        if not roster.restoring or self._ready_told == roster.generation:
            return
        reports, word = self._board.reports(), self._board.word
        if word is None or word.plan is None or word.generation != roster.generation:
            return
        if any(host not in reports or reports[host].restored != roster.generation for host in roster.ranks):
            return
        self._ready_told = roster.generation
        lacking = [f"host {host} lacks rank {n}" for host in roster.ranks for n in reports[host].missing]
        step = word.plan.version.step if word.plan.version and not lacking else None
        write_readiness(
            self._folder, Readiness(generation=roster.generation, step=step, reasons=(*word.plan.reasons, *lacking))
        )

    def _tell_once(self, problem: str) -> None:
        if problem != self._told:
            self._told = problem
            _log.warning("everstep keeps no copies on other hosts: %s", problem)

    def _news(self, serial: int) -> News | None:
        return self._board.news(serial, within_s=LOOK_WITHIN_S)

    def _rate(self) -> float:
        return self._board.roster.bytes_per_s if self._board.roster else 0.0


def _listen(folder: Path, address: str) -> socket.socket:
    """Where the one before listened, if it can be: the others know that address."""
    before = read_address(folder)
    if before.rpartition(":")[0] == address.rpartition(":")[0]:
        with contextlib.suppress(OSError):
            return listen(before)
    return listen(address)


def _lives(pid: int) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """`replicator FD FOLDER [HOST:PORT]`: work until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the job closes the pipe
    os.nice(_NICENESS)
    pipe, folder = int(arguments[0]), Path(arguments[1])
    if share_lock(folder) is None:
        return 0  # the folder is gone
    replicator = Replicator(folder, *arguments[2:3])
    while not (select.select([pipe], [], [], POLL_S)[0] and not os.read(pipe, 1)):
        replicator.turn()
    replicator.linger()
    replicator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
