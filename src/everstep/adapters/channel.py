"""The line between coordinator and agents inside one process: two queues and a wake-up.

Agents on other hosts are plugged in here by whoever has a line to them.
"""

import queue
from collections.abc import Callable, Sequence

from everstep.domain.commands import HostCommand
from everstep.domain.events import Event
from everstep.domain.ids import HostId

_BATCH_MAX = 1_000


class LocalChannel:
    """Both ends in one: the coordinator's, and `agent_end` for each host.

    Args:
        wake: called after each command, to end the agent's sleep.
    """

    def __init__(self, *, wake: Callable[[], None]) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # its put is safe inside a signal handler
        self._takers: dict[HostId, Callable[[HostCommand], None]] = {}
        self._wake = wake

    def agent_end(self, host: HostId) -> "LocalAgentEnd":
        end = LocalAgentEnd(self.post)

        def take(command: HostCommand) -> None:
            end.put(command)
            self._wake()

        self._takers[host] = take
        return end

    def plug(self, host: HostId, take: Callable[[HostCommand], None]) -> None:
        """Commands to this host go to `take`; its events come by `post`."""
        self._takers[host] = take

    def unplug(self, host: HostId) -> None:
        """The host is gone; commands to it are dropped, as HostLost tells the policy."""
        self._takers.pop(host, None)

    def post(self, event: Event) -> None:
        """Hand in an event from anywhere, also from a signal handler's thread."""
        self._events.put(event)

    def receive(self, timeout_s: float) -> Sequence[Event]:
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return ()
        while len(events) < _BATCH_MAX and not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def send(self, command: HostCommand, *, host: HostId) -> None:
        take = self._takers.get(host)
        if take is not None:
            take(command)


class LocalAgentEnd:
    """The agent's end."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._commands: queue.SimpleQueue[HostCommand] = queue.SimpleQueue()

    def put(self, command: HostCommand) -> None:
        self._commands.put(command)

    def send(self, event: Event) -> None:
        self._post(event)

    def receive(self) -> Sequence[HostCommand]:
        commands = []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands
