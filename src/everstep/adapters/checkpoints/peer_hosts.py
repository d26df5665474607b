"""One host's part in copies on other hosts: its replicator, and what all must agree on before an attempt starts.

Every host tells its replicator's address, and all take the same decision: memory is used in an attempt when every
replicator says that it is ready, else by none, and checkpoints go to disk. It knows no bytes and no ranks' state.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from everstep.adapters.checkpoints.peer_files import (
    ADDRESS_NAME,
    CREDENTIALS_NAME,
    ROSTER_NAME,
    PeerProgress,
    PeerRoster,
    Readiness,
    read_address,
    read_readiness,
    read_roster,
    write_roster,
)
from everstep.adapters.checkpoints.peer_repairs import forget_repairs
from everstep.adapters.hosts.board import check_wanted, read_unless
from everstep.adapters.workers.piped_process import PipedProcess
from everstep.domain.commands import StartWorkers
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.domain.ids import HostId
from everstep.policy.peers import choose_keepers, wards_of
from everstep.ports import Board

_log = logging.getLogger(__name__)
_UP_WITHIN_S = 20.0
_HEARD_WITHIN_S = 120.0
"""Another host may still be importing what its standby needs."""
_STILL_S = 60.0
"""Memory is waited for as long as some host brings bytes in, and for so long when none does."""
_READY_WITHIN_S = 3600.0
_TELL_AFTER_S = 2.0
_TELL_EVERY_S = 10.0
_LOOK_S = 0.01
_SLICE_S = 0.5
_CLOSED_WITHIN_S = 5.0
_ADDRESS, _READY = "address", "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Attributes:
    folder: the run's folder in shared memory; None where this host has no room for one.
    address: where other hosts reach this one.
    credentials: folder with the job's (adapters/checkpoints/peer_line.py).
    rack: what fails together with this host; empty where nobody knows.
    """

    host: HostId
    folder: Path | None
    address: str
    credentials: Path
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a host puts on the board: its replicator's address, or why it has none.

    Attributes:
        attempt: of the roster that it followed last.
        keeper, wards: in that: who kept its copies, and for whom it kept any. Nobody posts more than that: a value on
            the board is small, and all hosts read all of them.
    """

    address: str = ""
    rack: str = ""
    problem: str = ""
    attempt: int = 0
    keeper: str = ""
    wards: tuple[str, ...] = ()


class PeerHosts:
    """This host's replicator. `close` ends it."""

    def __init__(self, config: PeerConfig, board: Board) -> None:
        self._config = config
        self._board = board
        self._process: PipedProcess | None = None
        self._told = ""
        if config.folder is not None:
            (config.folder / ADDRESS_NAME).unlink(missing_ok=True)  # an earlier start's
            arguments = [str(config.folder), f"{_bracketed(config.address)}:0"]
            self._process = PipedProcess("everstep.worker.peers.replicator", arguments)
            self._process.ensure()

    def ensure(self) -> None:
        """Start the replicator again after it has died."""
        if self._process is not None:
            self._process.ensure()

    def prepare(self, command: StartWorkers, is_called_off: Callable[[], bool]) -> bool:
        """Bring every host to the newest step that exists whole; whether the ranks of this attempt have memory.

        The same answer on every host of the attempt.

        Args:
            is_called_off: whether something else is wanted of this host meanwhile.

        Raises:
            WorldError: another host does not say anything, or something else is wanted meanwhile.
        """
        if len(command.shares) == 1:
            self._forget_roster()
            return self._config.folder is not None
        offers = self._exchange(_ADDRESS, command, self._offer(), is_called_off)
        problems = {host: offer.problem for host, offer in offers.items() if offer.problem}
        if not problems:
            self._write_roster(command, offers)
            told = self._exchange(_READY, command, self._await_ready(command, is_called_off), is_called_off)
            problems = {host: offer.problem for host, offer in told.items() if offer.problem}
        if problems:
            self._forget_roster()
            self._tell("; ".join(f"host {host}: {problem}" for host, problem in sorted(problems.items())))
        return not problems

    def close(self) -> None:
        """End the replicator; it first carries the last words of the savers."""
        if self._process is not None and self._process.is_alive():
            self._process.finish(within_s=_CLOSED_WITHIN_S, what="copies for other hosts are still looked after")

    def _exchange(
        self, what: str, command: StartWorkers, mine: _Offer, is_called_off: Callable[[], bool]
    ) -> dict[HostId, _Offer]:
        """Tell the other hosts of the attempt, and hear what they have to tell."""
        self._board.post(_key(command, what, self._config.host), msgspec.json.encode(mine))
        may_take_long = what == _READY and not mine.problem  # else the others wait no more, as soon as they hear of it
        ends_s = time.monotonic() + _HEARD_WITHIN_S + (_READY_WITHIN_S if may_take_long else 0.0)
        offers = {self._config.host: mine}
        for share in command.shares:
            if share.host not in offers:
                left_s = ends_s - time.monotonic()
                key = _key(command, what, share.host)
                content = read_unless(self._board, key, within_s=left_s, is_called_off=is_called_off)
                offers[share.host] = msgspec.json.decode(content, type=_Offer)
        return offers

    def _offer(self) -> _Offer:
        if self._process is None or self._config.folder is None:
            return _Offer(problem="there is no room in memory")
        if problem := _take_credentials(self._config):
            return _Offer(problem=problem)
        ends_s = time.monotonic() + _UP_WITHIN_S
        while not (address := read_address(self._config.folder)):
            self._process.ensure()
            if time.monotonic() > ends_s:
                return _Offer(problem=f"its replicator did not come up within {_UP_WITHIN_S:.0f} s")
            time.sleep(_LOOK_S)
        offer = _Offer(address=address, rack=self._config.rack)
        with contextlib.suppress(EvidenceError, ConfigError):  # another version's roster says nothing
            if (before := read_roster(self._config.folder)) is not None:
                keeper, wards = before.keepers.get(before.host, ""), wards_of(before.keepers, before.host)
                return replace(offer, attempt=before.attempt, keeper=keeper, wards=wards)
        return offer

    def _write_roster(self, command: StartWorkers, offers: dict[HostId, _Offer]) -> None:
        assert self._config.folder is not None
        ranks: dict[str, tuple[int, ...]] = {
            s.host: tuple(range(s.first_rank, s.first_rank + s.count)) for s in command.shares
        }
        racks: dict[str, str] = {host: offer.rack for host, offer in offers.items() if offer.rack}
        roster = PeerRoster(
            generation=int(command.attempt),
            attempt=int(command.attempt),
            host=self._config.host,
            addresses={host: offer.address for host, offer in offers.items()},
            ranks=ranks,
            keepers=choose_keepers(ranks, racks, before=_keepers_before(offers)),
            racks=racks,
            restoring=True,
        )
        forget_repairs(self._config.folder)
        write_roster(self._config.folder, roster)

    def _await_ready(self, command: StartWorkers, is_called_off: Callable[[], bool]) -> _Offer:
        """Until this host has all that it is to have, or some host has told that memory cannot be used."""
        assert self._config.folder is not None
        try:
            progress = PeerProgress(self._config.folder)
        except WorldError as problem:
            return _Offer(problem=str(problem))
        began_s = time.monotonic()
        tell_s, hear_s = began_s + _TELL_AFTER_S, began_s + _SLICE_S
        moved, moved_s = -1, began_s
        while (ready := self._readiness()) is None or ready.generation != int(command.attempt):
            self.ensure()
            check_wanted(is_called_off)
            now_s = time.monotonic()
            if now_s > hear_s:
                hear_s = now_s + _SLICE_S
                if self._has_heard_problem(command):
                    break
            if (found := progress.read()) != moved:
                moved, moved_s = found, now_s
            if now_s - moved_s > _STILL_S or now_s - began_s > _READY_WITHIN_S:
                return _Offer(problem=f"memory was not brought back; no byte has come for {now_s - moved_s:.0f} s")
            if now_s > tell_s:
                tell_s = now_s + _TELL_EVERY_S
                _log.warning("waiting for copies from other hosts for %.0f s", now_s - began_s)
            time.sleep(_LOOK_S)
        return _Offer()

    def _has_heard_problem(self, command: StartWorkers) -> bool:
        for share in command.shares:
            with contextlib.suppress(WorldError):  # it has not told yet
                content = self._board.read(_key(command, _READY, share.host), within_s=0.0)
                if msgspec.json.decode(content, type=_Offer).problem:
                    return True
        return False

    def _readiness(self) -> Readiness | None:
        assert self._config.folder is not None
        try:
            return read_readiness(self._config.folder)
        except msgspec.MsgspecError:
            return None  # an older version's

    def _forget_roster(self) -> None:
        """Ranks that find no roster take all of memory for their own."""
        if self._config.folder is not None:
            forget_repairs(self._config.folder)
            (self._config.folder / ROSTER_NAME).unlink(missing_ok=True)

    def _tell(self, problem: str) -> None:
        """Once for each."""
        if problem != self._told:
            self._told = problem
            _log.warning("checkpoints are not kept in memory and go to disk only: %s", problem)


def _key(command: StartWorkers, what: str, host: HostId) -> str:
    return f"peers/{command.attempt}/{what}/{host}"


def _keepers_before(offers: Mapping[HostId, _Offer]) -> dict[str, str]:
    """Who kept whose copies in the newest attempt that any of the hosts was in, as far as these know."""
    newest = max(offer.attempt for offer in offers.values())
    found: dict[str, str] = {}
    for host, offer in sorted(offers.items()):
        if offer.attempt == newest > 0:
            found |= dict.fromkeys(offer.wards, host)
            found |= {host: offer.keeper} if offer.keeper else {}
    return found


def _take_credentials(config: PeerConfig) -> str:
    """The job's credentials where the replicator looks for them; what went wrong."""
    assert config.folder is not None
    target, fresh = config.folder / CREDENTIALS_NAME, config.folder / f"{CREDENTIALS_NAME}.new"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(config.credentials, fresh)
        fresh.chmod(0o700)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except (OSError, shutil.Error) as error:
        return f"the job's credentials cannot be read from {config.credentials}: {error}"
    return ""


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
