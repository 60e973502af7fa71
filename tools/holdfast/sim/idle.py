"""Jobs on a simulated fleet with idle nodes, which test the network between them.

As `several`, but with more nodes, some of which have a bad network for a while. `LinkPromises` are checked in addition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from random import Random

from holdfast.sim.links import BACK_S, RULES, Bad, LinkPromises, Links
from holdfast.sim.several import CONFIG, SeveralJobs
from holdfast.sim.sharing import FAULTS_END_S
from holdfast.sim.supervisor import Observer
from holdfast.sim.watched import Step
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State, step
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import Command, Event
from holdfast.supervisor.return_rules import ReturnRules

IDLE = (7, 14)
BAD_S = (60.0, 180.0)
LOSS = 0.02  # fraction of lost messages, in every third world
END_S = 1000.0 + FAULTS_END_S + BAD_S[1] + BACK_S + 40.0


@dataclass(slots=True)
class _Both:
    first: Observer
    second: Observer

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        self.first.folded(before, event, after, commands)
        self.second.folded(before, event, after, commands)


class IdleLinks(SeveralJobs):
    def __init__(self, seed: int, *, tracing: bool = False, fold: Step = step) -> None:
        chance = Random(f"links of {seed}")
        config = replace(
            CONFIG,
            links=RULES,
            returns=ReturnRules(hold_s=4.0, hold_s_max=16.0, probation_s=40.0),
            offenders=OffenderRules(limit=inf, together_s=0.2),
        )
        super().__init__(seed, tracing=tracing, fold=fold, config=config, more=chance.randint(*IDLE))
        names = list(self.agents)
        zones = ("a",) if chance.random() < 0.6 else ("a", "b")
        for index, agent in enumerate(self.agents.values()):
            agent.zone = zones[index % len(zones)]
        self.links = Links(chance, zones={name: agent.zone for name, agent in self.agents.items()})
        for name in chance.sample(names, chance.choice((0, 1, 1, 1, 2))):
            since = 1000.0 + chance.uniform(0.0, FAULTS_END_S)
            self.links.bad.append(Bad(name, since, since + chance.uniform(*BAD_S), chance.random() < 0.6))
        if chance.random() < 0.3:
            bad = {each.node for each in self.links.bad}
            self.links.pair = frozenset(chance.sample([name for name in names if name not in bad], 2))
        if len(zones) > 1 and chance.random() < 0.5:
            self.links.zones_until = 1000.0 + FAULTS_END_S + chance.uniform(10.0, 100.0)
        for agent in self.agents.values():
            agent.links = self.links
        self.promises = LinkPromises(self.links, peace_at=1000.0 + FAULTS_END_S + 40.0)
        self.supervisor.observer = _Both(self.supervisor.observer, self.promises)
        self.world.loss = LOSS if seed % 3 == 0 else 0.0

    def run(self) -> tuple[float, int, int]:
        found = super().run()
        self.world.run(END_S, lambda: False)
        out = {
            name: node.unschedulable_reason
            for name, node in self.supervisor.committed.nodes.items()
            if node.unschedulable_reason and not (node.removal is not None and node.removal.final)
        }
        if out:
            raise Violation(f"every network has been good for long, and nodes are out of service: {out}")
        return found

    def _look(self) -> None:
        super()._look()
        self.promises.look(self.supervisor.committed, self.world.now)
        if self.world.now > 1000.0 + FAULTS_END_S:
            self.world.loss = 0.0
