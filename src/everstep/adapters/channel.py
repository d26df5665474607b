"""The line between coordinator and agents inside one process: two queues and a wake-up."""

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
        self._ends: dict[HostId, LocalAgentEnd] = {}
        self._wake = wake

    def agent_end(self, host: HostId) -> "LocalAgentEnd":
        end = LocalAgentEnd(self.post)
        self._ends[host] = end
        return end

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
        self._ends[host].put(command)
        self._wake()


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
