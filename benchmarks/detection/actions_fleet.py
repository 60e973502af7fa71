"""A job of three nodes for suite `actions`: signals pass through diagnostics' engine and the supervisor's core with the default
policy, and agents execute the orders.

For every decision it is checked that no GPU is reset and no machine is booted under its workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from benchmarks.detection.deciding import answer
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.incidents import ActionKind, Incident, IncidentState
from holdfast.domain.job import CheckpointSpec, HangSpec, JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import (
    CheckpointNow,
    Hello,
    Inventory,
    OrderDone,
    Prepare,
    RanksStepping,
    RebootNode,
    Report,
    ResetGpu,
)
from holdfast.domain.signals import ClockTick, GenerationStarted, NodeConnected, Signal
from holdfast.policy import ACTIONS, Effect
from holdfast.supervisor.core import Job, State, step
from holdfast.supervisor.protocol import (
    Evaluate,
    Event,
    FindingArrived,
    IncidentChanged,
    JobPhase,
    JobSubmitted,
    NodeReported,
    Publish,
    StepsCompleted,
    TimerFired,
)

JOB = "job"
NODES = 3
T0 = 1_700_000_000.0
STEP_S = 1.0
STEPS = 1_000_000  # of the job: eleven days at one second per step
_LIFE = "a"


@cache
def _catalogue() -> xid.Catalogue:
    return xid.load()


@dataclass(slots=True)
class Fleet:
    """`min_dp`: of the job's three replicas. Nodes are `n0` … `n2`, the spare is `n3`."""

    spares: int = 0
    resets_gpus: bool = True
    reboots: bool = False
    min_dp: int = 1
    now: float = T0
    state: State = field(default_factory=State)
    engine: Engine = field(default_factory=lambda: Engine(detectors.standard(_catalogue())))
    found: list[Finding] = field(default_factory=list)
    # incidents as they were when an action was decided for them, in order
    decided: list[Incident] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)  # nodes, in order
    boots: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # violations of rules that must always hold
    _seq: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for i in range(NODES + self.spares):
            self._report(f"n{i}", Hello(self._facts(f"n{i}")))
        mesh = Mesh.of({"dp": NODES})
        spec = JobSpec(
            JOB, LaunchSpec("/train.py"), NODES, 1, mesh, self.min_dp, NODES, CheckpointSpec(10, 2), steps=STEPS
        )
        self._core(JobSubmitted(self.now, spec, "token"))
        self.settle()
        for i in range(NODES + self.spares):
            self.see(NodeConnected(f"n{i}", self.now, _LIFE))
        for place, name in enumerate(self.nodes()):
            self.see(GenerationStarted(name, self.now, JOB, 1, mesh, (place,), HangSpec()))
        self.now += 60.0
        self.train(20, save=True)

    # ------------------------------------------------------------ diagnostics

    def see(self, *signals: Signal) -> None:
        """Pass signals of agents, dated now, to the engine."""
        for signal in signals:
            folded = self.engine.fold(signal, self.now)
            for record in folded.steps:
                duration_s = record.ended_at - record.started_at
                self._core(
                    StepsCompleted(self.now, JOB, record.generation, record.step, record.ended_at, 1, duration_s)
                )
            for finding in folded.findings:
                self.find(finding)
        self._timers()

    def find(self, finding: Finding) -> None:
        self.found.append(finding)
        self._core(FindingArrived(self.now, finding))

    def pass_(self, seconds: float, tick_s: float = 0.5) -> None:
        """Let time pass: diagnostics' clock ticks, and timers of the supervisor fire."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(until, self.now + tick_s)
            self.see(ClockTick(self.now))
            self._timers()

    def wait(self, seconds: float) -> None:
        """Let time pass without clock ticks of diagnostics."""
        until = self.now + seconds
        while due := [(when, name) for name, when in self.state.timers.items() if when <= until]:
            when, timer = min(due, key=lambda each: each[0])
            self.now = max(self.now, when)
            self._core(TimerFired(self.now, timer))
        self.now = until

    # ------------------------------------------------------------ the supervisor

    @property
    def job(self) -> Job:
        return self.state.jobs[JOB]

    def nodes(self) -> tuple[str, ...]:
        assert self.job.generation is not None
        return self.job.generation.nodes

    @property
    def running(self) -> bool:
        return self.job.phase is JobPhase.RUNNING

    def _core(self, event: Event) -> None:
        self.state, commands = step(self.state, event)
        for command in commands:
            match command:
                case Publish(record=IncidentChanged(incident=incident)) if incident.state is IncidentState.DECIDED:
                    if "together with" not in incident.decided_by:
                        self.decided.append(incident)
                case Evaluate() if command.incident in self.state.incidents:
                    self._core(answer(self.state, command, self.now))
                case _:
                    pass

    def _timers(self) -> None:
        while due := [(when, name) for name, when in self.state.timers.items() if when <= self.now]:
            self._core(TimerFired(self.now, min(due, key=lambda each: each[0])[1]))

    # ------------------------------------------------------------ agents

    def _facts(self, node: str) -> NodeFacts:
        return NodeFacts(
            node, _LIFE, node, "10.0.0.1", "", 1, f"{node}:9000", 1, "/var/holdfast", "/dev/kmsg",
            resets_gpus=self.resets_gpus, boot_id="boot1", reboots=self.reboots,
        )  # fmt: skip

    def _report(self, node: str, report: Report) -> None:
        self._seq[node] += 1
        self._core(NodeReported(self.now, node, _LIFE, self._seq[node], report))

    def settle(self) -> None:
        """Let agents answer all orders, and the orders that follow, until the job runs or no order is left."""
        for _ in range(10_000):
            todo = next(iter(self.state.sends()), None)
            if todo is None:
                break
            order = todo.order
            if isinstance(order, ResetGpu):
                self.resets.append(todo.node)
            if isinstance(order, RebootNode):
                self.boots.append(todo.node)
            if isinstance(order, ResetGpu | RebootNode) and self.state.live_on(self.state.nodes[todo.node]):
                self.wrong.append(f"{type(order).__name__} of {todo.node} under its workers")
            self.now += 0.01
            if isinstance(order, CheckpointNow):
                self._report(todo.node, OrderDone(todo.command_id, True, "", at=self.now))
                self.train(order.at_step, save=True)
                continue
            first = isinstance(order, Prepare) and order.placement.first_rank == 0
            self._report(
                todo.node, OrderDone(todo.command_id, True, "", f"{todo.node}:29500" if first else "", self.now)
            )
        else:
            raise AssertionError("the supervisor sends orders without end")
        if self.job.phase is JobPhase.STARTING:
            assert self.job.generation is not None
            for place in self.job.generation.placements:
                self._report(
                    place.node, RanksStepping(JOB, self.job.generation.number, tuple(place.ranks), 1, self.now)
                )

    def train(self, step_number: int, *, save: bool = False) -> None:
        """Let every rank finish all steps up to this one."""
        if step_number > self.job.progress.step:
            self.now += 0.5
            self._core(StepsCompleted(self.now, JOB, self.job.number, step_number, self.now, 10, STEP_S))
        generation = self.job.generation
        if not save or generation is None:
            return
        hosts = generation.nodes
        for place, copy_on in zip(generation.placements, (*hosts[1:], hosts[0]), strict=True):
            shards = tuple(
                ShardRecord(
                    ShardKey(generation.attempt, step_number, rank), generation.mesh, "memory", 1,
                    f"{step_number}@{generation.mesh.position_of(rank)}", place.node,
                )
                for rank in place.ranks
            )  # fmt: skip
            for node in {place.node, copy_on}:
                held = self.state.nodes[node].inventory.get(JOB, ())
                self._report(node, Inventory(JOB, (*held, *shards)))

    # ------------------------------------------------------------ results

    def actions(self) -> list[ActionKind]:
        """The decided actions that change the run or let it wait, in order, without actions that leave the run as it is."""
        kinds = [(incident.action.kind, incident.planned) for incident in self.decided if incident.action is not None]
        return [
            kind
            for kind, planned in kinds
            if ACTIONS[kind].effect in (Effect.CHANGE, Effect.END) or (kind is ActionKind.WAIT and not planned)
        ]
