"""What the agents and replicators of a world reach of one another, with the promises about copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.domain.orders import RanksStepping, Report
from holdfast.replicator.view import Held, View
from holdfast.sim.agent import Agent
from holdfast.sim.durability import keeps_up
from holdfast.sim.replicator import Replicator
from holdfast.sim.retention import keep_a_whole_step
from holdfast.sim.store import Store
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.world import World


class Neighbourhood:
    """The part of `agent.Surroundings` that all worlds have in common."""

    world: World
    agents: dict[str, Agent]
    supervisor: Supervisor
    store: Store | None

    def deliver(self, agent: Agent, session: int, seq: int, report: Report) -> None:
        self.supervisor.deliver(agent, session, seq, report)

    def beat(self, agent: Agent, session: int, first_steps: Sequence[RanksStepping]) -> None:
        self.supervisor.beat(agent, session, first_steps)

    def neighbour(self, node: str) -> Agent | None:
        return self.agents.get(node)

    def replicator_of(self, node: str) -> Replicator | None:
        agent = self.agents.get(node)
        return agent.replicator if agent is not None else None

    def is_deleting(self, job: str, view: Callable[[], View], deleted: Held, node: str) -> None:
        keep_a_whole_step([agent.replicator for agent in self.agents.values()], job, view, deleted, node)

    def has_saved(self, job: str, node: str) -> None:
        replicators = {name: agent.replicator for name, agent in self.agents.items()}
        keeps_up(replicators, self.store, job, node, self.world.now)
