"""The coordinator's loop: records every event, asks the policy, records its commands, then carries them out.

It knows the order of these four things and nothing else; what to do is `policy.recovery`'s, how is the agents'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.domain.commands import Command, FinishJob, RecordVerdict, ReplaceHost, StartWorkers
from everstep.domain.events import Event, Ticked
from everstep.policy.recovery import Job
from everstep.ports import Clock, CoordinatorChannel, Ledger

_TICK_S = 0.05
_IDLE_TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPorts:
    """The world as the coordinator meets it. `listen` hears everything that goes into the ledger, after it did."""

    ledger: Ledger
    channel: CoordinatorChannel
    clock: Clock
    listen: Callable[[Event | Command], None]


class Coordinator:
    """Runs a job to its end.

    Args:
        job: the policy's machine, already fed with the ledger when a run is continued.
    """

    def __init__(self, job: Job, ports: CoordinatorPorts) -> None:
        self._job = job
        self._ledger = ports.ledger
        self._channel = ports.channel
        self._clock = ports.clock
        self._listen = ports.listen

    def run(self, opening: Sequence[Event]) -> FinishJob:
        """Serve until the job is over.

        Args:
            opening: events that come before any other: RunStarted or RunResumed.

        Raises:
            WorldError: the ledger can't be written. Nothing unrecorded has been carried out.
        """
        end = self.take(opening)
        while end is None:
            events = self._channel.receive(_TICK_S if self._job.wants_ticks else _IDLE_TICK_S)
            end = self.take([*events, Ticked(at_s=self._clock.now_s())])
        return end

    def take(self, events: Sequence[Event]) -> FinishJob | None:
        """Record events, decide, record the commands, carry them out. Gives the command that ends the job, once.

        What happens after the end of the job is nobody's concern.
        """
        bodies: list[Event | Command] = []
        commands: list[Command] = []
        for event in events:
            following = self._job.handle(event)
            if following or not isinstance(event, Ticked):
                bodies += [event, *following]
                commands += following
            if any(isinstance(command, FinishJob) for command in following):
                break  # the ledger of a job that is over ends with that
        if bodies:
            self._ledger.append(bodies, wall=self._clock.wall(), durable=bool(commands))
        for body in bodies:
            self._listen(body)
        return self._carry_out(commands)

    def _carry_out(self, commands: Sequence[Command]) -> FinishJob | None:
        for command in commands:
            match command:
                case FinishJob():
                    return command
                case RecordVerdict() | ReplaceHost():
                    continue  # being in the ledger is all they want
                case StartWorkers():
                    for share in command.shares:
                        self._channel.send(command, host=share.host)
                case _:
                    self._channel.send(command, host=command.host)
        return None
