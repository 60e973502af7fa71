"""The promises about findings: each fault leads to the right finding, incident, action and first step, and no finding blames a
node or a rank that is healthy.

The simulator records each fault when it happens. A finding that names a node must name one with a fault of its kind; the rank
must be that of the fault. A fault must be found within the time of its kind, unless something else ended the matter before: the
generation was stopped, the agent ended, its telemetry was cut, diagnostics was down, or the finding was lost on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Incident
from holdfast.sim.agent import Agent
from holdfast.sim.workers import Workers
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import (
    Command,
    Event,
    FindingArrived,
    GenerationChanged,
    GenerationStage,
    IncidentChanged,
    Publish,
)

OF_WORKERS = frozenset({FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION})
# Time for a finding, by kind: detection takes less while steps are known and other nodes report.
WITHIN_S = {
    FindingKind.WORKER_CRASH: 1.5,
    FindingKind.HANG: 75.0,
    FindingKind.NODE_LOST: 22.0,
    FindingKind.GPU_ERROR: 1.5,
    FindingKind.MAINTENANCE: 1.5,
}
RECONNECTED_S = 2.5  # an agent that had no stream until this long ago may report a fault late
CONTACT_S = 25.0  # a node that had no contact until this long ago may be reported as lost
_GRAVE = (Severity.ERROR, Severity.FATAL)


@dataclass(eq=False, slots=True)
class Fault:
    kind: FindingKind
    agent: Agent
    life: int
    at: float
    workers: Workers | None  # of the generation that the fault belongs to
    rank: int | None = None
    found: str = ""  # id of its finding
    excused: bool = False  # something else may have ended the matter

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.kind}{rank} on {self.agent.name} at {self.at - 1000.0:.3f} s"


@dataclass(slots=True)
class Truth:
    world: World
    agents: Mapping[str, Agent]
    faults: dict[str, list[Fault]] = field(default_factory=dict)  # by node
    blind_from: float = 0.0  # diagnostics was down or frozen from then
    blind_until: float = 0.0  # … until then
    # (job, generation, rank) that ended because others had
    dragged: set[tuple[str, int, int]] = field(default_factory=set)
    contact_lost: dict[str, float] = field(default_factory=dict)  # node → the last time at which its stream was broken
    unheard_at: dict[str, float] = field(default_factory=dict)  # node → the last time at which it had no stream
    reported: dict[str, tuple[Finding, float]] = field(default_factory=dict)  # by id, with the time of the report
    runs: dict[tuple[str, str], float] = field(default_factory=dict)  # (job, token) of a submission → when it began
    started: set[tuple[str, int]] = field(default_factory=set)  # (job, generation) that were started
    opened: dict[str, Finding] = field(default_factory=dict)  # incident → the finding that opened it

    # ------------------------------------------------------------ faults

    def begins(self, kind: FindingKind, agent: Agent, rank: int | None = None, *, expected: bool = True) -> None:
        """Record a fault that begins now. `expected`: it must be found."""
        fault = Fault(kind, agent, agent.life, self.world.now, agent.workers, rank)
        self.faults.setdefault(agent.name, []).append(fault)
        fault.excused = not expected or self.world.now < self.blind_until or self.world.loss > 0
        fault.excused |= agent.telemetry_cut or not agent.alive or self._is_unheard(agent.name)
        if not fault.excused:
            self.world.after(WITHIN_S[kind], lambda: self._is_due(fault))

    def drags(self, agent: Agent, rank: int) -> None:
        """Record that a rank ends because another rank or node has. It is not at fault, but its process is dead."""
        assert agent.workers is not None
        order = agent.workers.order
        self.dragged.add((order.job, order.generation, rank))

    def out_of_contact(self, agent: Agent) -> None:
        """Record that the node's stream breaks, or that its agent ends."""
        self.contact_lost[agent.name] = self.world.now
        for fault in self.faults.get(agent.name, ()):
            if fault.kind is not FindingKind.NODE_LOST:
                fault.excused = True

    def unheard(self, node: str) -> None:
        """Record that the node has no stream."""
        self.unheard_at[node] = self.world.now

    def blind(self, until: float) -> None:
        """Record that diagnostics does not run until `until`, and may know less than before."""
        if self.world.now > self.blind_until:
            self.blind_from = self.world.now
        self.blind_until = max(self.blind_until, until)
        for faults in self.faults.values():
            for fault in faults:
                fault.excused = True

    def lost(self, node: str) -> None:
        """Record that a signal of the node, or a finding about it, is lost."""
        for fault in self.faults.get(node, ()):
            fault.excused = True

    def changed(self, agent: Agent) -> None:
        """Handle a change of the workers: faults of workers that were stopped or replaced need no finding any more."""
        if agent.workers is not None:
            self.runs.setdefault((agent.workers.order.job, agent.workers.order.token), self.world.now)
        for fault in self.faults.get(agent.name, ()):
            if fault.kind in (FindingKind.GPU_ERROR, FindingKind.NODE_LOST) or fault.workers is None:
                continue
            if agent.workers is not fault.workers:
                fault.excused = True

    def _is_due(self, fault: Fault) -> None:
        if fault.found or fault.excused or self._is_explained(fault):
            return
        raise Violation(f"no finding about the {fault} within {WITHIN_S[fault.kind]:g} s")

    def _is_explained(self, fault: Fault) -> bool:
        """Whether another fault of the same generation was found, or has ended the generation on other nodes: faults that
        follow the first of a generation are consequences, or cannot be reported from them."""
        if fault.workers is None:
            return fault.kind is FindingKind.NODE_LOST
        if fault.kind is FindingKind.NODE_LOST and not fault.workers.started:
            return True  # diagnostics knows of no ranks on the node
        order = fault.workers.order
        began = self.runs[order.job, order.token]
        if any(job == order.job and at > began for (job, _), at in self.runs.items()):
            return True  # the job was submitted again
        # Generations of an earlier run under this name say nothing about this one.
        if any(
            f.job == order.job and f.generation >= order.generation and f.severity in _GRAVE and at >= began
            for f, at in self.reported.values()
        ):
            return True
        others = (agent.workers.order for agent in self.agents.values() if agent.workers is not None)
        return any((o.job, o.token) == (order.job, order.token) and o.generation > order.generation for o in others)

    # ------------------------------------------------------------ findings

    def found(self, finding: Finding) -> None:
        """Check a finding when a detector reports it."""
        if finding.repeat:
            return
        self.world.say(f"diagnostics: {finding.severity} {finding.id}: {finding.summary}")
        self.reported[finding.id] = finding, self.world.now
        for fault in self.faults.get(finding.node, ()):
            same = fault.kind is finding.kind or (fault.kind in OF_WORKERS and finding.kind in OF_WORKERS)
            if same and fault.rank in (None, finding.rank):
                fault.found = fault.found or finding.id
        if finding.kind is FindingKind.HOST_PRESSURE and not finding.node:
            self._all_at_once(finding)
        if finding.node and finding.severity is not Severity.INFO and (why := self._is_wrong(finding)):
            raise Violation(f"the {finding.severity} {finding.id} blames {finding.node}: {why}")

    def _all_at_once(self, finding: Finding) -> None:
        """Diagnostics lost contact with most nodes at once, said so, and names no node until their time to return is over: its
        own network looks the same."""
        for faults in self.faults.values():
            for fault in faults:
                if fault.kind is FindingKind.NODE_LOST and fault.at > finding.since - CONTACT_S:
                    fault.excused = True

    def _is_wrong(self, finding: Finding) -> str:
        """Return why the finding is wrong; empty if it is right."""
        mine = self.faults.get(finding.node, [])
        match finding.kind:
            case kind if kind in OF_WORKERS:
                return self._wrong_rank(finding, [fault for fault in mine if fault.kind in OF_WORKERS])
            case FindingKind.HANG:
                if finding.rank is not None and (finding.job, finding.generation, finding.rank) in self.dragged:
                    return ""  # the root may have been forgotten with an earlier run of the job
                own = [fault for fault in mine if fault.kind is FindingKind.HANG or fault.kind in OF_WORKERS]
                return "" if _lost_with_node(finding, mine) else self._wrong_rank(finding, own)
            case FindingKind.NODE_LOST:
                agent, lost_at = self.agents[finding.node], self.contact_lost.get(finding.node)
                if lost_at is None and agent.alive and agent.life == 1:
                    return "it has never been out of contact"
                away = not agent.alive or agent.telemetry_cut or finding.evidence["incarnation"] != agent.incarnation
                away |= self._is_unheard(finding.node)
                if not away and (lost_at is None or self.world.now > self._reported_until(lost_at)):
                    return "it has had contact for long"
                return ""
            case FindingKind.GPU_ERROR | FindingKind.MAINTENANCE:
                return "" if any(fault.kind is finding.kind for fault in mine) else "nothing was wrong with it"
            case _:
                return "nothing of this kind was wrong with any node"

    def _is_unheard(self, node: str) -> bool:
        """Whether the node had no stream until a moment ago."""
        return self.world.now < self.unheard_at.get(node, -inf) + RECONNECTED_S

    def _reported_until(self, lost_at: float) -> float:
        """Until when a node that was out of contact at `lost_at` may be reported as lost: diagnostics that was frozen meanwhile
        learns afterwards what has happened."""
        until = lost_at + CONTACT_S
        return self.blind_until + CONTACT_S if self.blind_from <= until and lost_at <= self.blind_until else until

    def _wrong_rank(self, finding: Finding, faults: list[Fault]) -> str:
        for fault in faults:
            order = fault.workers.order if fault.workers is not None else None
            if order is not None and (order.job, order.generation, fault.rank) == (
                finding.job,
                finding.generation,
                finding.rank,
            ):
                return ""
        return f"its rank {finding.rank} of generation {finding.generation} had no fault of its own"

    # ------------------------------------------------------------ incidents

    def folded(self, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        """Check the incidents that follow from findings."""
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage=GenerationStage.STARTED, job=job, generation=generation)):
                    self.started.add((job, generation.number))
                case Publish(record=IncidentChanged(incident=incident)):
                    if isinstance(event, FindingArrived) and incident.findings == (event.finding.id,):
                        self._opens(incident, event.finding)
                    if incident.closed:
                        self._ends(incident, after)
                case _:
                    pass

    def _opens(self, incident: Incident, finding: Finding) -> None:
        self.opened.setdefault(incident.id, finding)
        if (incident.kind, incident.node) != (finding.kind, finding.node):
            raise Violation(
                f"{incident.id} is about {incident.kind} on {incident.node!r}, and the finding that opened it, {finding.id}, "
                f"about {finding.kind} on {finding.node!r}"
            )

    def _ends(self, incident: Incident, after: State) -> None:
        """An incident of a running job ends after an action; if the action needs another generation, after its first step."""
        finding, job = self.opened.pop(incident.id, None), after.jobs.get(incident.job)
        if finding is None or job is None or job.phase.finished or finding.severity not in _GRAVE:
            return
        if incident.action is None and not incident.outcome:
            raise Violation(f"{incident.id} is closed, and nothing was done about {finding.id}")
        if incident.new_generation and (incident.job, incident.new_generation) not in self.started:
            number = job.generation.number if job.generation is not None else 0
            if number <= incident.new_generation:
                raise Violation(
                    f"{incident.id} is closed, and its generation {incident.new_generation} was not started"
                )


def _lost_with_node(finding: Finding, faults: list[Fault]) -> bool:
    """Whether the agent of the node was lost, and the rank with it. If there is no other node, nobody acts on that."""
    lost = (
        fault.workers.order for fault in faults if fault.kind is FindingKind.NODE_LOST and fault.workers is not None
    )
    return any(
        (order.job, order.generation) == (finding.job, finding.generation) and finding.rank in order.placement.ranks
        for order in lost
    )
