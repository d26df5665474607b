"""When hosts copy each other's memory and what a replaced host gets back: decisions over reports; it moves no byte.

One host leads (the one with rank 0): it names the version that all copy next, and which one all keep meanwhile. It
decides nothing while a report is missing, so a copy that all hosts have is given up only for a newer one that all have.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.policy.checkpoints import Holding, Tier, elect
from everstep.policy.peers import wards_of


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """A step in one course of events: shards fit together when their versions are the same. Later ones are greater."""

    attempt: int
    step: int
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """A complete shard in a slot.

    Attributes:
        is_replicated: the shards are shares of a state that every rank needs whole.
    """

    shard: int
    slot: int
    version: Version
    shard_count: int
    is_replicated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What a host says of itself.

    Attributes:
        generation: of the roster that it follows.
        slots: what the memory slots of its own ranks hold.
        copies: what it keeps beside them, of its own ranks and of others.
        failed: the version that it could not copy.
        restored: the generation whose plan it has carried out.
        missing: shards of that plan that it could not bring in.
        moved_bytes: brought in for plans so far, so that others see it at work.
    """

    host: str
    generation: int
    slots: tuple[HeldShard, ...] = ()
    copies: tuple[HeldShard, ...] = ()
    failed: Version | None = None
    restored: int = 0
    missing: tuple[int, ...] = ()
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who is in the job: the ranks of each host, and who keeps its copies."""

    ranks: Mapping[str, tuple[int, ...]]
    keepers: Mapping[str, str] = field(default_factory=dict)

    @property
    def leader(self) -> str:
        return next(host for host, ranks in self.ranks.items() if 0 in ranks)

    @property
    def owners(self) -> dict[int, str]:
        return {rank: host for host, ranks in self.ranks.items() for rank in ranks}

    def kept_by(self, host: str) -> tuple[int, ...]:
        """The ranks whose shards this host copies: its own, and those of the hosts that it keeps copies for."""
        wards = wards_of(self.keepers, host)
        return tuple(sorted({rank for name in (host, *wards) for rank in self.ranks.get(name, ())}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One shard that `target` brings into a memory slot from what `source` holds; both may be the same host."""

    shard: int
    slot: int
    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How all hosts get the newest version that still exists whole; without a version there is none."""

    version: Version | None = None
    fetches: tuple[Fetch, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What the leader tells all.

    Attributes:
        protected: the version that all hosts keep.
        wanted: the version to copy now; None while there is nothing newer.
        plan: before the ranks start.
    """

    generation: int
    protected: Version | None = None
    wanted: Version | None = None
    plan: Plan | None = None


def held_everywhere(members: Members, reports: Mapping[str, HostReport]) -> Version | None:
    """The newest version that every host has copied as far as it is to."""
    common: set[Version] | None = None
    for host in sorted(members.ranks):
        for rank in members.kept_by(host):
            held = {copy.version for copy in reports[host].copies if copy.shard == rank}
            common = held if common is None else common & held
    return max(common or (), default=None)


def committed(members: Members, reports: Mapping[str, HostReport]) -> Version | None:
    """The newest version that is complete in the memory of all ranks."""
    common: set[Version] | None = None
    for rank, owner in members.owners.items():
        held = {slot.version for slot in reports[owner].slots if slot.shard == rank}
        common = held if common is None else common & held
    return max(common or (), default=None)


def next_word(
    word: Word | None, members: Members, reports: Mapping[str, HostReport], *, generation: int, restoring: bool
) -> Word | None:
    """The leader's next word; the one before while a host's report is missing or of another generation."""
    if any(host not in reports or reports[host].generation != generation for host in members.ranks):
        return word
    if word is None or word.generation != generation:
        is_restored = all(reports[host].restored == generation for host in members.ranks)
        plan = plan_restore(members, reports) if restoring and not is_restored else None
        return Word(generation=generation, protected=held_everywhere(members, reports), plan=plan)
    if word.plan is not None and any(reports[host].restored != generation for host in members.ranks):
        return word
    protected = max(
        (v for v in (held_everywhere(members, reports), word.protected) if v is not None),
        default=None,
    )
    wanted = word.wanted
    if wanted is not None and (wanted == protected or any(reports[host].failed == wanted for host in members.ranks)):
        wanted = None
    if wanted is None:
        newest = committed(members, reports)
        is_new = newest is not None and (protected is None or newest > protected) and newest != word.wanted
        wanted = newest if is_new else None
    return Word(generation=generation, protected=protected, wanted=wanted, plan=word.plan)


def slot_for_copy(held: Sequence[Version | None], word: Word) -> int | None:
    """Which of a shard's copies to overwrite for `word.wanted`; None when it is there or nothing may go."""
    if word.wanted is None or word.wanted in held:
        return None
    free = [number for number, version in enumerate(held) if version is None or version != word.protected]
    return min(free, key=lambda number: (held[number] is not None, held[number] or word.wanted), default=None)


def plan_restore(members: Members, reports: Mapping[str, HostReport], *, slot_count: int = 3) -> Plan:
    """The newest version whose every shard somebody holds, and who sends which to whom.

    A later attempt goes before a later step: what was left behind when the next attempt resumed is no part of it.
    """
    owners = members.owners
    held = [(host, item) for host in sorted(reports) for item in (*reports[host].slots, *reports[host].copies)]
    in_place = {
        (item.shard, item.version): item.slot
        for host in sorted(reports)
        for item in reports[host].slots
        if owners.get(item.shard) == host
    }
    reasons: list[str] = []
    for attempt in sorted({item.version.attempt for _, item in held}, reverse=True):
        holdings = [
            _holding(item, Tier.MEMORY if (item.shard, item.version) in in_place else Tier.PEER)
            for _, item in held
            if item.version.attempt == attempt and item.shard_count == len(owners)
        ]
        election = elect(holdings, {})
        reasons += [f"attempt {attempt}: {reason}" for reason in election.reasons]
        if election.sources:
            first = election.sources[0]
            version = Version(attempt=attempt, step=first.step, layout=first.layout)
            fetches = _fetches(members, reports, version, in_place, slot_count)
            return Plan(version=version, fetches=fetches, reasons=tuple(reasons))
    return Plan(reasons=tuple(reasons))


def _holding(item: HeldShard, tier: Tier) -> Holding:
    version = item.version
    return Holding(step=version.step, layout=version.layout, shard=item.shard, shard_count=item.shard_count, tier=tier)


def _fetches(
    members: Members,
    reports: Mapping[str, HostReport],
    version: Version,
    in_place: Mapping[tuple[int, Version], int],
    slot_count: int,
) -> tuple[Fetch, ...]:
    """Each host brings in what it lacks: of its own ranks, and of all where every rank needs the whole state."""
    holders: dict[int, list[str]] = {}
    is_replicated = False
    for host in sorted(reports):
        for item in (*reports[host].copies, *reports[host].slots):
            if item.version == version:
                is_replicated = is_replicated or item.is_replicated
                if host not in holders.setdefault(item.shard, []):
                    holders[item.shard].append(host)
    sent: Counter[str] = Counter()
    fetches = []
    for shard, owner in sorted(members.owners.items()):
        slot = in_place.get((shard, version))
        targets = [] if slot is not None else [owner]
        if slot is None:
            slot = _slot_to_restore(reports[owner], shard, slot_count)
        if is_replicated:
            targets += [host for host in sorted(members.ranks) if host != owner]
        for target in targets:
            source = min(holders[shard], key=lambda host: (host != target, sent[host], host))
            sent[source] += source != target
            fetches.append(Fetch(shard=shard, slot=slot, source=source, target=target))
    return tuple(fetches)


def _slot_to_restore(report: HostReport, shard: int, slot_count: int) -> int:
    """An empty slot, or the one that holds the oldest version."""
    held = {item.slot: item.version for item in report.slots if item.shard == shard}
    return min(range(slot_count), key=lambda slot: (slot in held, held.get(slot) or _OLDEST, slot))


_OLDEST = Version(attempt=-1, step=-1, layout="")
