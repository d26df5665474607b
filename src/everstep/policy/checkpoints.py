"""Which checkpoint to resume from and which memory slot to overwrite: decisions over what was found; it reads no file.

Every rank is one shard; the rules do not ask which process or host holds it, so hosts may swap.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Tier(IntEnum):
    """Where a shard lies; the smaller one is the faster one."""

    MEMORY = 0
    PEER = 1
    """A copy that a host keeps; it becomes MEMORY before the ranks look (policy/replication.py)."""
    DISK = 2


class SlotState(IntEnum):
    """What a memory slot holds."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One memory slot of one rank as its header reads."""

    state: SlotState = SlotState.EMPTY
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One shard of one step in one place.

    Attributes:
        layout: shards of one step fit together when their layouts are the same.
        shard, shard_count: which of how many.
    """

    step: int
    layout: str
    shard: int
    shard_count: int
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """What to resume from.

    Attributes:
        sources: one holding for each shard, in their order; empty when there is nothing to resume from.
        reasons: why newer steps, and damaged shards of this one, are not used: a sentence each.
    """

    sources: tuple[Holding, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        return self.sources[0].step if self.sources else None

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that is needed; None when there is nothing to resume from."""
        return max((source.tier for source in self.sources), default=None)


def elect(holdings: Collection[Holding], damaged: Mapping[Holding, str]) -> Election:
    """The newest step of which every shard is somewhere undamaged; each from the fastest tier that has it.

    Args:
        damaged: holdings that failed their test, with the reason.
    """
    groups: dict[tuple[int, str, int], list[Holding]] = {}
    for holding in holdings:
        groups.setdefault((holding.step, holding.layout, holding.shard_count), []).append(holding)
    reasons: list[str] = []
    # Among layouts of one step, the one with a faster tier first; then by name, so that all choose the same.
    for key in sorted(groups, key=lambda key: (-key[0], min(h.tier for h in groups[key]), key[1:])):
        members = sorted(groups[key], key=lambda holding: (holding.shard, holding.tier))
        sound = {member.shard: member for member in reversed(members) if member not in damaged}
        reasons += [
            f"step {key[0]}, {member.tier.name.lower()}, shard {member.shard}: {damaged[member]}"
            for member in members
            if member in damaged
        ]
        missing = [shard for shard in range(key[2]) if shard not in sound]
        if not missing:
            return Election(sources=tuple(sound[shard] for shard in range(key[2])), reasons=tuple(reasons))
        named = ", ".join(str(shard) for shard in missing[:8]) + (" and more" if len(missing) > 8 else "")
        reasons.append(f"step {key[0]} lacks shard {named} of {key[2]}")
    return Election(reasons=tuple(reasons))


def committed_steps(ranks: Sequence[Sequence[Slot]]) -> list[int]:
    """The steps that are complete on all ranks, newest first."""
    complete = [{slot.step for slot in slots if slot.state is SlotState.COMPLETE} for slots in ranks]
    return sorted(set.intersection(*complete), reverse=True) if complete else []


def slot_to_write(rank: int, ranks: Sequence[Sequence[Slot]], pinned: Collection[int]) -> int | None:
    """The slot that `rank` may overwrite now; None when none is free, and then this save is left out.

    The newest step that is complete on all ranks stays, and so does a pinned one, and one that others may still
    complete: else a rank that is ahead could destroy each step before it is complete on all.
    """
    committed = committed_steps(ranks)
    kept = {*committed[:1], *pinned}
    mine = ranks[rank]
    free = [
        number
        for number, slot in enumerate(mine)
        if slot.state is not SlotState.COMPLETE
        or (slot.step not in kept and (slot.step in committed or _is_dead(slot.step, ranks)))
    ]
    return min(free, key=lambda number: (mine[number].state, mine[number].step), default=None)


def _is_dead(step: int, ranks: Sequence[Sequence[Slot]]) -> bool:
    """Whether some rank has gone past `step` without it, so that it will never be complete on all."""
    return any(
        all(slot.step != step or slot.state is SlotState.EMPTY for slot in slots)
        and any(slot.step > step and slot.state is not SlotState.EMPTY for slot in slots)
        for slots in ranks
    )


def step_to_stop_after(ended: Sequence[int]) -> int:
    """After which step all ranks can save together, when asked to stop; from the last step that each has ended.

    Whoever has ended one is in the next already, and the others can follow: no rank of a job that trains together ends
    it without them. One rank alone stops where it is.
    """
    return max(ended) + (len(ended) > 1)
