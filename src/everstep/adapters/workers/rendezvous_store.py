"""The rendezvous stores of one host: a fresh one for every attempt, the next one kept ready, and told to other hosts.

Knows nothing of what is stored; the process behind a store is `everstep.worker.store`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.adapters.hosts.board import read_unless
from everstep.adapters.workers.processes import reap, send_signal
from everstep.adapters.workers.standby import ProcessOrder, Program, Standby, start_cold, wait_for_line
from everstep.domain.errors import ConfigError, WorldError
from everstep.ports import Board

_UP_WITHIN_S = 60.0
_FOUND_WITHIN_S = 120.0
"""The first host may still be importing what its standby needs."""
_SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store that listens."""

    pid: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """MASTER_ADDR and MASTER_PORT of an attempt; port 0 where there is no store."""

    address: str
    port: int


def tell_meeting(board: Board, attempt: int, meeting: Meeting | None) -> None:
    """Let the other hosts know where this attempt's ranks meet; None: it came to nothing.

    Raises:
        WorldError: the board cannot be reached.
    """
    text = "" if meeting is None else f"{meeting.address} {meeting.port}"
    board.post(f"store/{attempt}", text.encode())


def find_meeting(board: Board, attempt: int, is_called_off: Callable[[], bool]) -> Meeting:
    """Where the first host has the ranks of this attempt meet.

    Raises:
        WorldError: it does not say, or could not make a store, or something else is wanted of this host meanwhile.
    """
    content = read_unless(board, f"store/{attempt}", within_s=_FOUND_WITHIN_S, is_called_off=is_called_off)
    address, _, port = content.decode().partition(" ")
    if not port.isdecimal():
        raise WorldError("the first host could not start the rendezvous store", retryable=True)
    return Meeting(address=address, port=int(port))


class RendezvousStores:
    """Makes stores.

    Args:
        address: what it binds to, and MASTER_ADDR.
        port: MASTER_PORT; 0 takes a free one for each attempt, which also allows keeping the next one ready.
        standby: forks the store's process when it can.
        environment: for a store that has to start cold.
    """

    def __init__(self, *, address: str, port: int, standby: Standby | None, environment: Mapping[str, str]) -> None:
        self._address = address
        self._port = port
        self._standby = standby
        self._environment = environment
        self._reserve: tuple[int, int] | None = None  # pid, reading end of its output

    @property
    def reserve_pid(self) -> int:
        return self._reserve[0] if self._reserve else 0

    def take(self, *, is_alive: Callable[[int], bool]) -> Store:
        """A fresh store, listening.

        Raises:
            ConfigError: the port is in use.
            WorldError: the store did not come up.
        """
        if self._reserve is not None and not is_alive(self._reserve[0]):
            self.drop_reserve()
        pid, output = self._reserve or self._launch()
        self._reserve = None
        line = wait_for_line(output, timeout_s=_UP_WITHIN_S)
        os.close(output)
        word, _, rest = line.partition(" ")
        if word == "port":
            return Store(pid=pid, port=int(rest))
        send_signal(pid, _SIGKILL)
        reap(pid)
        if word == "error" and self._port:
            raise ConfigError(
                f"port {self._port} on {self._address} cannot be used ({rest}); "
                "give another --master-port, or leave it out and everstep takes a free one"
            )
        raise WorldError(f"the rendezvous store did not come up ({rest or 'no answer'})", retryable=True)

    def keep_ready(self) -> None:
        """Start the next attempt's store in advance, unless a fixed port forbids it."""
        if self._port == 0 and self._reserve is None:
            self._reserve = self._launch()

    def drop_reserve(self) -> None:
        if self._reserve is not None:
            pid, output = self._reserve
            send_signal(pid, _SIGKILL)
            reap(pid)
            os.close(output)
            self._reserve = None

    def _launch(self) -> tuple[int, int]:
        read_end, write_end = os.pipe()
        program = Program(arguments=("everstep.worker.store", self._address, str(self._port)), module=True)
        order = ProcessOrder(environment={}, stdout=write_end, stderr=2, observe=False)
        try:
            if self._standby is not None and self._standby.ready():
                pid = self._standby.start(program, [order])[0]
            else:
                pid = start_cold(program, order, environment=self._environment)
        except WorldError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return pid, read_end
