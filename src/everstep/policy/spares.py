"""Which hosts a job runs on: those in use, the spares beside them, and hosts that fail too often to be used gladly.

Rung 3 of the ladder asks here. A lemon (a host that failed repeatedly within 28 days, the window of Meta's lemon nodes,
arXiv 2410.21680) is replaced as soon as a better host is idle, and stays as the spare of last resort: a host that may
fail is worth more than none. Knows no clock: time comes with each call.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.commands import HostShare
from everstep.domain.ids import HostId, Rank

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareConfig:
    """Attributes:
    lemon_failures: so many failures of one host within the window make it a lemon; 0 turns the rule off, and spares
        are taken by name instead of by their failures.
    lemon_window_s: 28 days.
    waits_for_hosts: with too few hosts the job waits for one to join, instead of giving itself back.
    wait_s: how long it waits, at the start too.
    """

    lemon_failures: int = 3
    lemon_window_s: float = 28 * _DAY_S
    waits_for_hosts: bool = False
    wait_s: float = math.inf

    def __post_init__(self) -> None:
        assert self.lemon_failures >= 0
        assert self.lemon_window_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """`spare` is used in the place of `host`."""

    host: HostId
    spare: HostId


class HostPool:
    """Membership. The first `need` hosts by place, agent and name are used; those that join beyond are spares.

    Args:
        need: how many hosts an attempt takes.
    """

    def __init__(self, config: SpareConfig, *, need: int) -> None:
        self._config = config
        self._need = need
        self._agents: dict[HostId, HostId] = {}
        """Every host that is there, with the agent that speaks for it."""
        self._places: dict[HostId, int] = {}
        self._standing: dict[HostId, float] = {}
        """Where each agent wants to stand."""
        self._in_use: set[HostId] = set()
        self._idle: set[HostId] = set()
        self._vacated: list[HostId] = []
        """Hosts that left the set in use since the last `fill`."""
        self._workers: Counter[HostId] = Counter()
        """Workers in use, by agent."""
        self._failures: dict[HostId, deque[float]] = {}
        self._excluded_until_s: dict[HostId, float] = {}
        self.replacements: tuple[Replacement, ...] = ()
        """What the last `fill` changed."""

    def join(self, agent: HostId, hosts: Sequence[HostId], worker_count: int, *, place: int | None = None) -> None:
        """Hosts are there, or there again; `worker_count` counts all of them together, in equal parts."""
        self._standing[agent] = math.inf if place is None else place
        for host in hosts:
            if host in self._agents:
                continue
            self._agents[host] = agent
            self._places[host] = worker_count // len(hosts)
            self._idle.add(host)

    def lose(self, host: HostId) -> bool:
        """A host is gone, or an agent with all that it speaks for. Tells whether any of them was in use."""
        gone = [host] if host in self._agents else [h for h, agent in self._agents.items() if agent == host]
        was_in_use = False
        for lost in gone:
            was_in_use = self._vacate(lost) or was_in_use
            self._idle.discard(lost)
            del self._agents[lost]
        return was_in_use

    def clear(self) -> None:
        """Nobody is there any more: a new coordinator waits for all to join again. Failures stay known."""
        self._agents.clear()
        self._in_use.clear()
        self._idle.clear()
        self._vacated.clear()
        self._workers.clear()

    @property
    def is_enough(self) -> bool:
        return 0 < self._need <= len(self._agents)

    @property
    def lack(self) -> str:
        """Who is there while others are waited for, for a sentence."""
        names = ", ".join(sorted(self._agents)) or "nobody"
        return f"{len(self._agents)} of {self._need} hosts are here ({names})"

    def fill(self, at_s: float) -> bool:
        """Put idle hosts into free places, the best first; False, and nothing changes, when there are too few."""
        if not self.is_enough:
            return False
        missing = self._need - len(self._in_use)
        chosen = sorted(self._idle, key=lambda host: self._merit(host, at_s))[:missing]
        vacated = [host for host in self._vacated if host not in chosen]
        newcomers = [host for host in chosen if host not in self._vacated]
        for host in chosen:
            self._idle.discard(host)
            self._in_use.add(host)
            self._workers[self._agents[host]] += self._places[host]
        self.replacements = tuple(
            Replacement(host=host, spare=spare) for host, spare in zip(vacated, newcomers, strict=False)
        )
        self._vacated.clear()
        return True

    def shares(self) -> tuple[HostShare, ...]:
        """The ranks of each agent, by its place and name."""
        first, shares = 0, []
        for agent, count in sorted(self._workers.items(), key=lambda item: (self._standing[item[0]], item[0])):
            if count:
                shares.append(HostShare(host=agent, first_rank=Rank(first), count=count))
                first += count
        return tuple(shares)

    def failed(self, host: HostId, at_s: float) -> int:
        """Note that a host failed; gives how often it did within the window."""
        self._failures.setdefault(host, deque()).append(at_s)
        return self._failures_within(host, at_s)

    def exclude(self, host: HostId, at_s: float) -> bool:
        """Take a host out of use, if a better one is idle; False, and nothing changes, when none is."""
        is_better = any(not self._is_excluded(idle, at_s) for idle in self._idle)
        if not is_better or host not in self._in_use:
            return False
        self._excluded_until_s[host] = at_s + self._config.lemon_window_s
        self._vacate(host)
        self._idle.add(host)
        return True

    @property
    def in_use(self) -> frozenset[HostId]:
        return frozenset(self._in_use)

    def is_lemon(self, host: HostId, at_s: float) -> bool:
        limit = self._config.lemon_failures
        return 0 < limit <= self._failures_within(host, at_s)

    def _vacate(self, host: HostId) -> bool:
        if host not in self._in_use:
            return False
        self._in_use.discard(host)
        self._workers[self._agents[host]] -= self._places[host]
        self._vacated.append(host)
        return True

    def _merit(self, host: HostId, at_s: float) -> tuple[bool, int, float, HostId, HostId]:
        failures = self._failures_within(host, at_s) if self._config.lemon_failures else 0
        agent = self._agents[host]
        return self._is_excluded(host, at_s), failures, self._standing[agent], agent, host

    def _is_excluded(self, host: HostId, at_s: float) -> bool:
        return self._excluded_until_s.get(host, -1.0) > at_s or self.is_lemon(host, at_s)

    def _failures_within(self, host: HostId, at_s: float) -> int:
        times = self._failures.get(host)
        if times is None:
            return 0
        while times and times[0] < at_s - self._config.lemon_window_s:
            times.popleft()
        return len(times)


def spares_for(down_at_once: Sequence[int], *, availability: float) -> int:
    """How many spares a job needs, from how many hosts were down at once in the past, each sample equally long.

    The quantile of what was observed, bursts and slow repairs included. A Poisson pool of the same mean is too small:
    StepFun's trace has a 99th percentile of 31 hosts where Poisson says 17.

    Args:
        availability: the share of time in which the spares shall suffice, such as 0.99.
    """
    assert 0 < availability <= 1
    ordered = sorted(down_at_once)
    if not ordered:
        return 0
    rank = min(len(ordered) - 1, max(0, -int(-availability * len(ordered) // 1) - 1))
    return ordered[rank]
