"""The promises, checked at every step of a simulation. They are implemented here again, independently of the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.generations import OBJECT_STORE, Generation
from holdfast.domain.incidents import Incident, Rung
from holdfast.domain.mesh import DATA_PARALLEL, Mesh
from holdfast.domain.orders import Hello, Prepare, SetInterval, Start, Stop
from holdfast.policy import RUNGS_MAX
from holdfast.sim import own_faults
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.allocations import AllocationPromises
from holdfast.sim.durability import newest_whole
from holdfast.sim.leader_time import LeaderTime
from holdfast.sim.replacements import ReplacementPromises
from holdfast.sim.returns import ReturnPromises
from holdfast.sim.store import Store
from holdfast.sim.suspects import SuspectPromises
from holdfast.sim.truth import Truth
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State
from holdfast.supervisor.core.incidents.recipes import EXHAUSTED_MAX
from holdfast.supervisor.protocol import (
    Command,
    Event,
    FindingArrived,
    FindingJudged,
    GenerationChanged,
    GenerationStage,
    IncidentChanged,
    JobPhase,
    NodeCordonRequested,
    NodeRepaired,
    NodeReported,
    Publish,
    Send,
)

# Ranks that the state did not show when the next generation was started must end before their nodes have had a session for this
# long since then. The shell needs 4 s to see that the state does not show a node, and the Hello that follows may be lost
# several times.
UNKNOWN_RUN_S_MAX = 30.0
FOLDED_S_MAX = 5.0  # longer times between two folds are not counted, because sessions end while there is no leader


@dataclass(slots=True)
class Ancestor:
    """The attempt of a started generation, with the attempt and step from which it branched off."""

    attempt: int
    from_attempt: int
    from_step: int


@dataclass(slots=True)
class Invariants:
    agents: dict[str, Agent]
    min_dp: int
    max_dp: int
    checkpoint_interval: int
    store: Store | None = None
    sharded: bool = False  # the state is sharded over dp, so a restore needs the shards of all replicas
    opened: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    ancestors: dict[int, Ancestor] = field(default_factory=dict)  # by attempt
    newest_attempt: int = 0
    # Generation → values that must be equal in every Prepare of it.
    prepared: dict[int, tuple[object, ...]] = field(default_factory=dict)
    complete: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # (attempt, step) → ranks that saved it
    meshes: dict[tuple[int, int], Mesh] = field(default_factory=dict)  # (attempt, step) → mesh that saved it
    points: dict[int, tuple[int, int]] = field(default_factory=dict)  # generation → (attempt, step) that it restores
    announced: dict[tuple[int, int], int] = field(default_factory=dict)  # (generation, from step) → interval
    # Generation that was started because of a fault → the cause
    faulted: dict[int, str] = field(default_factory=dict)
    # (generation, attempt) that were replaced while none of their nodes could receive orders.
    blind_takeover: set[tuple[int, int]] = field(default_factory=set)
    # (generation, attempt) that were replaced while the state showed none of their nodes with a session → seconds for which
    # these nodes have had a session since.
    unknown_runs: dict[tuple[int, int], float] = field(default_factory=dict)
    folded_at: float = 0.0
    # (node, generation) → time of the first order to stop it
    stops: dict[tuple[str, int], float] = field(default_factory=dict)
    repaired: dict[str, float] = field(default_factory=dict)  # unschedulable node → time of its repair by an operator

    # Node with a GPU that must be reset and has not been reset → time since which
    unreset: dict[str, float] = field(default_factory=dict)
    walks: dict[str, tuple[Rung, ...]] = field(default_factory=dict)  # by incident
    # Node → time of its newest maintenance finding, and whether maintenance is announced.
    noticed: dict[str, tuple[float, bool]] = field(default_factory=dict)
    starts: set[str] = field(default_factory=set)  # ids of Start orders that were sent; unanswered ones are sent again
    leaving: set[str] = field(default_factory=set)  # nodes whose agent got SIGTERM
    returns: ReturnPromises | None = None
    allocations: AllocationPromises | None = None
    replacements: ReplacementPromises | None = None
    suspects: SuspectPromises = field(default_factory=SuspectPromises)
    truth: Truth | None = None
    leader_time: LeaderTime | None = None
    job: str = JOB

    # ------------------------------------------------------------ decisions of the core

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        if self.leader_time is not None:
            self.leader_time.folded(before, event)
        if not before.nodes:  # a log that has lost everything knows of no earlier notice
            self.noticed.clear()
            self.leaving.clear()
        if isinstance(event, NodeCordonRequested) and not event.cordoned:  # also ends the notices of the node
            self.noticed[event.node] = (event.at, False)
            self.leaving.discard(event.node)
        if isinstance(event, FindingArrived):
            self._notice(before, event.finding)
            self._demand_reset(before, event)
        if isinstance(event, NodeReported) and isinstance(event.report, Hello):
            self._here_again(before, event.report, after)
        if isinstance(event, NodeRepaired):
            self.unreset.pop(event.node, None)
            if event.node in before.nodes and before.nodes[event.node].unschedulable_reason:
                self.repaired[event.node] = self.agents[event.node].world.now
        own_faults.check(before, event, commands)
        for command in commands:
            match command:
                case Send(order=Start() as order, node=node, command_id=command_id):
                    again = command_id in self.starts
                    self.starts.add(command_id)
                    if again or node not in self.unreset:
                        continue
                    raise Violation(
                        f"ranks of generation {order.generation} start on {node}, whose GPU was to be reset since "
                        f"{self.unreset[node]:.3f} and was not"
                    )
                case Publish(record=GenerationChanged(stage=GenerationStage.PLANNED, generation=generation)):
                    self._full_mesh(generation)
                    self._no_new_ranks_before_maintenance(generation, before)
                    self._restorable(generation)
                    self._newest(generation, event.at, before, after)
                case Publish(record=GenerationChanged(stage=GenerationStage.STARTED, generation=generation)):
                    self._nothing_older_runs(generation, after)
                    self._branch(generation, after)
                case Publish(record=IncidentChanged(incident=incident)):
                    self.opened.add(incident.id)
                    self._walks_forward(incident)
                    if incident.new_generation and not incident.planned:
                        self.faulted[incident.new_generation] = incident.cause
                    if incident.closed:
                        self.closed.add(incident.id)
                        self._cheap_when_planned(incident)
                case Send(order=Stop() as order, node=node):
                    for number in range(order.generation + 1):
                        self.stops.setdefault((node, number), self.agents[node].world.now)
                case Send(order=Prepare() as order):
                    self._same_generation_everywhere(order)
                case Send(order=SetInterval() as order):
                    if self.announced.setdefault((order.generation, order.from_step), order.interval_steps) != (
                        order.interval_steps
                    ):
                        raise Violation(f"two intervals from step {order.from_step} on: {order}")
                case _:
                    pass
        for command in commands:  # in a second pass, because the record of a generation follows its orders
            if isinstance(command, Send) and isinstance(command.order, Prepare):
                self._one_whole_step(command.order)
        if self.returns is not None:
            self.returns.folded(before, event, after, commands)
        if self.allocations is not None:
            self.allocations.folded(after, commands)
        if self.replacements is not None:
            self.replacements.folded(event, after, commands)
        self.suspects.folded(before, event, after, commands)
        if self.truth is not None:
            self.truth.folded(event, after, commands)
        self._plans_stop_nothing(before, after)
        if isinstance(event, FindingArrived):
            self.recorded(event, after, commands)
        self._no_incident_vanished(after)
        self._unknown_runs_end(after)
        if after.nodes is not before.nodes:
            self._quarantine_leaves_enough(before, after)

    def _demand_reset(self, before: State, event: FindingArrived) -> None:
        """Record that a GPU must be reset, unless it was reset or repaired since the fault began."""
        finding, node = event.finding, before.nodes.get(event.finding.node)
        if (
            finding.severity is not Severity.ERROR
            or finding.recommended_actions[:1] != (Remedy.RESET_GPU,)
            or node is None
        ):
            return
        began = event.at - event.age_s - max(0.0, finding.at - finding.since)
        incidents = (*before.incidents.values(), *before.closed)
        duplicate = any(finding.id in incident.findings for incident in incidents)
        if not duplicate and began >= max(node.reset_at, node.repaired_at):
            self.unreset.setdefault(finding.node, event.at)

    def gpus_reset(self, node: str) -> None:
        """Record that the GPUs were reset, even if the supervisor does not learn of it."""
        self.unreset.pop(node, None)

    def log_went_back(self, state: State) -> None:
        """Forget the decisions that the log has lost. (Their effects on nodes remain.)"""
        if self.leader_time is not None:
            self.leader_time.log_went_back()
        if self.returns is not None:
            self.returns.log_went_back(state)
        if self.replacements is not None:
            self.replacements.log_went_back()
        self.suspects.log_went_back(state)
        self.unreset = {node: at for node, at in self.unreset.items() if _due(state, node)}
        self.opened = {*state.incidents, *(incident.id for incident in state.closed)}
        self.closed = {incident.id for incident in state.closed}
        self.walks = {incident.id: incident.walk for incident in (*state.incidents.values(), *state.closed)}
        newest = max((job.number for job in state.jobs.values()), default=0)
        self.prepared = {number: terms for number, terms in self.prepared.items() if number <= newest}
        if not state.jobs:  # generation numbers may be reused by another submission
            self.stops.clear()
            self.unknown_runs.clear()
        self.newest_attempt = 0
        for job in state.jobs.values():
            self.newest_attempt = job.running.attempt if job.running is not None else 0

    def _quarantine_leaves_enough(self, before: State, after: State) -> None:
        """A node is quarantined only if enough other nodes are left for its job."""
        fresh = {name for name, node in after.nodes.items() if node.quarantined and not before.nodes[name].quarantined}
        for job in before.jobs.values() if fresh else ():
            if job.generation is None or job.phase.finished or not fresh & set(job.generation.nodes):
                continue
            fit = [n for n in after.nodes.values() if n.usable and n.facts.capacity >= job.spec.nproc_per_node]
            if len(fit) < len(job.generation.placements):
                raise Violation(
                    f"{sorted(fresh)} quarantined, and {len(fit)} nodes are left for {len(job.generation.placements)}"
                )

    def _cheap_when_planned(self, incident: Incident) -> None:
        """A planned change repeats at most a checkpoint interval of steps, unless a fault interrupted it and it was planned
        again."""
        undisturbed = incident.new_generation == incident.generation + 1
        if incident.planned and undisturbed and incident.rework_steps > self.checkpoint_interval:
            raise Violation(
                f"{incident.kind} cost {incident.rework_steps} steps, the interval is {self.checkpoint_interval}"
            )

    def _plans_stop_nothing(self, before: State, after: State) -> None:
        """A planned change must not leave a healthy job waiting."""
        for name, job in after.jobs.items():
            ran = name in before.jobs and before.jobs[name].phase is JobPhase.RUNNING
            if ran and job.phase is JobPhase.WAITING and not any(not i.planned for i in before.incidents.values()):
                raise Violation(f"a healthy run was stopped, and nothing is wrong with it: {job.reason}")

    def _here_again(self, before: State, hello: Hello, after: State) -> None:
        """A notice about the end of an agent process does not apply to the next agent process."""
        node, now = before.nodes.get(hello.facts.node), after.nodes.get(hello.facts.node)
        for each in now.notices if now is not None else ():
            if now is not None and each.event and each.incarnation not in ("", now.facts.incarnation):
                raise Violation(f"{now.name} has a notice of its previous agent")
        if node is None or node.facts.incarnation != hello.facts.incarnation:
            self.leaving.discard(hello.facts.node)

    def _notice(self, before: State, finding: Finding) -> None:
        if finding.notice is not None and finding.notice.incarnation:
            node = before.nodes.get(finding.node)
            if node is not None and node.facts.incarnation == finding.notice.incarnation:
                self.leaving.add(finding.node)
            return
        if finding.kind is FindingKind.MAINTENANCE and finding.at > self.noticed.get(finding.node, (0.0, False))[0]:
            self.noticed[finding.node] = (finding.at, finding.notice is not None and bool(finding.notice.event))

    def _no_new_ranks_before_maintenance(self, generation: Generation, before: State) -> None:
        old = {node for job in before.jobs.values() if job.generation for node in job.generation.nodes}
        for node in sorted(set(generation.nodes) - old):
            if self.noticed.get(node, (0.0, False))[1] or node in self.leaving:
                raise Violation(f"generation {generation.number} takes {node}, whose machine will be taken")

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
        """The selected checkpoint is on the lineage, and every model-parallel index of its mesh was saved."""
        point = generation.restore
        self.points[generation.number] = (point.attempt, point.step)
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
            raise Violation(f"restores step {point.step} of attempt {attempt}, which is abandoned after step {limit}")
        known = self.complete.get((point.attempt, point.step), set())
        mesh = self.meshes.get((point.attempt, point.step), generation.mesh)
        missing = set(range(mesh.world_size)) - known
        if not self.sharded and mesh.dp != generation.mesh.dp:  # any replica's
            parts = {_part(mesh, rank) for rank in known}
            missing = {rank for rank in missing if _part(mesh, rank) not in parts}
        if missing:
            raise Violation(
                f"restores step {point.step} of attempt {point.attempt}: no shards were saved for ranks {sorted(missing)}"
            )

    def _newest(self, generation: Generation, now: float, before: State, after: State) -> None:
        """No newer step than the selected one was whole."""
        replicators = {name: agent.replicator for name, agent in self.agents.items()}
        lineage: dict[int, int | None] = {}
        attempt, limit = self.newest_attempt, None
        while attempt:
            lineage[attempt] = limit
            if attempt not in self.ancestors:
                break
            ancestor = self.ancestors[attempt]
            attempt, limit = ancestor.from_attempt, ancestor.from_step
        newest = newest_whole(before, after, replicators, self.store, self.job, lineage, now)
        selected = CheckpointId(generation.restore.attempt, generation.restore.step)
        if newest is not None and newest > selected:
            raise Violation(
                f"generation {generation.number} restores step {selected.step} of attempt {selected.attempt}, and step "
                f"{newest.step} of attempt {newest.attempt} is whole: {generation.restore.reason}"
            )

    def saved(self, attempt: int, step: int, rank: int, mesh: Mesh) -> None:
        self.complete.setdefault((attempt, step), set()).add(rank)
        self.meshes[attempt, step] = mesh

    def all_or_none(self, what: str, acting: Sequence[str], others: Sequence[str]) -> None:
        """At a step that is due, or that the ranks agree to save, all of them act, or none."""
        if acting and others:
            raise Violation(f"{what} on {', '.join(acting)}, and not on {', '.join(others)}")

    def _one_whole_step(self, order: Prepare) -> None:
        """Every rank gets its complete state, all of it from the selected checkpoint."""
        point = self.points.get(order.generation)
        for restore in order.restore:
            if (restore.shard.attempt, restore.shard.step) != point:
                raise Violation(
                    f"generation {order.generation} restores {point}, and rank {restore.rank} {restore.shard}"
                )
            in_store = any(source.node == OBJECT_STORE for source in restore.sources)
            if in_store and (self.store is None or point not in self.store.ever_complete):
                raise Violation(f"{point} is not whole in the object store, and rank {restore.rank} is sent there")
        if order.restore_step:
            for rank in order.placement.ranks:
                self._whole_state(order, rank, sorted(r.shard.rank for r in order.restore if r.rank == rank))

    def _whole_state(self, order: Prepare, rank: int, given: list[int]) -> None:
        saved = order.restore_mesh
        assert saved is not None
        if saved.dp == order.mesh.dp:
            right = given == [rank]
        else:
            same = [other for other in range(saved.world_size) if _part(saved, other) == _part(order.mesh, rank)]
            right = given == same if self.sharded else len(given) == 1 and given[0] in same
        if not right:
            raise Violation(f"rank {rank} of {order.mesh} is given the shards {given} of {saved}: not its whole state")

    def _nothing_older_runs(self, generation: Generation, after: State) -> None:
        """When a generation starts, every node that could receive orders has stopped its earlier workers."""
        patience_s = next(iter(after.jobs.values())).spec.limits.prepare_timeout_s
        for agent in self.agents.values():
            node, workers = after.nodes.get(agent.name), agent.workers
            if (
                node is None
                or not node.connected
                or not agent.session
                or workers is None
                or workers.order.job != self.job
            ):
                continue
            ours = (workers.order.generation, workers.order.attempt) == (generation.number, generation.attempt)
            if ours or not workers.started or not workers.living:
                continue
            ordered_at = self.stops.get((agent.name, workers.order.generation), agent.world.now)
            asked_for_s = agent.world.now - ordered_at
            if (
                (node.unschedulable_reason or self.repaired.get(agent.name, -1.0) >= ordered_at)
                and agent.stops_missed >= workers.order.generation
                and asked_for_s >= 0.9 * patience_s
            ):
                continue  # its stop orders were lost until the timeout; all other nodes have stopped (ADR 7)
            raise Violation(
                f"generation {generation.number} starts, and {agent.name} still runs generation {workers.order.generation}"
            )

    def _branch(self, generation: Generation, after: State) -> None:
        self.ancestors[generation.attempt] = Ancestor(
            generation.attempt, generation.restore.attempt, generation.restore.step
        )
        self.newest_attempt = generation.attempt
        asked: dict[tuple[int, int], bool] = {}
        for agent in self.agents.values():
            if (run := _run(agent, self.job)) is not None and run != (generation.number, generation.attempt):
                known = after.nodes.get(agent.name)
                shown = known is not None and known.connected  # False while its Hello is in flight or lost
                asked[run] = asked.get(run, False) or (bool(agent.session) and shown)
                if agent.session and not shown:
                    self.unknown_runs.setdefault(run, 0.0)
        self.blind_takeover |= {run for run, anybody in asked.items() if not anybody}

    def _unknown_runs_end(self, after: State) -> None:
        """A node that the state did not show when another generation was started is ordered to stop its workers as soon as the
        state shows it, which takes seconds."""
        now = max((agent.world.now for agent in self.agents.values()), default=0.0)
        passed_s, self.folded_at = min(now - self.folded_at, FOLDED_S_MAX), now
        for run in list(self.unknown_runs) if after.jobs else ():
            nodes = [agent for agent in self.agents.values() if agent.session and _run(agent, self.job) == run]
            for agent in nodes:
                node = after.nodes.get(agent.name)
                if node is not None and node.connected and node.session == agent.session and node.workers_version:
                    orders = [send.order for send in after.sends() if send.node == agent.name]
                    if not any(isinstance(order, Stop | Prepare) for order in orders):
                        raise Violation(
                            f"{agent.name} runs generation {run[0]}, which was replaced, and is not stopped"
                        )
            if nodes:
                self.unknown_runs[run] += passed_s
            if self.unknown_runs[run] > UNKNOWN_RUN_S_MAX:
                raise Violation(
                    f"generation {run[0]} was replaced while its nodes were not known, and is not stopped after "
                    f"{UNKNOWN_RUN_S_MAX:g} s with a session"
                )

    def _same_generation_everywhere(self, order: Prepare) -> None:
        terms = (order.attempt, order.mesh, order.nnodes, order.restore_step)
        if self.prepared.setdefault(order.generation, terms) != terms:
            raise Violation(
                f"two different generations {order.generation}: {terms} and {self.prepared[order.generation]}"
            )

    def recorded(self, event: FindingArrived, after: State, commands: tuple[Command, ...]) -> None:
        """A finding is recorded with a result and a reason when it arrives for the first time. A repeat that leads to
        nothing is not recorded, even if the first was lost."""
        finding = event.finding
        for command in commands:
            match command:
                case Publish(record=FindingJudged(finding=judged, incident=incident)) if judged.id == finding.id:
                    if incident and not any(
                        finding.id in known.findings
                        for known in (*after.incidents.values(), *after.closed)
                        if known.id == incident
                    ):
                        raise Violation(
                            f"the finding {finding.id} is recorded for {incident}, which does not contain it"
                        )
                    return
                case _:
                    pass
        incidents = (*after.incidents.values(), *after.closed)
        if any(finding.id in incident.findings for incident in incidents):
            return  # a duplicate
        if finding.repeat:
            return
        raise Violation(f"the finding {finding.id} ({finding.summary}) left no trace")

    def _walks_forward(self, incident: Incident) -> None:
        """A recipe is tried from its first rung to its last, every tried rung stays recorded, and the walk ends."""
        before, walk = self.walks.get(incident.id, ()), incident.walk
        self.walks[incident.id] = walk
        places = [(rung.recipe, rung.number) for rung in walk]
        if places != sorted(set(places)):
            raise Violation(f"{incident.id} goes back to an earlier rung: {places}")
        if any(rung.number > RUNGS_MAX for rung in walk):
            raise Violation(f"{incident.id} walks more than {RUNGS_MAX} rungs: {places}")
        if any(rung.end is None for rung in walk[:-1]) or (incident.closed and incident.rung is not None):
            raise Violation(f"{incident.id} is {incident.state}, and a rung of its walk never ended: {places}")
        ended = {(rung.recipe, rung.number): rung for rung in before if rung.end is not None}
        for rung in walk:
            if (known := ended.get((rung.recipe, rung.number))) is not None and known != rung:
                raise Violation(f"{incident.id}: what is on record of rung {rung.recipe}.{rung.number} has changed")
        if before and walk and places[-1] < (before[-1].recipe, before[-1].number):
            raise Violation(f"{incident.id} forgets rungs of its walk: {places}")
        if incident.recipes_exhausted and incident.action is not None and not incident.closed:
            default_decides = incident.recipes_exhausted >= EXHAUSTED_MAX
            if default_decides and incident.action.fallbacks:
                raise Violation(
                    f"{incident.id}: {incident.recipes_exhausted} recipes were exhausted, and there is another"
                )

    def _no_incident_vanished(self, after: State) -> None:
        if vanished := self.opened - self.closed - set(after.incidents):
            raise Violation(f"incidents vanished: {sorted(vanished)}")

    # ------------------------------------------------------------ events on the nodes

    def at_most_one_runs(self, whole: list[tuple[int, int]]) -> None:
        """At most one generation can finish a step. `whole`: (generation, attempt) whose ranks are all alive and running."""
        seen = [run for run in whole if run not in self.blind_takeover]
        if len(seen) > 1:
            raise Violation(f"generations {[number for number, _ in seen]} could all make progress")


def _due(state: State, node: str) -> bool:
    return node in state.nodes and state.nodes[node].reset_due is not None


def _run(agent: Agent, job: str) -> tuple[int, int] | None:
    """Return (generation, attempt) of the started, living ranks of `job` on a node."""
    workers = agent.workers
    if workers is None or workers.order.job != job or not workers.started or not workers.living:
        return None
    return workers.order.generation, workers.order.attempt


def _part(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the rank's coordinates without that of the replica, which identify its part of the model."""
    return tuple(index for name, index in mesh.coords(rank).items() if name != DATA_PARALLEL)
