"""What the agents and replicators of a world reach of one another, with the promises about copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from holdfast.domain.orders import RanksStepping, Report
from holdfast.replicator.view import Held, View
from holdfast.sim.agent import Agent
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.durability import keeps_up
from holdfast.sim.replicator import Replicator
from holdfast.sim.retention import keep_a_whole_step
from holdfast.sim.store import Store
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.training import Training
from holdfast.sim.truth import Truth
from holdfast.sim.world import Violation, World


class Neighbourhood(ABC):
    """The part of `agent.Surroundings` that worlds have in common. Without changes, no machine needs a reset or a boot."""

    world: World
    agents: dict[str, Agent]
    supervisor: Supervisor
    truth: Truth
    diagnostics: Diagnostics
    store: Store | None = None
    sharded = False  # over dp

    @abstractmethod
    def trainings(self) -> Iterable[Training]: ...

    def workers_changed(self, agent: Agent) -> None:
        self.truth.changed(agent)
        for training in self.trainings():
            training.changed(agent)
        self.diagnostics.changed(agent)

    def gpus_reset(self, agent: Agent, failure: str) -> None:
        raise Violation(f"a GPU of {agent.name} is reset, and none had a fault that needs it")

    def booting(self, agent: Agent) -> None:
        raise Violation(f"{agent.name} is booted, and nothing was wrong with it")

    def failed_tests(self, agent: Agent) -> None:
        raise Violation(f"{agent.name} fails its tests, and nothing was wrong with it")

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
