"""Which host keeps the copies of another host's memory: a decision over names and labels; it moves no byte."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

Kind = tuple[int, frozenset[str]]
_SAME_RACK, _SHARED_GROUP = 2, 1
WARDS_MAX = 2
"""Hosts that one may have to keep copies for: each takes its memory, and as long to send as its own."""
_LOOKS_MAX = 1_000_000
"""Pairs that chains may be searched among: enough to be exact for a hundred hosts, and short for ten thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host with what fails together with it.

    Attributes:
        rack: rack, switch or power domain; empty where nobody knows.
        groups: parallel groups of its ranks that are lost, or sent away, as a whole.
    """

    name: str
    rack: str = ""
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who keeps whose copies.

    Attributes:
        keepers: for each host the one that holds the copies of its shards; empty for a host alone.
        doubts: what no choice could give, a sentence each.
    """

    keepers: Mapping[str, str]
    doubts: tuple[str, ...] = ()

    @property
    def load_max(self) -> int:
        """The most hosts that one keeps copies for."""
        return max(Counter(self.keepers.values()).values(), default=0)


def place(hosts: Sequence[Host], before: Mapping[str, str] | None = None, *, load_max: int | None = None) -> Placement:
    """A keeper for each host: in another rack before all, then without a parallel group in common, then evenly.

    Args:
        before: the keepers until now; who can stay, stays.
        load_max: where one host would have to keep copies for more than so many (as the only one in another rack than
            all others), groups are not heeded, then racks, then neither.
    """
    if len(hosts) < 2:
        return Placement(keepers={}, doubts=("a host alone has no peer: its loss loses what is in memory",))
    if load_max is None:
        return _HEEDED[0].placement(_HEEDED[0].labels(hosts), before)
    # What is heeded follows from the hosts alone, whoever keeps what by now. Without labels each keeps one.
    way, anew = next((way, found) for way in _HEEDED if (found := way.fitting(hosts, load_max)) is not None)
    kept = way.placement(way.labels(hosts), before) if before else anew
    return kept if kept.load_max <= load_max else anew


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heeded:
    """Which labels a placement goes by."""

    racks: bool
    groups: bool

    def fitting(self, hosts: Sequence[Host], load_max: int) -> Placement | None:
        """A placement whose loads are not above that; None where there is none."""
        labels = self.labels(hosts)
        if labels.load_bound() > load_max:
            return None
        found = self.placement(labels, None)
        return found if found.load_max <= load_max else None

    def labels(self, hosts: Sequence[Host]) -> "_Labels":
        seen = [
            replace(host, rack=host.rack if self.racks else "", groups=host.groups if self.groups else ())
            for host in hosts
        ]
        return _Labels(sorted(seen, key=lambda host: (host.rack, host.groups, host.name)))

    def placement(self, labels: "_Labels", before: Mapping[str, str] | None) -> Placement:
        keepers = labels.kept(before) if before else labels.spread()
        return Placement(keepers=_Search(labels, keepers).complete(), doubts=(*labels.doubts(), *self.doubts))

    @property
    def doubts(self) -> tuple[str, ...]:
        left_out = [name for name, heeded in (("racks", self.racks), ("parallel groups", self.groups)) if not heeded]
        if not left_out:
            return ()
        return (f"{' and '.join(left_out)} are not heeded: one host would have to keep the copies of too many others",)


_HEEDED = tuple(_Heeded(racks=racks, groups=groups) for racks in (True, False) for groups in (True, False))


def members_as_hosts(
    ranks: Mapping[str, Sequence[int]], racks: Mapping[str, str], groups: Sequence[Sequence[int]]
) -> list[Host]:
    """The hosts of a job with their labels.

    Args:
        ranks: of each host.
        racks: of the hosts whose rack somebody knows.
        groups: ranks that are lost, or sent away, together. One that is on all hosts tells nothing, and is left out.
    """
    owners = {rank: host for host, own in ranks.items() for rank in own}
    labels: dict[str, list[str]] = {host: [] for host in ranks}
    for group in groups:
        hosts = {owners[rank] for rank in group if rank in owners}
        if 1 < len(hosts) < len(ranks):
            name = "ranks " + ",".join(map(str, group))
            for host in hosts:
                labels[host].append(name)
    return [Host(name=host, rack=racks.get(host, ""), groups=tuple(labels[host])) for host in sorted(ranks)]


def choose_keepers(
    ranks: Mapping[str, Sequence[int]],
    racks: Mapping[str, str],
    *,
    groups: Sequence[Sequence[int]] = (),
    before: Mapping[str, str],
) -> Mapping[str, str]:
    """Who keeps whose copies in a job; see `members_as_hosts` and `place`."""
    return place(members_as_hosts(ranks, racks, groups), before, load_max=WARDS_MAX).keepers


def wards_of(keepers: Mapping[str, str], host: str) -> tuple[str, ...]:
    """The hosts whose copies this one keeps."""
    return tuple(sorted(ward for ward, keeper in keepers.items() if keeper == host))


class _Labels:
    """The hosts by number, with the labels that tell them apart."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.names = [host.name for host in hosts]
        self.count = len(hosts)
        racks = Counter(host.rack for host in hosts if host.rack)
        everywhere = {g for g, n in Counter(g for h in hosts for g in set(h.groups)).items() if n == self.count}
        self._useless = [f"all hosts belong to {group}" for group in sorted(everywhere)]
        if any(n == self.count for n in racks.values()):
            self._useless.append(f"all hosts are in {next(iter(racks))}")
            racks.clear()
        numbers = {rack: number for number, rack in enumerate(racks)}
        # A host whose rack nobody knows shares it with nobody.
        self._racks = [numbers.get(host.rack, -1 - number) for number, host in enumerate(hosts)]
        self._groups = [frozenset(host.groups) - everywhere for host in hosts]
        self.rack_sizes = Counter(self._racks)
        self._best: dict[Kind, int] = {}
        self._kinds = Counter(zip(self._racks, self._groups, strict=True))

    def kind(self, one: int) -> Kind:
        return self._racks[one], self._groups[one]

    def risk(self, one: int, other: int) -> int:
        """What the two would be lost by together, beside chance."""
        rack = _SAME_RACK if self._racks[one] == self._racks[other] else 0
        return rack if self._groups[one].isdisjoint(self._groups[other]) else rack + _SHARED_GROUP

    def best(self, one: int) -> int:
        """The smallest risk that any other host has with this one."""
        kind = self.kind(one)
        if kind not in self._best:
            self._best[kind] = self._find_best(*kind)
        return self._best[kind]

    def _find_best(self, rack: int, groups: frozenset[str]) -> int:
        best = _SAME_RACK + _SHARED_GROUP
        for (other_rack, other_groups), count in self._kinds.items():
            if count == 1 and (other_rack, other_groups) == (rack, groups):
                continue  # itself
            risk = _SAME_RACK if other_rack == rack else 0
            if not groups.isdisjoint(other_groups):
                risk += _SHARED_GROUP
            if risk < best:
                best = risk
                if best == 0:
                    break
        return best

    def allows(self, one: int, keeper: int) -> bool:
        return one != keeper and self.risk(one, keeper) == self.best(one)

    def kept(self, before: Mapping[str, str]) -> list[int | None]:
        """Of the keepers until now those that are as good as any; a new host takes the place of one that is gone."""
        gone = sorted(before.keys() - set(self.names))
        heirs = dict(zip(sorted(set(self.names) - before.keys()), gone, strict=False))
        old = [heirs.get(name, name) for name in self.names]
        numbers = {name: number for number, name in enumerate(old)}
        found = [numbers.get(before.get(name, "")) for name in old]
        return [k if k is not None and self.allows(one, k) else None for one, k in enumerate(found)]

    def spread(self) -> list[int | None]:
        """A first choice: each the host as far ahead as the largest rack is long, in an order by rack."""
        size = max(self.rack_sizes.values())
        if 2 * size > self.count:
            return self._spread_over_the_small(size)
        tries = sorted({size, self.count // 2, max(size, self.count // 3)})
        choices = [[(one + shift) % self.count for one in range(self.count)] for shift in tries]
        allowed = [[k if self.allows(one, k) else None for one, k in enumerate(choice)] for choice in choices]
        return min(allowed, key=lambda choice: choice.count(None))

    def _spread_over_the_small(self, size: int) -> list[int | None]:
        """One rack has more hosts than all others together: these share its copies evenly."""
        large = next(rack for rack, n in self.rack_sizes.items() if n == size)
        inside = [one for one in range(self.count) if self._racks[one] == large]
        outside = [one for one in range(self.count) if self._racks[one] != large]
        keepers: list[int | None] = [None] * self.count
        for many, few in ((inside, outside), (outside, inside)):
            for place_, one in enumerate(many):
                keeper = few[place_ % len(few)]
                keepers[one] = keeper if self.allows(one, keeper) else None
        return keepers

    def load_bound(self) -> int:
        """No placement that leaves each rack can have a smaller largest load."""
        size = max(self.rack_sizes.values())
        return max(1, -(-size // max(1, self.count - size)))

    def doubts(self) -> tuple[str, ...]:
        counts = Counter(self.best(one) for one in range(self.count))
        found = [f"{label}, so that its loss would lose both copies" for label in self._useless]
        in_rack = sum(n for risk, n in counts.items() if risk & _SAME_RACK)
        in_group = sum(n for risk, n in counts.items() if risk & _SHARED_GROUP)
        if in_rack:
            found.append(f"for {in_rack} hosts there is no keeper in another rack")
        if in_group:
            found.append(f"for {in_group} hosts there is no keeper in another rack without a parallel group in common")
        return tuple(found)


class _Search:
    """Completes a choice along shortest chains of moves, so that the largest load is small and few are moved."""

    def __init__(self, labels: _Labels, keepers: list[int | None]) -> None:
        self._labels = labels
        self._keepers = keepers
        self._wards: list[list[int]] = [[] for _ in range(labels.count)]
        self._looks_left = _LOOKS_MAX
        for one, keeper in enumerate(keepers):
            if keeper is not None:
                self._wards[keeper].append(one)
        self._load_max = max(labels.load_bound(), *map(len, self._wards))

    def complete(self) -> dict[str, str]:
        while True:
            self._take_room()
            left = [one for one, keeper in enumerate(self._keepers) if keeper is None]
            if all(self._move_along(one) for one in left):
                break
            self._load_max += 1
        names = self._labels.names
        return {names[one]: names[keeper] for one, keeper in enumerate(self._keepers) if keeper is not None}

    def _take_room(self) -> None:
        """Give whoever has no keeper the least loaded one that is allowed and has room, without moving others."""
        room: dict[Kind, list[int]] = {}
        for keeper in sorted(range(self._labels.count), key=lambda keeper: -len(self._wards[keeper])):
            free = self._load_max - len(self._wards[keeper])
            room.setdefault(self._labels.kind(keeper), []).extend([keeper] * free)
        room = {kind: found for kind, found in room.items() if found}
        for one, held in enumerate(self._keepers):
            if held is not None:
                continue
            for kind, found in room.items():
                at = next((at for at in range(-1, -1 - len(found), -1) if found[at] != one), None)
                if at is not None and self._labels.allows(one, found[at]):
                    self._give(one, found.pop(at))
                    if not found:
                        del room[kind]
                    break

    def _move_along(self, one: int) -> bool:
        """Give `one` a keeper, moving others where that is needed; False when all are full, or the search is long."""
        unseen = dict.fromkeys(self._in_order(one))
        asked_by: dict[int, int] = {}
        waiting = deque([one])
        while waiting:
            ward = waiting.popleft()
            self._looks_left -= len(unseen)
            if self._looks_left < 0:
                return False
            for keeper in [k for k in unseen if self._labels.allows(ward, k)]:
                del unseen[keeper]
                asked_by[keeper] = ward
                if len(self._wards[keeper]) < self._load_max:
                    self._shift(one, keeper, asked_by)
                    return True
                waiting.extend(self._wards[keeper])
        return False

    def _in_order(self, one: int) -> Iterator[int]:
        """The idle first; among equals those after `one`, so that neighbours do not all ask the same."""
        count = self._labels.count
        yield from sorted(range(count), key=lambda keeper: (len(self._wards[keeper]), (keeper - one) % count))

    def _shift(self, one: int, keeper: int, asked_by: Mapping[int, int]) -> None:
        while True:
            ward = asked_by[keeper]
            left = self._keepers[ward]
            self._give(ward, keeper)
            if ward == one:
                return
            assert left is not None
            keeper = left

    def _give(self, ward: int, keeper: int) -> None:
        old = self._keepers[ward]
        if old is not None:
            self._wards[old].remove(ward)
        self._keepers[ward] = keeper
        self._wards[keeper].append(ward)
