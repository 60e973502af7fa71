"""One simulated run: a job on a small fleet, random faults, and then *peace*, a time without faults. The job must complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from random import Random

from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.domain.job import CheckpointSpec, HangSpec, JobSpec, LaunchSpec, LimitSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import TERMINATION
from holdfast.policy import JobView, default
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.allocations import (
    ALLOCATIONS_FROM,
    APART_S,
    BACK_WITHIN_S,
    Allocation,
    AllocationPromises,
    Allocations,
)
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.hostility import Hostilities, Hostility
from holdfast.sim.idle import IdleLinks
from holdfast.sim.invariants import Invariants
from holdfast.sim.leader_time import LeaderTime
from holdfast.sim.log import FLUSHED_S
from holdfast.sim.maintenance import Maintenance
from holdfast.sim.neighbourhood import Neighbourhood
from holdfast.sim.own_faults import requests_of
from holdfast.sim.recipes import Cook
from holdfast.sim.replacements import ReplacementPromises, Replacing
from holdfast.sim.resets import Resets
from holdfast.sim.returns import REPAIRED_S as LOOKED_AT_S
from holdfast.sim.returns import RULES, ReturnPromises, Returns
from holdfast.sim.several import SeveralJobs
from holdfast.sim.store import URL, Store
from holdfast.sim.supervisor import Policy, Supervisor
from holdfast.sim.suspects import SelfTests
from holdfast.sim.training import Training
from holdfast.sim.truth import Truth
from holdfast.sim.watched import Step
from holdfast.sim.worker_faults import WorkerFaults
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Config, Job, State, step
from holdfast.supervisor.core.interval import STEPS_UNMEASURED
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import (
    JobPhase,
    JobStopRequested,
    JobSubmitted,
    NodeCordonRequested,
    NodeRepaired,
    ProviderAnswered,
    RequestReplacement,
    StartFrom,
)

STEP_S = 0.5
INTERVAL = 5
STORE_INTERVAL_S = 5.0
HANG_S = 5.0
RECONNECT_S = (0.05, 0.5)
FAULTS_END_S = 30.0
HOSTILE_STEP_S = 1.0  # long, because a run has to last until the peace
PREPARE_S = 5.0
INIT_S = 60.0  # limit for a rank that has not reported a step
STEPS_IN_PEACE = 10
SUBMITTED_AGAIN_S = 5.0
REPAIRED_S = (60.0, 400.0)  # from the fault of a GPU until an operator marks the node as repaired
REPORTED_LATE_S = 200.0  # a fault is reported at the latest so long after the repair
REPAIR_LOOK_S = 20.0
RECOVERED_S = 450.0
LIMIT_S = 3000.0  # for the rest of the run after the faults; the breaker's window and the retries take minutes

# Quarantines a node after its first own fault. The job must complete nevertheless.
HARSH = OffenderRules(limit=0.9, together_s=0.2, fraction_max=0.5)

_MESHES = (
    # mesh, workers per node, spares, capacity
    ({"dp": 3}, 1, 1, 1),
    ({"dp": 2, "pp": 2}, 1, 1, 1),
    ({"dp": 2, "pp": 2}, 2, 1, 2),
    ({"dp": 4}, 2, 1, 2),
    ({"pp": 2}, 1, 1, 1),
    ({"dp": 1}, 1, 1, 1),
    ({"dp": 3, "pp": 2}, 2, 0, 2),
)
ANY_ORDER_FROM = 600_000  # the first seed of the meshes in which dp is not the outermost dimension
SEVERAL_JOBS_FROM = 900_000  # the first seed of the worlds with several jobs
IDLE_LINKS_FROM = 950_000  # the first seed of the worlds with idle nodes that test their network
_MESHES_IN_ANY_ORDER = (
    ({"pp": 2, "dp": 3}, 1, 1, 1),  # the nodes of a replica are not neighbours
    ({"pp": 2, "dp": 2, "tp": 2}, 2, 1, 2),
    ({"pp": 3, "dp": 2, "tp": 2}, 1, 1, 1),
    ({"pp": 2, "dp": 4}, 2, 1, 2),  # a node has parts of two replicas
    ({"pp": 2, "dp": 2, "tp": 2}, 4, 1, 4),  # a node has parts of all replicas, so no replica can be removed
    ({"pp": 2, "dp": 3}, 2, 1, 2),  # one node has both stages
    ({"tp": 2, "dp": 2, "pp": 2}, 1, 0, 1),
)


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    seconds: float  # virtual, until the job was complete
    generations: int
    incidents: int
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How the job saves. Three of five seeds use no object store, and give the same runs as before it was added."""

    store: bool = False
    sharded: bool = False  # over dp
    auto: bool = False  # the supervisor chooses the interval
    rot: bool = False  # copies become corrupt, and disks are lost with their nodes

    @classmethod
    def of(cls, seed: int) -> Checkpoints:
        if seed % 5 > 1:
            return cls()
        chance = Random(f"checkpoints of {seed}")
        return cls(chance.random() < 0.8, chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.7)

    @property
    def spec(self) -> CheckpointSpec:
        interval, store = 0 if self.auto else INTERVAL, URL if self.store else ""
        return CheckpointSpec(interval, 2, 2 * STEP_S, INTERVAL * STEP_S, store, STORE_INTERVAL_S)


class Scenario(Neighbourhood):
    """Agents, network, diagnostics and the user's job around a supervisor."""

    def __init__(
        self, seed: int, *, tracing: bool = False, fold: Step = step, hostility: Hostility | None = None
    ) -> None:
        self.world = World(seed, tracing)
        self.allocations = Allocations.of(seed)
        if self.allocations is not None:
            hostility = Hostility()  # no other faults, because the promises for these worlds are exact
        self.hostility = Hostility.of(seed) if hostility is None else hostility
        self.checkpoints = Checkpoints.of(seed)
        self.resets = Resets.of(seed)
        self.returns = Returns.of(seed)
        self.replacing = Replacing.of(seed)
        self.suspicions = SelfTests.of(seed)
        self.store = Store(self.world) if self.checkpoints.store else None
        self.sharded = self.checkpoints.sharded
        chance = self.world.chance
        dims, width, spares, capacity = chance.choice(
            _MESHES_IN_ANY_ORDER if ANY_ORDER_FROM <= seed < ALLOCATIONS_FROM else _MESHES
        )
        mesh = Mesh.of(dims)
        shrinks = mesh.is_dp_outermost or mesh.grouping(width).replicas < mesh.dp
        nodes = mesh.world_size // width
        self.spec = JobSpec(
            JOB,
            LaunchSpec("/train.py"),
            nodes,
            width,
            mesh,
            min_dp=chance.randint(1 if shrinks else mesh.dp, mesh.dp),
            max_dp=mesh.dp,
            checkpoint=self.checkpoints.spec,
            hang=HangSpec(floor_s=HANG_S, init_s=INIT_S),
            limits=LimitSpec(
                prepare_timeout_s=PREPARE_S * (3 if self.hostility else 1),
                first_step_timeout_s=20.0,
                restarts_without_progress_max=3 if self.hostility else 1000,
            ),
        )
        self.kills = requests_of(seed, 3.0, FAULTS_END_S)
        if self.kills:
            self.spec = replace(self.spec, chaos=True)
        steps = chance.randint(25, 45) * (8 if self.allocations is not None else 1)  # longer than all allocations
        # In every fifth run only the control plane fails. The training must then not be interrupted.
        self.control_plane_only = chance.random() < 0.2 and self.allocations is None
        self.agents: dict[str, Agent] = {}
        for index in range(nodes + spares):
            name = f"n{index}"
            self.agents[name] = Agent(self.world, self, name, chance.choice(("a", "b", "")), capacity)
        interval = STEPS_UNMEASURED if self.checkpoints.auto else INTERVAL
        self.invariants = Invariants(
            self.agents, self.spec.min_dp, self.spec.max_dp, interval, self.store, self.sharded
        )
        policy: Policy = default if chance.random() < 0.8 else self._whimsical
        self.cook = Cook.of(seed)
        if self.cook is not None:
            policy = self.cook.decide
        if self.allocations is not None:
            policy = default
            self.invariants.allocations = AllocationPromises(
                self.agents, self.invariants.complete, self.invariants.meshes
            )
        config = Config(offenders=HARSH) if seed % 7 == 3 else Config()
        if self.returns.faults:
            apart = config.offenders if config.offenders is HARSH else OffenderRules(together_s=0.2)
            config = replace(config, returns=RULES, offenders=apart)
            self.invariants.returns = ReturnPromises(self.world)
        if self.replacing.rules is not None:
            config = replace(config, replacements=self.replacing.rules, provider_s=15.0)
            self.invariants.replacements = ReplacementPromises()
        self.supervisor = Supervisor(
            self.world,
            self.agents,
            self.invariants,
            policy,
            fold,
            config,
            log_flushes_late=self.hostility.log_tail,
        )
        self.invariants.leader_time = LeaderTime(self.world, self.supervisor.log_clock)
        self.supervisor.provider = self._request_replacement
        self.truth = self.invariants.truth = Truth(self.world, self.agents)
        self.training = Training(
            self.world,
            self.agents,
            self.invariants,
            HOSTILE_STEP_S if self.hostility else STEP_S,
            inf if self.hostility else steps,
        )
        self.diagnostics = Diagnostics(self.world, self.agents, self.supervisor, self.training.steps_of, self.truth)
        self.workers = WorkerFaults(self.world, self.diagnostics, self.truth)
        self.hostilities = Hostilities(self.hostility, self, control_plane_only=self.control_plane_only)
        self._seen: State | None = None  # the last committed state that was looked at
        self._is_complete = False  # the job, in that state
        self._submissions = 0
        self._faults: list[float] = []  # times of faults
        self._terminated: set[str] = set()
        self.doubted: set[str] = set()

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        self.supervisor.lead()
        for agent in self.agents.values():
            agent.slow_share = 0.0 if self.control_plane_only else agent.slow_share
            agent.patience_s = self.spec.limits.prepare_timeout_s
            agent.resets = self.resets
            agent.resets_gpus = self.resets.faults > 0 and self.resets.chance.random() >= self.resets.unable
            agent.suspicions = self.suspicions
            agent.returns = self.returns if self.returns.faults else None
            agent.boot()
            self.supervisor.keep_connected(agent, *RECONNECT_S)
        self.diagnostics.begin()
        self.world.after(1.0, self._submit)
        self._plan_faults()
        done = self.world.run(self.world.now + FAULTS_END_S + self.hostility.peace_s + LIMIT_S, self._complete)
        job = self.supervisor.committed.jobs.get(JOB)
        if job is not None and job.phase is JobPhase.FAILED and self._rightly_failed():
            return self._result(job)
        if not done or job is None or job.phase is not JobPhase.COMPLETED:
            raise Violation(
                f"there are enough nodes and no faults any more, but the job is {self._state()}, "
                f"at step {self.training.step}"
            )
        if not self.training.finished:
            raise Violation(
                f"the job is {self._state()}, and its ranks have not finished: they are at {self.training.step}"
            )
        if self.control_plane_only:
            self._never_interrupted()
        if self.supervisor.committed.incidents:
            raise Violation(f"open incidents of a completed job: {sorted(self.supervisor.committed.incidents)}")
        return self._result(job)

    def _never_interrupted(self) -> None:
        """Check that no failure of the control plane stops a job that has finished a step. (A node that reconnects late may be
        added.)"""
        stepped = [generation for generation, steps in self.training.started.items() if steps]
        for generation in sorted(self.training.started):
            if generation > min(stepped) and generation in self.invariants.faulted:
                cause = self.invariants.faulted[generation]
                raise Violation(f"only the control plane failed, and generation {generation} was started: {cause}")

    def _result(self, job: Job) -> Result:
        return Result(
            self.world.seed, self.world.now - 1000.0, job.number, len(self.invariants.opened), tuple(self.world.trace)
        )

    def _state(self) -> str:
        job = self.supervisor.committed.jobs.get(JOB)
        return f"{job.phase}: {job.reason}" if job else "not there"

    def _submit(self) -> None:
        """Submit the job. In hostile worlds, submit it again if it does not appear."""
        state = self.supervisor.committed
        if self.supervisor.leading and JOB not in state.jobs:
            self._submissions += 1
            if any(JOB in node.live_generations for node in state.nodes.values()):  # of a run that the log has lost
                self.supervisor.append(
                    JobStopRequested(self.world.now, JOB, "its supervisor has lost its state", False)
                )
            start = StartFrom.NOTHING if self._submissions == 1 else StartFrom.SCRATCH
            token = f"token {self._submissions}"
            self.supervisor.append(JobSubmitted(self.world.now, self.spec, token, start=start))
        if self.hostility:
            self.world.after(SUBMITTED_AGAIN_S, self._submit)

    def _rightly_failed(self) -> bool:
        """Return whether the job may fail: its limit of faults in a row without any finished step is reached, or three times
        the limit without a step beyond the furthest one."""
        limit = self.spec.limits.restarts_without_progress_max
        since_step = sum(at > self.training.stepped_at for at in self._faults)
        since_further = sum(at > self.training.further_at for at in self._faults)
        return since_step >= limit or since_further >= 3 * limit

    # ------------------------------------------------------------ peace

    def _make_peace(self) -> None:
        self.hostilities.peace()
        self.resets.calm()
        self.returns.calm()
        self.replacing.calm()
        self.suspicions.calm()
        for agent in self.agents.values():  # an operator has repaired all machines
            self.supervisor.append(NodeCordonRequested(self.world.now, agent.name, False, "peace"))
            self.supervisor.append(NodeRepaired(self.world.now, agent.name))
        begun = self.world.now
        self.training.target = max([0, *self.training.progress.values()]) + STEPS_IN_PEACE
        self.world.after(RECOVERED_S, lambda: self._trains_since(begun))

    def _trains_since(self, begun: float) -> None:
        if self.training.stepped_at <= begun and not self._complete():
            raise Violation(
                f"there has been peace for {RECOVERED_S:g} s, and the job does not train: it is {self._state()}"
            )

    def _complete(self) -> bool:
        """Asked before each action; few of them commit another state."""
        state = self.supervisor.committed
        if state is not self._seen:
            job = state.jobs.get(JOB)
            self._seen, self._is_complete = state, job is not None and job.phase.finished
        return self._is_complete

    def _whimsical(self, incident: Incident, job: JobView) -> Action:
        """Decide as a user's policy that often returns impossible actions, so that the default policy must decide."""
        kinds = [kind for kind in ActionKind if kind not in (ActionKind.STOP, ActionKind.WAIT, ActionKind.CORDON)]
        if self.world.chance.random() < 0.5:
            return default(incident, job)
        nodes = tuple(self.world.chance.sample(job.nodes, k=min(len(job.nodes), self.world.chance.randint(0, 2))))
        dp = self.world.chance.choice((None, 1, 2, 3))
        return Action(self.world.chance.choice(kinds), "a whim", nodes, dp)

    # ------------------------------------------------------------ surroundings of the agents

    def workers_changed(self, agent: Agent) -> None:
        self.truth.changed(agent)
        self.training.changed(agent)
        self.diagnostics.changed(agent)

    def gpus_reset(self, agent: Agent, failure: str) -> None:
        if not failure:
            self.invariants.gpus_reset(agent.name)
            return
        repaired = lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name))  # noqa: E731
        self.world.after(self.resets.chance.uniform(*REPAIRED_S), repaired)

    # ------------------------------------------------------------ faults

    def _plan_faults(self) -> None:
        if self.allocations is not None:
            for each in self.allocations.all:
                self.world.after(each.ends_s, lambda allocation=each: self._end(allocation))  # type: ignore[misc]
            return
        chance = self.world.chance
        kinds: list[Callable[[], None]] = [self._crash_supervisor, self._cut_control, self._cut_telemetry]
        if not self.control_plane_only:
            kinds += [self._crash_worker, self._lose_node, self._hang, self._xid, self._cut_all, self._restart_agent]
            kinds += [self._crash_worker, self._lose_node, self._cordon, self._lose_finding_race]
        if self.store is not None:
            kinds.append(self._lose_store)
        if self.checkpoints.rot and not self.control_plane_only:
            kinds += [self._rot, self._rot, self._lose_node_and_disk]
        first = 3.0 if self.control_plane_only else 1.0
        when = chance.uniform(first, FAULTS_END_S)
        for _ in range(chance.randint(1, 8)):
            # Half of the faults follow shortly after another one, so that they occur during its recovery.
            near = min(FAULTS_END_S, when + chance.uniform(0.0, 1.5))
            when = near if chance.random() < 0.5 else chance.uniform(first, FAULTS_END_S)
            self.world.after(when, chance.choice(kinds))
        if self.hostility:
            self.hostilities.plan(first, FAULTS_END_S)
            self.world.after(self.hostility.peace_s, self._make_peace)
        for _ in range(0 if self.control_plane_only else self.resets.faults):
            self.world.after(self.resets.chance.uniform(first, FAULTS_END_S), self._gpu_needs_reset)
        for _ in range(0 if self.control_plane_only else self.returns.faults):
            self.world.after(self.returns.chance.uniform(first, FAULTS_END_S), self._hardware_fails)
        for _ in range(0 if self.control_plane_only else self.suspicions.faults):
            self.world.after(self.suspicions.chance.uniform(first, FAULTS_END_S), self._segfault)
        for kill in self.kills:
            self.world.after(kill.at_s, lambda each=kill: self.supervisor.append(each.event(self.world.now)))  # type: ignore[misc]
        for maintenance in () if self.control_plane_only else Maintenance.of(self.world.seed):
            self.world.after(maintenance.announced_s, lambda each=maintenance: self._announce(each))  # type: ignore[misc]
        for ending in () if self.control_plane_only else Maintenance.of_agents(self.world.seed):
            self.world.after(ending.announced_s, lambda each=ending: self._terminate_agent(each))  # type: ignore[misc]

    def _victim(self) -> Agent | None:
        """Choose the node of a fault, in most cases one that runs ranks."""
        running = [a for a in self.agents.values() if a.alive and a.workers is not None]
        alive = (
            running if running and self.world.chance.random() < 0.85 else [a for a in self.agents.values() if a.alive]
        )
        return self.world.chance.choice(alive) if alive else None

    def _fault(self, what: str) -> None:
        """Record a fault that interrupts the training."""
        self.world.say(f"FAULT {what}")
        self._faults.append(self.world.now)

    def _crash_supervisor(self) -> None:
        if self.supervisor.leading:
            self.supervisor.crash_in = self.world.chance.randint(1, 8)

    def _cut_control(self) -> None:
        if (agent := self._victim()) is not None and not (self.control_plane_only and agent.name in self.doubted):
            self.world.say(f"FAULT control partition of {agent.name}")
            agent.control_cut = True
            self.supervisor.hang_up(agent)
            self.world.soon(0.1, 10.0, lambda: setattr(agent, "control_cut", False))

    def _cut_telemetry(self) -> None:
        agent = self._victim()
        if agent is None or (self.control_plane_only and not self.supervisor.sees(agent)):
            return
        self.world.say(f"FAULT telemetry partition of {agent.name}")
        self.doubted.add(agent.name)  # a node without both links counts as lost, even if it runs
        agent.telemetry_cut = True
        self.diagnostics.cut(agent)
        self.world.soon(0.5, 10.0, lambda: setattr(agent, "telemetry_cut", False))

    def _cut_all(self) -> None:
        """Cut both links of a node whose workers continue to run."""
        if (agent := self._victim()) is not None:
            self._fault(f"full partition of {agent.name}")
            agent.control_cut = agent.telemetry_cut = True
            self.supervisor.hang_up(agent)
            self.diagnostics.cut(agent)

            def heal() -> None:
                agent.control_cut = agent.telemetry_cut = False

            self.world.soon(1.0, 20.0, heal)

    def _lose_node(self) -> None:
        if (agent := self._victim()) is not None:
            self._fault(f"node loss: {agent.name}")
            self.supervisor.hang_up(agent)
            self._node_lost(agent)
            agent.die(machine=True)
            self.world.soon(5.0, 30.0, agent.boot)

    def _lose_node_and_disk(self) -> None:
        """Lose one or two nodes with their disks. Two can hold both copies of a shard, which then is only in the object
        store."""
        for _ in range(self.world.chance.randint(1, 2)):
            if (agent := self._victim()) is not None:
                self._fault(f"node loss with its disk: {agent.name}")
                self.supervisor.hang_up(agent)
                self._node_lost(agent)
                agent.die(machine=True, disk=True)
                self.world.soon(5.0, 30.0, agent.boot)

    def _rot(self) -> None:
        """Corrupt some copies on one node. This is detected only when a copy is read."""
        if (agent := self._victim()) is not None and (keys := agent.replicator.keys(JOB)):
            spoilt = self.world.chance.sample(keys, k=self.world.chance.randint(1, len(keys)))
            self.world.say(f"FAULT {len(spoilt)} copies rot on {agent.name}")
            for key in spoilt:
                agent.replicator.rot(JOB, key)

    def _lose_store(self) -> None:
        store = self.store
        assert store is not None
        self.world.say("FAULT the object store is away")
        store.away = True
        self.world.soon(1.0, 40.0, lambda: setattr(store, "away", False))

    def _restart_agent(self) -> None:
        if (agent := self._victim()) is not None:
            self._fault(f"agent restart: {agent.name}")
            self.supervisor.hang_up(agent)
            self._node_lost(agent)
            agent.die(machine=False)
            self.world.soon(0.2, 3.0, agent.boot)

    def _lose_finding_race(self) -> None:
        """Lose a node, and let the peers' collective errors be reported before the loss."""
        if (agent := self._victim()) is not None and agent.workers is not None:
            generation = agent.workers.order.generation
            peer = next((a for a in self.training.members(generation) if a is not agent), None)
            if peer is not None and peer.workers is not None:
                self._fault(f"worker crash: rank {peer.ranks[0]} on {peer.name}")
                self.workers.fails_with_another(peer, peer.ranks[0])
            self._lose_node_now(agent)

    def _lose_node_now(self, agent: Agent) -> None:
        self._fault(f"node loss with an echo: {agent.name}")
        self.supervisor.hang_up(agent)
        self._node_lost(agent)
        agent.die(machine=True)
        self.world.soon(5.0, 30.0, agent.boot)

    def _crash_worker(self) -> None:
        agent = self._victim()
        if agent is not None and agent.workers is not None:
            rank = self.world.chance.choice(agent.ranks)
            self._fault(f"worker crash: rank {rank} on {agent.name}")
            self.workers.crash(agent, rank)

    def _segfault(self) -> None:
        """End a worker by a signal that makes its node a suspect."""
        chance = self.suspicions.chance
        running = [agent for agent in self.agents.values() if agent.alive and agent.workers is not None and agent.ranks]
        if running:
            agent = chance.choice(running)
            assert agent.workers is not None
            rank = chance.choice(agent.ranks)
            self._fault(f"worker crash by a POSIX signal of its own: rank {rank} on {agent.name}")
            self.workers.crash_by_signal(agent, rank)

    def failed_tests(self, agent: Agent) -> None:
        repaired = lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name))  # noqa: E731
        self.world.after(self.suspicions.chance.uniform(*REPAIRED_S), repaired)

    def _hang(self) -> None:
        agent = self._victim()
        if agent is not None and agent.workers is not None and agent.workers.started:
            rank = self.world.chance.choice(agent.ranks)
            self._fault(f"hang: rank {rank} on {agent.name}")
            self.workers.hang(agent, rank)

    def _xid(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT Xid 79 on {agent.name}")
            self.workers.off_the_bus(agent)
            self.world.soon(5.0, 40.0, lambda: self._repaired(agent))

    def _repaired(self, agent: Agent, patience_s: float = REPORTED_LATE_S) -> None:
        """An operator marks the node as repaired, and does so again if its fault is reported after that."""
        self.supervisor.append(NodeRepaired(self.world.now, agent.name))
        if patience_s > 0:
            self.world.after(REPAIR_LOOK_S, lambda: self._look_at(agent, patience_s - REPAIR_LOOK_S))

    def _look_at(self, agent: Agent, patience_s: float) -> None:
        node = self.supervisor.committed.nodes.get(agent.name)
        if node is not None and node.unschedulable_reason and not node.quarantined:
            self._repaired(agent, patience_s)
        elif patience_s > 0:
            self.world.after(REPAIR_LOOK_S, lambda: self._look_at(agent, patience_s - REPAIR_LOOK_S))

    def _gpu_needs_reset(self) -> None:
        """Let a GPU need a reset. In most cases its rank ends as well, which is reported before or after the driver's
        message."""
        running = [agent for agent in self.agents.values() if agent.alive and agent.workers is not None]
        idle = [agent for agent in self.agents.values() if agent.alive]
        chance = self.resets.chance
        if not (able := running if running and chance.random() < 0.9 else idle):
            return
        agent = chance.choice(able)
        later = self.resets.can_wait()
        self._fault(f"a GPU of {agent.name} needs a reset{', which can wait' if later else ''}")
        delay_s = chance.uniform(0.0, 1.5)
        self.world.after(delay_s, lambda: self.workers.needs_reset(agent, later=later))
        if agent.workers is not None and not later and chance.random() < 0.7:
            self.workers.crash(agent, chance.choice(agent.ranks))
        repaired = lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name))  # noqa: E731
        self.world.after(chance.uniform(*REPAIRED_S), repaired)

    def _hardware_fails(self) -> None:
        """Let the hardware of a node fail. The machine is booted, and often fails again: in its hold-down, on probation, or
        later."""
        running = [agent for agent in self.agents.values() if agent.alive and agent.workers is not None]
        idle = [agent for agent in self.agents.values() if agent.alive]
        chance = self.returns.chance
        if able := running if running and chance.random() < 0.7 else idle:
            self._fail_hardware(chance.choice(able))

    def _fail_hardware(self, agent: Agent) -> None:
        chance = self.returns.chance
        if not agent.alive or self.returns.at_peace:
            return
        self._fault(f"Xid 79 on {agent.name}, which will be booted")
        self.workers.off_the_bus(agent)
        if chance.random() < 0.3:  # an operator first restarts the agent, which is not sufficient
            self.world.after(chance.uniform(0.5, 5.0), lambda: self._boot(agent, machine=False))
        if not self.returns.ordered:
            self.world.after(chance.uniform(5.0, 10.0), lambda: self._boot(agent, machine=True))
        if chance.random() < 0.5:
            self.world.after(chance.uniform(10.0, 60.0), lambda: self._fail_hardware(agent))
        repaired = lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name))  # noqa: E731
        self.world.after(chance.uniform(*LOOKED_AT_S), repaired)

    def booting(self, agent: Agent) -> None:
        """Boot the machine after a short delay, because the agent's command was accepted."""
        self.world.after(self.returns.chance.uniform(0.1, 3.0), lambda: self._boot(agent, machine=True))

    def _request_replacement(self, epoch: int, wanted: RequestReplacement) -> None:
        """Ask the provider of machines. It carries out its answer even if the leader that asked has ended."""
        agent, does = self.agents[wanted.node], self.replacing.answer()
        self.world.say(f"the provider is asked to replace {wanted.node} ({wanted.request}): {does}")
        if does != "answers nothing" and self.supervisor.leading and self.supervisor.epoch == epoch:
            ok = does != "refuses"
            self.supervisor.tell(ProviderAnswered(self.world.now, wanted.node, wanted.request, ok, does))
        if does == "agrees":
            self.world.after(self.replacing.chance.uniform(1.0, 10.0), lambda: self._replace(agent))

    def _replace(self, agent: Agent) -> None:
        """Replace a machine by another one with the same name and empty disks."""
        self._fault(f"{agent.name} is replaced")
        if agent.alive:
            self.supervisor.hang_up(agent)
            self._node_lost(agent)
        agent.die(machine=True, disk=True)
        agent.machine += 1
        if self.invariants.replacements is not None:
            self.invariants.replacements.came(agent.name)
        self.world.after(self.replacing.chance.uniform(0.5, 8.0), agent.boot)

    def _boot(self, agent: Agent, *, machine: bool) -> None:
        if agent.alive:
            self._fault(f"{agent.name} is booted" if machine else f"agent restart: {agent.name}")
            self.supervisor.hang_up(agent)
            self._node_lost(agent)
            agent.die(machine=machine)
            self.world.after(self.returns.chance.uniform(0.2, 8.0), agent.boot)

    def _announce(self, maintenance: Maintenance) -> None:
        agent = list(self.agents.values())[maintenance.node % len(self.agents)]
        self.world.say(f"maintenance of {agent.name} is announced")
        starts_at = None if maintenance.starts_s is None else self.world.now + maintenance.starts_s
        self.workers.announced(agent, "file", "reboot", starts_at)

        def take() -> None:
            if agent.alive:
                self._lose_node_now(agent)

        def over() -> None:
            self.diagnostics.notice(agent, "file", "")

        maintenance.play(self.world.after, take, over)

    def _end(self, allocation: Allocation) -> None:
        """End the allocation of all machines, as a scheduler does. Another allocation returns them later."""
        assert self.allocations is not None
        assert self.invariants.allocations is not None
        promises, chance = self.invariants.allocations, self.allocations.chance
        self.world.say(f"FAULT the allocation ends in {allocation.grace_s:.1f} s")
        job = self.supervisor.committed.jobs.get(JOB)
        promises.agents_end(allocation, self.training.step, trains=job is not None and job.phase is JobPhase.RUNNING)
        over_at = self.world.now + allocation.grace_s
        for agent in self.agents.values():
            self.world.after(
                chance.uniform(0.0, APART_S),
                lambda each=agent: self._sigterm(  # type: ignore[misc]
                    each, over_at, lambda: self._leave_allocation(each, boots=allocation.boots)
                ),
            )
        if allocation.supervisor_goes_s is not None:
            away_s = (1.0, allocation.grace_s + allocation.away_s)
            self.world.after(allocation.supervisor_goes_s, lambda: self._crash_supervisor_for(away_s))
        trained = job is not None and job.phase is JobPhase.RUNNING
        back_at = over_at + allocation.away_s

        def back() -> None:
            led_s = self.world.now - max(self.supervisor.led_since, over_at + APART_S)
            known_s = led_s if self.supervisor.leading else 0.0
            promises.before_return(self.supervisor.committed, trained=trained and not self._complete(), known_s=known_s)
            for agent in self.agents.values():
                self.world.after(chance.uniform(0.0, BACK_WITHIN_S), agent.boot)

        self.world.at(back_at, back)

    def _crash_supervisor_for(self, away_s: tuple[float, float]) -> None:
        if self.supervisor.leading:
            self.supervisor.crash(away_s)

    def _leave_allocation(self, agent: Agent, *, boots: bool) -> None:
        self.world.say(f"the agent of {agent.name} has ended")
        self.supervisor.hang_up(agent)
        self._node_lost(agent)
        agent.die(machine=boots)

    def _terminate_agent(self, ending: Maintenance) -> None:
        """Send SIGTERM to an agent with workers."""
        agent = list(self.agents.values())[ending.node % len(self.agents)]
        if agent.alive and agent.workers and ending.taken_s is not None and agent.incarnation not in self._terminated:
            self._sigterm(agent, self.world.now + ending.taken_s, lambda: self._lose_node_now(agent))

    def _sigterm(self, agent: Agent, over_at: float, ended: Callable[[], None]) -> None:
        """Let the agent report its end. It ends when it has neither workers nor copies to make, or at the end of its grace
        period."""
        if not agent.alive:
            return
        life = agent.incarnation
        self._terminated.add(life)
        if not agent.workers:
            ended()
            return
        self.world.say(f"the agent of {agent.name} is asked to end within {over_at - self.world.now:.1f} s")
        self.workers.announced(agent, TERMINATION, "its agent was asked to end", over_at, life)

        def end() -> None:
            if agent.alive and agent.incarnation == life:
                if (agent.workers or agent.replicator.is_copying(JOB)) and self.world.now < over_at:
                    self.world.after(0.5, end)
                else:
                    ended()

        self.world.after(0.5, end)

    def _cordon(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT an operator cordons {agent.name}")

            def request(cordoned: bool) -> None:
                self.supervisor.append(NodeCordonRequested(self.world.now, agent.name, cordoned, "maintenance"))

            request(True)
            self.world.soon(5.0, 30.0, lambda: request(False))

    # ------------------------------------------------------------ interface for hostile worlds

    def lose_log(self, everything: bool) -> None:
        supervisor, lost_s = self.supervisor, self.world.spite.uniform(0.0, FLUSHED_S)
        if everything:
            self.world.say("FAULT the log loses everything")
            supervisor.lose_log(None)
        else:
            self.world.say(f"FAULT the log loses its last {lost_s:.3f} s")
            supervisor.lose_log(lost_s)
        self.invariants.log_went_back(supervisor.committed)
        if supervisor.leading:
            supervisor.crash()

    def crash_worker(self) -> None:
        self._crash_worker()

    def out_of_contact(self, agent: Agent) -> None:
        self.doubted.add(agent.name)
        self.diagnostics.cut(agent)

    # ------------------------------------------------------------ diagnostics

    def _node_lost(self, agent: Agent) -> None:
        """Record that the agent, or its connection, is about to end."""
        self.truth.out_of_contact(agent)
        self.truth.begins(FindingKind.NODE_LOST, agent)


def simulate(seed: int, *, tracing: bool = False, fold: Step = step, hostility: Hostility | None = None) -> Result:
    """Run one seed to its end. `hostility` replaces that of the seed. Raises `Violation` if a promise is broken."""
    scenario: Scenario | SeveralJobs
    if seed >= IDLE_LINKS_FROM and hostility is None:
        scenario = IdleLinks(seed, tracing=tracing, fold=fold)
    elif seed >= SEVERAL_JOBS_FROM and hostility is None:
        scenario = SeveralJobs(seed, tracing=tracing, fold=fold)
    else:
        scenario = Scenario(seed, tracing=tracing, fold=fold, hostility=hostility)
    try:
        outcome = scenario.run()
        if isinstance(outcome, Result):
            return outcome
        return Result(seed, *outcome, tuple(scenario.world.trace))
    except Exception as error:
        if isinstance(error, Violation):
            error.args = (f"seed {seed}, at {scenario.world.now - 1000.0:.3f} s: {error}", *scenario.world.trace)
        raise
