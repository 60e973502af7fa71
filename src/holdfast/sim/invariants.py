"""The promises, checked at every step of a simulation. Each is written down here once more, independently of the core."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Incident
from holdfast.domain.orders import Prepare
from holdfast.sim.agent import Agent
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import (
    Command,
    Event,
    FindingArrived,
    GenerationChanged,
    IncidentChanged,
    Noted,
    Publish,
    Send,
)


@dataclass(slots=True)
class Ancestor:
    """A generation that was started: where its attempt branched off."""

    attempt: int
    from_attempt: int
    from_step: int


@dataclass(slots=True)
class Invariants:
    agents: dict[str, Agent]
    min_dp: int
    max_dp: int
    checkpoint_interval: int
    opened: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    ancestors: dict[int, Ancestor] = field(default_factory=dict)  # by attempt
    newest_attempt: int = 0
    prepared: dict[int, tuple[object, ...]] = field(
        default_factory=dict
    )  # generation → what every Prepare of it must say
    complete: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # (attempt, step) → positions saved
    blind_takeover: set[int] = field(
        default_factory=set
    )  # generations replaced while none of their nodes could be asked

    # ------------------------------------------------------------ what the core decides

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage="planned", generation=generation)):
                    self._full_mesh(generation)
                    self._restorable(generation)
                case Publish(record=GenerationChanged(stage="started", generation=generation)):
                    self._nothing_older_runs(generation, after)
                    self._branch(generation, before)
                case Publish(record=IncidentChanged(incident=incident)):
                    self.opened.add(incident.id)
                    if incident.closed:
                        self.closed.add(incident.id)
                        self._cheap_when_planned(incident)
                case Send(order=Prepare() as order):
                    self._same_generation_everywhere(order)
                case _:
                    pass
        if isinstance(event, FindingArrived):
            self._recorded(event, after, commands)
        self._no_incident_vanished(after)

    def _cheap_when_planned(self, incident: Incident) -> None:
        """A planned change costs no more than a checkpoint interval, unless a real fault struck it and it was planned again."""
        undisturbed = incident.new_generation == incident.generation + 1
        if incident.planned and undisturbed and incident.rework_steps > self.checkpoint_interval:
            raise Violation(
                f"{incident.kind} cost {incident.rework_steps} steps, the interval is {self.checkpoint_interval}"
            )

    def _full_mesh(self, generation: Generation) -> None:
        ranks = [rank for placement in generation.placements for rank in placement.ranks]
        if ranks != list(range(generation.mesh.world_size)):
            raise Violation(f"generation {generation.number}: ranks {ranks} are not the mesh {generation.mesh}")
        if len(set(generation.nodes)) != len(generation.nodes):
            raise Violation(f"generation {generation.number} has a node twice: {generation.nodes}")
        if any(p.nproc > self.agents[p.node].capacity for p in generation.placements):
            raise Violation(f"generation {generation.number} has more ranks on a node than fit")
        if not self.min_dp <= generation.mesh.dp <= self.max_dp:
            raise Violation(
                f"generation {generation.number} runs dp {generation.mesh.dp}, outside {self.min_dp} … {self.max_dp}"
            )

    def _restorable(self, generation: Generation) -> None:
        """The elected step lies on the lineage, and every position of the mesh was saved at it."""
        point = generation.restore
        if point.step == 0:
            return
        attempt, limit = self.newest_attempt, None
        while attempt != point.attempt:
            if attempt not in self.ancestors:
                raise Violation(
                    f"generation {generation.number} restores attempt {point.attempt}, which is not its ancestor"
                )
            ancestor = self.ancestors[attempt]
            attempt, limit = ancestor.from_attempt, ancestor.from_step
        if limit is not None and point.step > limit:
            raise Violation(f"restores step {point.step} of attempt {attempt}, which was given up after step {limit}")
        known = self.complete.get((point.attempt, point.step), set())
        missing = set(range(generation.mesh.replica_size)) - known
        if missing:
            raise Violation(
                f"restores step {point.step} of attempt {point.attempt}: nobody ever saved positions {sorted(missing)}"
            )

    def saved(self, attempt: int, step: int, position: int) -> None:
        self.complete.setdefault((attempt, step), set()).add(position)

    def _nothing_older_runs(self, generation: Generation, after: State) -> None:
        """START means: every node that could be asked has stopped what it ran before."""
        for agent in self.agents.values():
            node = after.nodes.get(agent.name)
            if node is None or not node.connected or not agent.session or agent.workers is None:
                continue
            if agent.workers.started and agent.workers.order.generation < generation.number:
                older = agent.workers.order.generation
                raise Violation(
                    f"generation {generation.number} starts, and {agent.name} still runs generation {older}"
                )

    def _branch(self, generation: Generation, before: State) -> None:
        self.ancestors[generation.attempt] = Ancestor(
            generation.attempt, generation.restore.attempt, generation.restore.step
        )
        self.newest_attempt = generation.attempt
        job = next(iter(before.jobs.values()))
        if job.running is not None and not any(self.agents[node].session for node in job.running.nodes):
            self.blind_takeover.add(job.running.number)

    def _same_generation_everywhere(self, order: Prepare) -> None:
        terms = (order.attempt, order.mesh, order.nnodes, order.restore_step)
        if self.prepared.setdefault(order.generation, terms) != terms:
            raise Violation(
                f"two different generations {order.generation}: {terms} and {self.prepared[order.generation]}"
            )

    def _recorded(self, event: FindingArrived, after: State, commands: tuple[Command, ...]) -> None:
        """A finding is in an incident, in a node's suspicion, or an operator can read why it was not."""
        finding = event.finding
        incidents = (*after.incidents.values(), *after.closed)
        if any(finding.id in incident.findings for incident in incidents):
            return
        if any(node.suspicion is not None and node.suspicion.id == finding.id for node in after.nodes.values()):
            return
        if any(isinstance(c, Publish) and isinstance(c.record, Noted) for c in commands):
            return
        node = after.nodes.get(finding.node)
        if node is not None and (node.lost or node.condemned):
            return
        raise Violation(f"the finding {finding.id} ({finding.summary}) left no trace")

    def _no_incident_vanished(self, after: State) -> None:
        if vanished := self.opened - self.closed - set(after.incidents):
            raise Violation(f"incidents vanished: {sorted(vanished)}")

    # ------------------------------------------------------------ what really happens

    def at_most_one_runs(self, whole: list[int]) -> None:
        """`whole`: generations of which every rank is alive and running, that could finish a step now."""
        seen = [generation for generation in whole if generation not in self.blind_takeover]
        if len(seen) > 1:
            raise Violation(f"generations {seen} could all make progress")
