"""A hand-driven fleet around the real core: agents that answer on request, findings on demand, time that only tests move.

fleet = Fleet(4)
fleet.submit(job(dp=3))
fleet.run()                                   # every order is answered, every rank steps
fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
assert fleet.job.phase is JobPhase.PREPARING
"""

from __future__ import annotations

from dataclasses import replace

from reread import Reread

from holdfast.domain import old_evidence
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import CheckpointSpec, JobSpec, LaunchSpec, LimitSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import TERMINATION, Check, NodeFacts, Notice, Preflight, RunningWorker, WorkerEnded
from holdfast.domain.orders import (
    Announced,
    CheckpointNow,
    Hello,
    Inventory,
    Order,
    OrderDone,
    Prepare,
    RanksFinished,
    RanksStepping,
    Report,
    Start,
    StepReached,
    Tested,
    WorkersChanged,
)
from holdfast.policy import JobView, default
from holdfast.supervisor.core import Job, State, step, view
from holdfast.supervisor.protocol import (
    Answer,
    Command,
    Evaluate,
    Event,
    FindingArrived,
    FindingJudged,
    JobPhase,
    JobSubmitted,
    NodeGone,
    NodeReported,
    Noted,
    PolicyAnswered,
    Publish,
    Record,
    RequestReplacement,
    Send,
    SendNotification,
    StepsCompleted,
    StepSeen,
    TimerFired,
)

JOB = "job"


def job(
    dp: int = 3, pp: int = 1, *, nproc: int = 1, min_dp: int = 1, name: str = JOB, interval: int = 10, **limits: float
) -> JobSpec:
    mesh = Mesh.of({"dp": dp, "pp": pp} if pp > 1 else {"dp": dp})
    return JobSpec(
        name,
        LaunchSpec("/train.py"),
        mesh.world_size // nproc,
        nproc,
        mesh,
        min_dp,
        dp,
        CheckpointSpec(interval, 2),
        limits=LimitSpec(**limits),  # type: ignore[arg-type]
    )


class Fleet:
    def __init__(
        self,
        nodes: int,
        *,
        zones: str = "",
        capacity: int = 1,
        decide: bool = True,
        snapshots: bool = True,
        resets_gpus: bool = False,
        reboots: bool = False,
    ) -> None:
        self.now = 1000.0
        self.about = JOB  # the job that all of this is about, where there are several
        self.state = State()
        self.sent: list[Send] = []  # not answered yet
        self.records: list[Record] = []
        self.questions: list[Evaluate] = []
        self.answers: list[Answer] = []  # to operations
        self.said: list[SendNotification] = []  # to agents, besides orders
        self.snapshots = snapshots
        self.reread = Reread()
        self.decide = decide  # answer policy questions at once, by the default policy
        self.seq: dict[str, int] = {}
        self.life: dict[str, int] = {}
        self.version: dict[str, int] = {}  # of the workers that a node reported
        self.finding_count = 0
        self.resets_gpus, self.reboots = resets_gpus, reboots  # whether agents can
        self.boots: dict[str, str] = {}  # boot ids of the machines that report one
        self.machines: dict[str, str] = {}  # machine ids, likewise
        self.requested: list[RequestReplacement] = []  # of who provides machines, and not answered yet
        self.session = 0  # of the agents that report; 0 = not known
        for index in range(nodes):
            self.connect(f"n{index}", zone=zones[index] if zones else "", capacity=capacity)

    # ------------------------------------------------------------ the core

    def fold(self, event: Event) -> tuple[Command, ...]:
        """With `snapshots` every fold goes through one as well: what a standby decides is what the leader decides."""
        again = self.reread(self.state) if self.snapshots else None
        outcome = step(self.state, event)
        assert again is None or step(again, event) == outcome
        self.state, commands = outcome
        for command in commands:
            match command:
                case Send():
                    self.sent = [send for send in self.sent if send.command_id != command.command_id] + [command]
                case Publish(record=record):
                    self.records.append(record)
                case Evaluate():
                    self.questions.append(command)
                case Answer():
                    self.answers.append(command)
                case SendNotification():
                    self.said += [SendNotification((node,), command.message) for node in command.nodes]
                case RequestReplacement():
                    self.requested.append(command)
                case _:
                    pass
        out = {send.command_id for send in self.state.sends()}
        self.sent = [send for send in self.sent if send.command_id in out]
        while self.decide and self.questions:
            self.answer()
        return commands

    def answer(self, action: Action | None = None, decided_by: str = "default policy") -> None:
        question = self.questions.pop(0)
        if (incident := self.state.incidents.get(question.incident)) is not None:
            action = action or default(incident, view(self.state, incident.job, self.now))
            self.fold(PolicyAnswered(self.now, incident.id, action, decided_by))

    def wait(self, seconds: float) -> None:
        """Let timers fire, in order, until `seconds` have passed."""
        end = self.now + seconds
        while due := sorted((when, name) for name, when in self.state.timers.items() if when <= end):
            self.now = max(self.now, due[0][0])
            self.fold(TimerFired(self.now, due[0][1]))
        self.now = end

    # ------------------------------------------------------------ reading

    @property
    def job(self) -> Job:
        return self.state.jobs[self.about]

    def expect(self, phase: JobPhase, why: str = "") -> None:
        """For a second look: type checkers believe that what `job.phase` was, it still is."""
        assert self.job.phase is phase, why or self.job.reason

    @property
    def view(self) -> JobView:
        return view(self.state, self.about, self.now)

    @property
    def incident(self) -> Incident:
        """The newest one, open or closed."""
        incidents = [*self.state.incidents.values(), *self.state.closed]
        return max(incidents, key=lambda incident: int(incident.id.rsplit("-", 1)[1]))

    def nodes(self) -> tuple[str, ...]:
        assert self.job.generation is not None
        return self.job.generation.nodes

    def notes(self) -> str:
        """What an operator reads beside the incidents: notes, and what became of findings."""
        texts = [
            record.text if isinstance(record, Noted) else f"{record.verdict}: {record.finding.summary}"
            for record in self.records
            if isinstance(record, Noted | FindingJudged)
        ]
        return "\n".join(texts)

    def orders(self, kind: type[Order]) -> dict[str, Order]:
        """Unanswered orders of a kind by node."""
        return {send.node: send.order for send in self.sent if isinstance(send.order, kind)}

    # ------------------------------------------------------------ agents

    def facts(self, node: str, zone: str = "", capacity: int = 1) -> NodeFacts:
        life = f"{node}-{self.life[node]}"
        facts = NodeFacts(node, life, node, node, zone, capacity, f"{node}:1", 1, "/agent", "/kmsg")
        facts = replace(facts, boot_id=self.boots.get(node, ""), machine_id=self.machines.get(node, ""))
        return replace(facts, resets_gpus=self.resets_gpus, reboots=self.reboots, agrees_on_saves=True)

    def connect(
        self,
        node: str,
        *,
        zone: str = "",
        capacity: int = 1,
        running: int = 0,
        announced: tuple[str, ...] | None = None,
    ) -> None:
        """A new incarnation connects; `running`: with a worker of this generation."""
        self.life[node] = self.life.get(node, 0) + 1
        self.seq[node] = 0
        self.hello(node, zone=zone, capacity=capacity, running=running, announced=announced)

    def boot(self, node: str) -> None:
        """Its machine has booted, and passes its tests a moment later."""
        self.life[node] = self.life.get(node, 0) + 1
        self.boots[node] = f"boot {self.life[node]}"
        self.seq[node] = 0
        self.report(node, Hello(self.facts(node), (), Preflight()))
        self.report(node, Tested(Preflight(self.now, 0.5, (Check("disk", True, ""),))))

    def hello(
        self,
        node: str,
        *,
        zone: str = "",
        capacity: int = 1,
        running: int = 0,
        announced: tuple[str, ...] | None = None,
    ) -> None:
        workers = (RunningWorker(self.about, running, 0, 1),) if running else ()
        jobs = None if announced is None else Announced(announced)
        self.report(node, Hello(self.facts(node, zone, capacity), workers, announced=jobs))

    def gone(self, *nodes: str) -> None:
        for node in nodes:
            self.fold(NodeGone(self.now, node, f"{node}-{self.life[node]}"))

    def workers(
        self, node: str, *ranks: int, generation: int | None = None, ended: tuple[WorkerEnded, ...] = ()
    ) -> None:
        """`node` reports its whole set of workers: these ranks of the newest generation."""
        self.version[node] = self.version.get(node, 0) + 1
        number = self.job.number if generation is None else generation
        living = tuple(RunningWorker(self.about, number, rank, 100 + rank) for rank in ranks)
        self.report(node, WorkersChanged(self.version[node], living, ended))

    def all_live(self) -> None:
        """Every node of the generation reports that all of its ranks live."""
        assert self.job.generation is not None
        for placement in self.job.generation.placements:
            self.workers(placement.node, *placement.ranks)

    def beat(self, step_number: int) -> None:
        """A node's beat says that its ranks have finished this step."""
        running = self.job.running
        node = running.nodes[0] if running is not None else "n0"
        self.fold(StepSeen(self.now, StepReached(self.about, self.job.number, step_number), node))

    def report(self, node: str, report: Report) -> None:
        self.seq[node] += 1
        self.fold(NodeReported(self.now, node, f"{node}-{self.life[node]}", self.seq[node], report, self.session))

    def done(self, node: str, kind: type[Order], *, ok: bool = True, reason: str = "") -> None:
        """`node` answers its oldest order of this kind."""
        send = next(send for send in self.sent if send.node == node and isinstance(send.order, kind))
        first = isinstance(send.order, Prepare) and send.order.placement.first_rank == 0
        self.report(node, OrderDone(send.command_id, ok, reason, f"{node}:29500" if first else "", self.now))

    def answer_orders(self, *silent: str) -> None:
        """Every order that is out is answered, and those that follow from it; `silent` nodes say nothing."""
        while todo := [send for send in self.sent if send.node not in silent]:
            self.done(todo[0].node, type(todo[0].order))

    def step_all(self, at_step: int = 1) -> None:
        generation = self.job.generation
        assert generation is not None
        for placement in generation.placements:
            self.report(
                placement.node, RanksStepping(self.about, generation.number, tuple(placement.ranks), at_step, self.now)
            )

    def run(self, *silent: str) -> None:
        """Answer everything and step: the job runs."""
        self.now += 0.1
        self.answer_orders(*silent)
        if any(isinstance(send.order, Start) for send in self.sent):
            raise AssertionError("a node was silent about its Start")
        self.step_all()

    def train(self, step_number: int, *, save: bool = False) -> None:
        """Every rank finishes steps up to this one; `save`: and saves it, with a copy on a peer."""
        self.now += 0.5
        self.fold(StepsCompleted(self.now, self.about, self.job.number, step_number, self.now, 10, 0.1))
        if save:
            self.save(step_number)

    def save_asked(self) -> int:
        """Every rank gets to the step that a planned change asked for, and saves it."""
        order = self.orders(CheckpointNow)[self.nodes()[0]]
        assert isinstance(order, CheckpointNow)
        assert order.leaving
        self.train(order.at_step, save=True)
        return order.at_step

    def save(self, step_number: int) -> None:
        generation = self.job.generation
        assert generation is not None
        for placement, copy_on in zip(generation.placements, (*generation.nodes[1:], generation.nodes[0]), strict=True):
            shards = tuple(
                ShardRecord(
                    ShardKey(generation.attempt, step_number, rank),
                    generation.mesh,
                    "memory",
                    1,
                    f"{step_number}@{generation.mesh.position_of(rank)}",
                    placement.node,
                )
                for rank in placement.ranks
            )
            for node in {placement.node, copy_on}:
                held = self.state.nodes[node].inventory.get(self.about, ())
                self.report(node, Inventory(self.about, (*held, *shards)))

    def inventory(self, node: str, *more: ShardRecord) -> None:
        """`node` reports what it held, and `more`; as agents do after every Hello."""
        self.report(node, Inventory(self.about, (*self.state.nodes[node].inventory.get(self.about, ()), *more)))

    def finish(self) -> None:
        generation = self.job.generation
        assert generation is not None
        for placement in generation.placements:
            self.report(placement.node, RanksFinished(self.about, generation.number, tuple(placement.ranks), self.now))

    # ------------------------------------------------------------ everybody else

    def submit(self, spec: JobSpec) -> None:
        self.fold(JobSubmitted(self.now, spec, "token"))

    def find(
        self,
        kind: FindingKind,
        node: str = "",
        *,
        rank: int | None = None,
        generation: int | None = None,
        severity: Severity = Severity.ERROR,
        since: float | None = None,
        name: str = "",
        age_s: float = 0.0,
        gpu: int | None = None,
        recommended_actions: tuple[Remedy, ...] = (),
        observed_steps: int = 0,
        **evidence: str,
    ) -> Finding:
        self.finding_count += 1
        finding = Finding(
            id=name or f"f{self.finding_count}",
            kind=kind,
            severity=severity,
            at=self.now - age_s,
            since=self.now - age_s - 0.01 if since is None else since,
            summary=f"{kind} on {node or 'nobody'}",
            node=node,
            job=self.about,
            generation=self.job.number if generation is None else generation,
            rank=rank,
            gpu=gpu,
            evidence=evidence,
            recommended_actions=recommended_actions,
        )
        finding = old_evidence.with_fields(finding)
        if observed_steps:
            finding = replace(finding, attribution=replace(finding.attribution, observed_steps=observed_steps))
        self.fold(FindingArrived(self.now, finding, age_s))
        return finding

    def lose(self, node: str) -> None:
        """Both witnesses."""
        self.gone(node)
        self.find(FindingKind.NODE_LOST, node)


def running(spec: JobSpec, spares: int = 0, *, saved: int = 0, decide: bool = True, kind: type[Fleet] = Fleet) -> Fleet:
    """A fleet on which `spec` runs, with a complete checkpoint at step `saved`."""
    fleet = kind(spec.nodes + spares, capacity=spec.nproc_per_node, decide=decide)
    fleet.submit(spec)
    fleet.run()
    if saved:
        fleet.train(saved, save=True)
    return fleet


def warn_of_a_slow_node(fleet: Fleet) -> None:
    """A warning about n1 has lasted for so long that the policy is asked what to do about it."""
    warning = Finding(
        id="slow:n1",
        kind=FindingKind.STRAGGLER,
        severity=Severity.WARNING,
        at=fleet.now,
        since=fleet.now - 700.0,
        summary="n1 is slow.",
        node="n1",
        job=JOB,
        generation=fleet.job.number,
        cost_share=0.1,
    )
    fleet.fold(FindingArrived(fleet.now, warning))
    fleet.now += 700.0
    fleet.fold(FindingArrived(fleet.now, replace(warning, at=fleet.now, repeat=1)))


def asked_to_end(fleet: Fleet, node: str, incarnation: str = "", grace_s: float = 25.0, after_s: float = 0.01) -> None:
    """SIGTERM to the agent of a node, `after_s` after what was before."""
    fleet.now += after_s
    at, life = fleet.now, incarnation or fleet.state.nodes[node].facts.incarnation
    notice = Notice(TERMINATION, "its agent was asked to end", at, at + grace_s, life)
    finding = Finding(
        id=f"termination:{node}:{at}",
        kind=FindingKind.MAINTENANCE,
        severity=Severity.WARNING,
        at=at,
        since=at,
        summary=f"{node} leaves",
        node=node,
        notice=notice,
    )
    fleet.fold(FindingArrived(at, finding, 0.0))
