"""The hosts of the coarse world: names, which agent speaks for whom, who is in use or idle, and their ranks.

Follows the policy's word on who is in use, and never chooses. Knows no time.
"""

from collections.abc import Sequence

from everstep.domain.commands import HostShare
from everstep.domain.events import HostJoined
from everstep.domain.ids import HostId, Rank
from everstep.sim.scenario import Scenario


class Fleet:
    """All hosts by number, as evenly as possible behind the agents: those that the job takes first, then the spares."""

    def __init__(self, scenario: Scenario) -> None:
        total = scenario.host_count + scenario.spares
        self.needed_count = scenario.host_count
        self.gpus_per_host = scenario.gpus_per_host
        self.agents = [HostId(f"pod{number:03d}") for number in range(scenario.agents)]
        self.hosts = [HostId(f"host{number:05d}") for number in range(total)]
        self._agent = {host: self.agents[number * scenario.agents // total] for number, host in enumerate(self.hosts)}
        self.place: dict[HostId, int] = {}
        """Of a host among its agent's."""
        counts = dict.fromkeys(self.agents, 0)
        for host in self.hosts:
            agent = self._agent[host]
            self.place[host] = counts[agent]
            counts[agent] += 1

    def host(self, number: int) -> HostId:
        return self.hosts[number]

    def agent_of(self, host: HostId) -> HostId:
        return self._agent[host]

    def joins(self) -> list[HostJoined]:
        """Every agent reports for duty with all its hosts."""
        members: dict[HostId, list[HostId]] = {agent: [] for agent in self.agents}
        for host in self.hosts:
            members[self._agent[host]].append(host)
        return [self.join(agent, tuple(hosts), at_s=0.0) for agent, hosts in members.items()]

    def join(self, agent: HostId, members: tuple[HostId, ...], *, at_s: float) -> HostJoined:
        count = len(members) * self.gpus_per_host
        return HostJoined(at_s=at_s, host=agent, worker_count=count, address="simulated", members=members)


class Duty:
    """Who of a fleet is in use, idle or away."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._in_use = set(fleet.hosts[: fleet.needed_count])
        self._unused = set(fleet.hosts[fleet.needed_count :])
        self._present = set(fleet.hosts)
        self._first_rank: dict[HostId, int] = {}
        self.working: list[HostId] = list(fleet.agents)
        """Agents with a share of the present attempt."""

    def is_in_use(self, host: HostId) -> bool:
        return host in self._in_use and host in self._present

    def is_idle(self, host: HostId) -> bool:
        return host in self._present and host not in self._in_use

    def rank_shares(self, shares: Sequence[HostShare]) -> None:
        self.working = [share.host for share in shares]
        self._first_rank = {share.host: share.first_rank for share in shares}

    def rank(self, number: int) -> Rank:
        """The first rank of a host in use, whose ranks follow its place among its agent's."""
        fleet = self.fleet
        host = fleet.host(number)
        agent = fleet.agent_of(host)
        unused = sum(1 for other in self._unused if other < host and fleet.agent_of(other) == agent)
        return Rank(self._first_rank.get(agent, 0) + (fleet.place[host] - unused) * fleet.gpus_per_host)

    def replace(self, host: HostId, spare: HostId) -> None:
        self._in_use.discard(host)
        self._unused.add(host)
        self._in_use.add(spare)
        self._unused.discard(spare)

    def leave(self, host: HostId) -> bool:
        """For a repair; False when it was away already."""
        was_present = host in self._present
        self._present.discard(host)
        return was_present

    def come_back(self, host: HostId) -> None:
        self._present.add(host)
