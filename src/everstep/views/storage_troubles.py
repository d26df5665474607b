"""When checkpoints were not durable, and why, from a ledger: a fold for reports. It reads no files."""

from dataclasses import dataclass

from everstep.domain.commands import Command
from everstep.domain.events import CheckpointDelayed, CheckpointFailed, CheckpointMirrored, CheckpointSaved, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTrouble:
    """A time in which nothing became durable.

    Attributes:
        where: `disk` or `mirror`.
        since_s, until_s: on the run's clock, from the first word of it to the next step that was durable; None where
            none has followed.
        step: the first that was affected.
        reason: the latest word of it.
        word_count: failures and delays told of in that time.
    """

    where: str
    since_s: float
    until_s: float | None = None
    step: int
    reason: str
    word_count: int = 1


class StorageLog:
    """The fold: `handle` takes the next entry."""

    def __init__(self) -> None:
        self._open: dict[str, StorageTrouble] = {}
        self._over: list[StorageTrouble] = []

    def handle(self, body: Event | Command) -> None:
        """Take an entry of the ledger."""
        match body:
            case CheckpointSaved():
                self._end("disk", body.at_s)
            case CheckpointMirrored():
                self._end("mirror", body.at_s)
            case CheckpointFailed():
                self._word("disk", body.at_s, body.step, body.reason)
            case CheckpointDelayed():
                where = "disk" if body.attempt else "mirror"  # the mirror knows of no attempt
                self._word(where, body.at_s - body.waited_s, body.step, body.reason)

    def troubles(self) -> tuple[StorageTrouble, ...]:
        """All of them, by their beginning."""
        return tuple(sorted([*self._over, *self._open.values()], key=lambda trouble: trouble.since_s))

    def _word(self, where: str, since_s: float, step: int, reason: str) -> None:
        before = self._open.get(where)
        self._open[where] = StorageTrouble(
            where=where,
            since_s=before.since_s if before else since_s,
            step=before.step if before else step,
            reason=reason,
            word_count=before.word_count + 1 if before else 1,
        )

    def _end(self, where: str, at_s: float) -> None:
        if (trouble := self._open.pop(where, None)) is not None:
            self._over.append(
                StorageTrouble(
                    where=where,
                    since_s=trouble.since_s,
                    until_s=at_s,
                    step=trouble.step,
                    reason=trouble.reason,
                    word_count=trouble.word_count,
                )
            )
