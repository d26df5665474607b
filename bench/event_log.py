"""What the training script told: the lives of its processes, and the parts of a recovery. Starts nothing."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PARTS = ("detect", "teardown", "spawn", "import", "init", "restore", "first_step")
_TOLD = (("spawn", "proc_start"), ("import", "imported"), ("init", "pg_ready"), ("restore", "restored"))


@dataclass(slots=True)
class Life:
    """One worker process.

    Attributes:
        began_s: its first event; CLOCK_MONOTONIC, as all times here.
        zero_ns: CLOCK_MONOTONIC at second 0 of everstep's ledger; 0 under another launcher.
        told: when each event other than a step came first.
        steps: time and number of each step that ended.
        losses: what the script told of them, by step.
        cpu_s: CPU time that the process had used at the first of each event, where it told.
    """

    pid: int
    rank: int
    began_s: float
    zero_ns: int
    told: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)


class EventLog:
    """All lives, in the order of their begin."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self._by_pid: dict[int, Life] = {}

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            record = json.loads(line)
            if record["event"] == "proc_start":
                life = Life(record["pid"], record["rank"], record["t"], record.get("zero_ns", 0))
                self.lives.append(life)
                self._by_pid[life.pid] = life
            life = self._by_pid[record["pid"]]
            if "cpu_s" in record:
                life.cpu_s.setdefault(record["event"], record["cpu_s"])
            if record["event"] == "step":
                life.steps.append((record["t"], record["step"]))
                if "loss" in record:
                    life.losses[record["step"]] = record["loss"]
            else:
                life.told.setdefault(record["event"], record["t"])

    def newest(self) -> dict[int, Life]:
        """The newest life of each rank."""
        return {life.rank: life for life in sorted(self.lives, key=lambda life: life.began_s)}

    def have_stepped(self, world_size: int, count: int) -> bool:
        """Whether the newest life of every rank has finished so many steps."""
        newest = self.newest()
        return len(newest) == world_size and all(len(life.steps) >= count for life in newest.values())

    def recovered(self, world_size: int, since_s: float) -> dict[int, Life] | None:
        """For each rank the first life, begun after `since_s`, that finished a step; None while a rank lacks one."""
        found: dict[int, Life] = {}
        for life in self.lives:
            if life.began_s > since_s and life.steps:
                found.setdefault(life.rank, life)
        return found if len(found) == world_size else None


def recovery_s(lives: Mapping[int, Life], since_s: float) -> float:
    """Seconds until the last rank has finished its first new step."""
    return max(life.steps[0][0] for life in lives.values()) - since_s


def parts_of_recovery(
    lives: Mapping[int, Life], since_s: float, *, detected_s: float | None, gone_s: float | None
) -> dict[str, float | None]:
    """The parts of a recovery, each from the end of the one before to the last rank's end; None where unseen.

    Args:
        lives: the new lives.
        since_s: when the fault was caused.
        detected_s: the launcher's first sign of having noticed.
        gone_s: when the last old process was gone.
    """
    ends: list[tuple[str, float | None]] = [("detect", detected_s), ("teardown", gone_s)]
    for part, event in _TOLD:
        times = [life.told[event] for life in lives.values() if event in life.told]
        ends.append((part, max(times) if len(times) == len(lives) else None))
    ends.append(("first_step", max(life.steps[0][0] for life in lives.values())))
    parts: dict[str, float | None] = {}
    before_s = since_s
    for part, end_s in ends:
        parts[part] = None if end_s is None else round(end_s - before_s, 3)
        before_s = before_s if end_s is None else end_s
    return parts
