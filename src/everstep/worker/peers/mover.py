"""The one thread of a replicator that moves bytes: copies of its own ranks and of others, and what a plan asks for.

What goes wrong is tried again, or told to the leader; a slot that holds something good is never touched for it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from everstep.adapters.checkpoints.memory_slots import SlotHeader, ranks_present
from everstep.adapters.checkpoints.peer_files import PeerPin, PeerRoster
from everstep.adapters.checkpoints.peer_line import Credentials
from everstep.adapters.checkpoints.peer_repairs import (
    Repair,
    Repaired,
    answer_repair,
    is_asked,
    repairs_asked,
    take_repair,
)
from everstep.domain.errors import EvidenceError, WorldError
from everstep.policy.replication import Fetch, Plan, Version, Word, held_everywhere, slot_for_copy
from everstep.worker.peers.board import Board, members_of
from everstep.worker.peers.service import Request, fetch
from everstep.worker.peers.shard_store import PIECE_BYTES, Fill, ShardStore, drop, drop_files, takes_room, version_of

_log = logging.getLogger(__name__)
COPY_COUNT = 2
"""Copies of each shard on a host: the one that all hosts have, and the one that comes."""
_WAIT_S = 0.05
_RETRY_S = 0.2
_TRIES_MAX = 5
Take = Callable[[SlotHeader, Fill], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Where shards lie on this host: the ranks' own slots, and copies beside them."""

    slots: ShardStore
    copies: ShardStore
    pin: PeerPin


class Mover:
    """Does what the leader's word asks for."""

    def __init__(self, board: Board, stores: Stores) -> None:
        self._board = board
        self._stores = stores
        self._is_closing = threading.Event()
        self._tries: dict[Version, int] = {}
        self._has_foreign_files = True
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="everstep-mover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, within_s: float) -> None:
        self._is_closing.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                has_moved = self._move()
            except (OSError, EvidenceError, WorldError) as problem:
                self._note_failure(problem)
                has_moved = False
            except Exception:  # outermost frame
                _log.exception("everstep has a defect in moving copies")
                self._is_closing.wait(_RETRY_S)
                has_moved = False
            if not has_moved:
                self._board.wait(_WAIT_S)

    def _move(self) -> bool:
        """One piece of work; False when there is none."""
        access, word = self._board.access(), self._board.word
        if access is not None and (asked := repairs_asked(self._stores.slots.folder)):
            for repair in asked:
                self._answer(*access, repair)
            return True
        if access is None or word is None or word.generation != access[0].generation:
            return False
        roster, credentials = access
        if word.plan is not None and self._board.restored != roster.generation:
            self._restore(roster, credentials, word.plan)
            return True
        if self._board.failed is not None and self._board.failed != word.wanted:
            self._board.failed = None
        if self._copy(roster, credentials, word):
            return True
        self._drop_stale(roster)
        return False

    # Copies while the ranks train.

    def _copy(self, roster: PeerRoster, credentials: Credentials, word: Word) -> bool:
        """One shard of the wanted version; False when there is none to copy."""
        if word.wanted is None or self._board.failed is not None:
            return False
        if self._has_foreign_files and (word.plan is None or word.plan.version != word.wanted):
            # All ranks have saved anew, so what was brought in for their restoring is out of date.
            drop_files(self._stores.slots.folder, keep=roster.ranks[roster.host])
            self._has_foreign_files = False
        return self._copy_own(roster, word) or self._copy_others(roster, credentials, word)

    def _drop_stale(self, roster: PeerRoster) -> None:
        """Free copies for which others have become the keepers, once these hold something as new."""
        members, reports, copies = members_of(roster), self._board.reports(), self._stores.copies
        others = set(ranks_present(copies.folder)).difference(members.kept_by(roster.host))
        stale = [rank for rank in others if takes_room(copies, rank)]
        if not stale or any(host not in reports for host in roster.ranks):
            return
        held = held_everywhere(members, reports)
        for rank in stale:
            versions = [version for version in _versions(copies, rank) if version is not None]
            if not versions or (held is not None and max(versions) <= held):
                drop(copies, rank)

    def _copy_own(self, roster: PeerRoster, word: Word) -> bool:
        """This host's shards, from the slots; held still by a pin as long as that takes."""
        assert word.wanted is not None
        copies = self._stores.copies
        own = [(rank, slot_for_copy(_versions(copies, rank), word)) for rank in roster.ranks[roster.host]]
        lacking = [(rank, slot) for rank, slot in own if slot is not None]
        if not lacking:
            return False
        self._stores.pin.write(word.wanted.step)
        try:
            for rank, slot in lacking:
                found = self._stores.slots.find(rank, word.wanted)
                if found is None:
                    self._board.failed = word.wanted  # overwritten before it was pinned
                    return True
                _copy(self._stores.slots, rank, found, partial(copies.take, rank, slot, in_place=True))
        except EvidenceError as problem:
            self._board.failed = word.wanted
            self._warn(word.wanted, problem)
        finally:
            self._stores.pin.write(0)
        return True

    def _copy_others(self, roster: PeerRoster, credentials: Credentials, word: Word) -> bool:
        """The shards of those that this host keeps copies for, as soon as they have them ready."""
        assert word.wanted is not None
        members, reports = members_of(roster), self._board.reports()
        for rank in members.kept_by(roster.host):
            owner = members.owners[rank]
            slot = slot_for_copy(_versions(self._stores.copies, rank), word)
            is_ready = owner in reports and any(
                (copy.shard, copy.version) == (rank, word.wanted) for copy in reports[owner].copies
            )
            if owner == roster.host or slot is None or not is_ready:
                continue
            take = partial(self._stores.copies.take, rank, slot, in_place=True)
            request = Request(shard=rank, version=word.wanted)
            go_on = partial(self._is_wanted, word.wanted)
            if not fetch(roster.addresses[owner], credentials, request, take, go_on):
                raise EvidenceError(f"host {owner} does not have step {word.wanted.step} of rank {rank} any more")
            self._tries.clear()
            self._has_warned = False
            return True
        return False

    def _is_wanted(self, version: Version) -> bool:
        """Not while a rank waits for a repair, which has no limit of speed: the copy begins anew after it."""
        word = self._board.word
        if self._is_closing.is_set() or word is None or word.wanted != version:
            return False
        return not repairs_asked(self._stores.slots.folder)

    def _note_failure(self, problem: Exception) -> None:
        """Try again, and after some tries tell the leader, so that all go on to a newer version."""
        word = self._board.word
        if word is None or word.wanted is None or isinstance(problem, InterruptedError):
            return
        self._tries[word.wanted] = self._tries.get(word.wanted, 0) + 1
        _log.debug("step %d: %s", word.wanted.step, problem)
        if self._tries[word.wanted] >= _TRIES_MAX:
            self._warn(word.wanted, problem)
            self._tries.clear()
            self._board.failed = word.wanted
        self._is_closing.wait(_RETRY_S)

    def _warn(self, version: Version, problem: Exception) -> None:
        """Once, until something is copied again."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("everstep does not copy step %d to other hosts: %s", version.step, problem)

    # Before the ranks start.

    def _restore(self, roster: PeerRoster, credentials: Credentials, plan: Plan) -> None:
        """Bring in all that the plan asks of this host; what cannot be had is told, and the ranks will not find it."""
        drop_files(self._stores.slots.folder, keep=roster.ranks[roster.host])
        self._has_foreign_files = True
        began_s = time.monotonic()
        mine = [item for item in plan.fetches if item.target == roster.host]
        missing = []
        for item in mine:
            assert plan.version is not None
            for attempt in range(_TRIES_MAX):
                try:
                    self._bring(roster, credentials, item, plan.version)
                    break
                except (OSError, EvidenceError, WorldError) as problem:
                    if self._board.roster != roster or self._is_closing.wait(_RETRY_S):
                        return
                    if attempt == _TRIES_MAX - 1:
                        missing.append(item.shard)
                        _log.warning(
                            "everstep could not bring back rank %d from %s: %s", item.shard, item.source, problem
                        )
        if mine and plan.version is not None:
            took_s = time.monotonic() - began_s
            names = ", ".join(sorted({item.source for item in mine}))
            _log.warning(
                "everstep: host %s has step %d of %d ranks in memory again, from %s, in %.2f s",
                roster.host,
                plan.version.step,
                len(mine) - len(missing),
                names,
                took_s,
            )
        self._board.missing = tuple(missing)
        self._board.restored = roster.generation

    def _bring(self, roster: PeerRoster, credentials: Credentials, item: Fetch, version: Version) -> None:
        slots = self._stores.slots

        def take(header: SlotHeader, fill: Fill) -> None:
            def counted(piece: memoryview) -> None:
                fill(piece)
                self._board.moved_bytes += len(piece)

            if item.shard in roster.ranks[roster.host]:
                slots.take(item.shard, item.slot, header, counted, in_place=False)
            else:
                slots.take_files(item.shard, item.slot, header, counted)

        if item.source == roster.host:
            found = self._stores.copies.find(item.shard, version)
            if found is None:
                raise EvidenceError(f"there is no copy of rank {item.shard} any more")
            _copy(self._stores.copies, item.shard, found, take)
            return
        request = Request(shard=item.shard, version=version, urgent=True)
        if not fetch(roster.addresses[item.source], credentials, request, take, lambda: self._board.roster == roster):
            raise EvidenceError(f"host {item.source} does not have it any more")

    # When a rank has found a slot damaged.

    def _answer(self, roster: PeerRoster, credentials: Credentials, repair: Repair) -> None:
        """Whatever happens, the request goes: it comes before all other work, and must not come again and again."""
        answer = Repaired(serial=repair.serial, problem="the replicator has a defect")
        try:
            answer = self._repair(roster, credentials, repair)
        finally:
            answer_repair(self._stores.slots.folder, answer)

    def _repair(self, roster: PeerRoster, credentials: Credentials, repair: Repair) -> Repaired:
        """The same bytes again, from this host's own copy or from whoever tells that it has them."""
        reports, problem = self._board.reports(), f"no host holds a copy of step {repair.version.step}"
        holders = [
            host
            for host, report in sorted(reports.items(), key=lambda found: (found[0] != roster.host, found[0]))
            for item in (*report.copies, *(report.slots if host != roster.host else ()))
            if (item.shard, item.version) == (repair.shard, repair.version) and host in roster.addresses
        ]
        for source in dict.fromkeys(holders):
            if not is_asked(self._stores.slots.folder, repair.serial):
                break
            try:
                self._bring_again(roster, credentials, repair, source)
            except (OSError, EvidenceError, WorldError) as error:
                problem = f"host {source}: {error}"
                continue
            return Repaired(serial=repair.serial, source=source)
        return Repaired(serial=repair.serial, problem=problem)

    def _bring_again(self, roster: PeerRoster, credentials: Credentials, repair: Repair, source: str) -> None:
        """The files alone: the header is right, and others look at it.

        A request that comes to nothing in time is withdrawn, and the ranks train on with the slot as they mapped it, so
        files that come later are dropped: a save to the slot would go to the old ones.
        """
        slots = self._stores.slots
        wanted = slots.header(repair.shard, repair.slot)
        if version_of(wanted) != repair.version:
            raise EvidenceError(f"rank {repair.shard} does not hold step {repair.version.step} any more")

        def take(header: SlotHeader, fill: Fill) -> None:
            if (header.image_seal, header.rest_seal) != (wanted.image_seal, wanted.rest_seal):
                raise EvidenceError("its copy is another one")
            slots.take_files(repair.shard, repair.slot, header, fill, confirm=confirm)

        def confirm() -> None:
            if slots.header(repair.shard, repair.slot) != wanted:
                raise EvidenceError(f"rank {repair.shard} does not hold step {repair.version.step} any more")
            if not take_repair(slots.folder, repair.serial):
                raise InterruptedError("not wanted any more")

        def go_on() -> bool:
            return not self._is_closing.is_set() and is_asked(slots.folder, repair.serial)

        if source == roster.host:
            found = self._stores.copies.find(repair.shard, repair.version)
            if found is None:
                raise EvidenceError("its copy is gone")
            _copy(self._stores.copies, repair.shard, found, take)
            return
        request = Request(shard=repair.shard, version=repair.version, urgent=True)
        if not fetch(roster.addresses[source], credentials, request, take, go_on):
            raise EvidenceError("its copy is gone")


def _versions(store: ShardStore, shard: int) -> list[Version | None]:
    """What each copy of a shard is."""
    held = {item.slot: item.version for item in store.held(shard)}
    return [held.get(slot) for slot in range(COPY_COUNT)]


def _copy(store: ShardStore, shard: int, found: tuple[int, SlotHeader], take: Take) -> None:
    """Fill a slot from one of this host's folders."""
    slot, header = found
    with store.reading(shard, slot, header) as views:
        pieces = (view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES))

        def fill(into: memoryview) -> None:
            with next(pieces) as piece:
                into[:] = piece

        take(header, fill)
