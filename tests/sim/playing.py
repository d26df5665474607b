"""Wires the real loops to a simulated world and plays one job; no test of its own."""

from dataclasses import dataclass

from everstep.domain.codec import is_command
from everstep.domain.commands import Command, FinishJob
from everstep.domain.events import Event
from everstep.policy.recovery import Job
from everstep.runtime.agent import Agent, AgentConfig, AgentPorts
from everstep.runtime.coordinator import Coordinator, CoordinatorPorts
from everstep.sim.job import SimConfig, make_world, play


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a simulated job left behind."""

    end: FinishJob | None
    bodies: list[Event | Command]

    def of(self, *kinds: type) -> list:  # type: ignore[type-arg]
        return [body for body in self.bodies if isinstance(body, kinds)]


def play_job(config: SimConfig, *, seed: int) -> Played:
    world = make_world(config, seed=seed)
    agents = []
    for host, (workers, view, line) in world.hosts.items():
        agent_config = AgentConfig(
            host=host, address=host, worker_count=config.ranks_per_host, report_s=1.0, stall=config.stall
        )
        ports = AgentPorts(workers=workers, pages=view, evidence=view, channel=line, clock=world.clock)
        agent = Agent(agent_config, ports)
        agent.report_for_duty()
        agents.append(agent)
    coordinator = Coordinator(
        Job(config.recovery),
        CoordinatorPorts(ledger=world.ledger, channel=world.switchboard, clock=world.clock, listen=lambda _body: None),
    )
    end = play(world, config, take=coordinator.take, turns=[agent.turn for agent in agents])
    return Played(end=end, bodies=[entry.body for entry in world.ledger.entries])


def replayed_commands(config: SimConfig, bodies: list[Event | Command]) -> list[Command]:
    """The commands that a new machine gives for the ledger's events."""
    job = Job(config.recovery)
    return [command for body in bodies if not is_command(body) for command in job.handle(body)]  # type: ignore[arg-type]
