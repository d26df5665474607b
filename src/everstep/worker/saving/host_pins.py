"""What a rank must know where the job has several hosts: which steps others read just now, and who orders its saver."""

from collections.abc import Sequence
from pathlib import Path

from everstep.adapters.checkpoints.leader_page import LeaderPage
from everstep.adapters.checkpoints.peer_files import PeerPin, PeerRoster
from everstep.policy.checkpoints import Slot, committed_steps


class HostPins:
    """This host's side; every look costs some microseconds.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path, roster: PeerRoster) -> None:
        self._first = min(roster.ranks[roster.host], default=0)
        self._replicator = PeerPin(folder)
        self._leader = LeaderPage(folder)

    def orders(self, rank: int) -> bool:
        """Whether this rank tells the saver of its host what to do."""
        return rank == self._first

    def durable(self) -> int:
        """The newest step that the savers together have made durable."""
        return self._leader.read().durable

    def steps(self, slots: Sequence[Sequence[Slot]]) -> set[int]:
        """The steps that the replicator and the savers read, or are about to.

        Args:
            slots: of all ranks.
        """
        word = self._leader.read()
        pins = {self._replicator.step(), word.step}
        if word.keep_from:
            pins.update([step for step in committed_steps(slots) if step >= word.keep_from][-1:])
        return pins
