"""One simulated run: a job on a small fleet, faults by chance, and then peace. It must end trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.domain.job import CheckpointSpec, JobSpec, LaunchSpec, LimitSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Report
from holdfast.policy import JobView, default
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.invariants import Invariants
from holdfast.sim.maintenance import Maintenance
from holdfast.sim.store import URL, Store
from holdfast.sim.supervisor import Policy, Step, Supervisor
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Config, step
from holdfast.supervisor.interval import STEPS_UNMEASURED
from holdfast.supervisor.offenders import Rules
from holdfast.supervisor.protocol import (
    FindingArrived,
    JobPhase,
    JobSubmitted,
    NodeCordonRequested,
    NodeRepaired,
    StepsCompleted,
)

STEP_S = 0.5
STALL_S = 1e-4  # so little that the best interval lies between the bounds
INTERVAL = 5
HANG_S = 5.0
RECONNECT_S = (0.05, 0.5)
FAULTS_END_S = 30.0
LIMIT_S = 3000.0  # after the faults: the breaker's window and the retries are minutes, not hours

# Quarantine for the first fault that is a node's own: the run must end trained all the same.
HARSH = Rules(limit=0.9, together_s=0.2, fraction_max=0.5)

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


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    seconds: float  # virtual, until the job was complete
    generations: int
    incidents: int
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How the job saves. Three of five seeds replay as they did before there was an object store."""

    store: bool = False
    sharded: bool = False  # over dp
    auto: bool = False  # the supervisor chooses the interval
    rot: bool = False  # copies go bad, disks are lost with their nodes

    @classmethod
    def of(cls, seed: int) -> Checkpoints:
        if seed % 5 > 1:
            return cls()
        chance = Random(f"checkpoints of {seed}")
        return cls(chance.random() < 0.8, chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.7)

    @property
    def spec(self) -> CheckpointSpec:
        interval, store = 0 if self.auto else INTERVAL, URL if self.store else ""
        return CheckpointSpec(interval, 2, 2 * STEP_S, INTERVAL * STEP_S, store)


class Scenario:
    """Agents, network, diagnostics and the user's job around a supervisor."""

    def __init__(self, seed: int, *, tracing: bool = False, fold: Step = step) -> None:
        self.world = World(seed, tracing)
        self.checkpoints = Checkpoints.of(seed)
        self.store = Store(self.world) if self.checkpoints.store else None
        self.sharded = self.checkpoints.sharded
        chance = self.world.chance
        dims, width, spares, capacity = chance.choice(_MESHES)
        mesh = Mesh.of(dims)
        nodes = mesh.world_size // width
        self.spec = JobSpec(
            JOB,
            LaunchSpec("/train.py"),
            nodes,
            width,
            mesh,
            min_dp=chance.randint(1, mesh.dp),
            max_dp=mesh.dp,
            checkpoint=self.checkpoints.spec,
            limits=LimitSpec(prepare_timeout_s=5.0, first_step_timeout_s=20.0, restarts_without_progress_max=1000),
        )
        self.target = chance.randint(25, 45)
        # Every fifth run loses nothing but its control plane: then the training must not notice.
        self.control_plane_only = chance.random() < 0.2
        self.agents: dict[str, Agent] = {}
        for index in range(nodes + spares):
            name = f"n{index}"
            self.agents[name] = Agent(self.world, self, name, chance.choice(("a", "b", "")), capacity)
        interval = STEPS_UNMEASURED if self.checkpoints.auto else INTERVAL
        self.invariants = Invariants(
            self.agents, self.spec.min_dp, self.spec.max_dp, interval, self.store, self.sharded
        )
        policy: Policy = default if chance.random() < 0.8 else self._whimsical
        config = Config(offenders=HARSH) if seed % 7 == 3 else Config()
        self.supervisor = Supervisor(self.world, self.agents, self.invariants, policy, fold, config)
        self.step = 0  # of the newest generation that ran
        self.progress: dict[int, int] = {}  # generation → newest step
        self._ticking: dict[int, int] = {}
        self._finding = 0
        self._doubted: set[str] = set()

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        self.supervisor.lead()
        for agent in self.agents.values():
            agent.slow_share = 0.0 if self.control_plane_only else agent.slow_share
            agent.boot()
            self._keep_connected(agent)
        self.world.after(1.0, lambda: self.supervisor.append(JobSubmitted(self.world.now, self.spec, "token")))
        self._plan_faults()
        done = self.world.run(self.world.now + FAULTS_END_S + LIMIT_S, self._complete)
        job = self.supervisor.committed.jobs.get(JOB)
        if not done or job is None or job.phase is not JobPhase.COMPLETED:
            state = f"{job.phase}: {job.reason}" if job else "not there"
            raise Violation(
                f"there are enough nodes and no faults any more, but the job is {state}, at step {self.step}"
            )
        if self.control_plane_only and job.number != 1:
            raise Violation(f"only the control plane failed, and the run was restarted {job.number - 1} times")
        if self.supervisor.committed.incidents:
            raise Violation(f"open incidents of a completed job: {sorted(self.supervisor.committed.incidents)}")
        return Result(
            self.world.seed, self.world.now - 1000.0, job.number, len(self.invariants.opened), tuple(self.world.trace)
        )

    def _complete(self) -> bool:
        job = self.supervisor.committed.jobs.get(JOB)
        return job is not None and job.phase.finished

    def _keep_connected(self, agent: Agent) -> None:
        self.supervisor.dial(agent)
        self.world.soon(*RECONNECT_S, lambda: self._keep_connected(agent))

    def _whimsical(self, incident: Incident, job: JobView) -> Action:
        """A user's policy that often answers what cannot be done: the default must step in."""
        kinds = [kind for kind in ActionKind if kind not in (ActionKind.STOP, ActionKind.WAIT, ActionKind.CORDON)]
        if self.world.chance.random() < 0.5:
            return default(incident, job)
        nodes = tuple(self.world.chance.sample(job.nodes, k=min(len(job.nodes), self.world.chance.randint(0, 2))))
        dp = self.world.chance.choice((None, 1, 2, 3))
        return Action(self.world.chance.choice(kinds), "a whim", nodes, dp)

    # ------------------------------------------------------------ surroundings of the agents

    def deliver(self, agent: Agent, session: int, seq: int, report: Report) -> None:
        self.supervisor.deliver(agent, session, seq, report)

    def neighbour(self, node: str) -> Agent | None:
        return self.agents.get(node)

    def workers_changed(self) -> None:
        whole = self._whole()
        self.invariants.at_most_one_runs(whole)
        for generation in whole:
            if generation not in self._ticking:
                self._ticking[generation] = 1
                self.world.after(STEP_S, lambda g=generation: self._tick(g))  # type: ignore[misc]

    def _members(self, generation: int) -> list[Agent]:
        return [
            a
            for a in self.agents.values()
            if a.alive and a.workers is not None and a.workers.order.generation == generation
        ]

    def _whole(self) -> list[int]:
        """Generations of which every rank is alive and running."""
        ranks: dict[int, int] = {}
        world_size: dict[int, int] = {}
        for agent in self.agents.values():
            if agent.alive and agent.workers is not None and agent.workers.running:
                order = agent.workers.order
                ranks[order.generation] = ranks.get(order.generation, 0) + order.placement.nproc
                world_size[order.generation] = order.mesh.world_size
        return sorted(g for g, count in ranks.items() if count == world_size[g])

    # ------------------------------------------------------------ training

    def _tick(self, generation: int) -> None:
        """One step of lock-step training, when every rank can take part."""
        self._ticking.pop(generation, None)
        if generation not in self._whole():
            return  # somebody is missing: workers_changed() starts it again
        members = self._members(generation)
        first = generation not in self.progress
        start = members[0].workers.order.restore_step if members[0].workers else 0
        step = self.progress.get(generation, start) + 1
        if step > self.target:  # it was restored at its last step: nothing is left to do
            for agent in members:
                agent.finished()
            return
        self.progress[generation] = self.step = step
        saves = 0
        for agent in members:
            if first:
                agent.stepped(step)
            if agent.workers is not None and agent.workers.due(step):
                saves = 1
                self.world.soon(0.0, 0.1, self._saving(agent, generation, step))
        if all(not agent.telemetry_cut for agent in members):
            ended_at = self.world.now
            done = lambda: self.supervisor.append(  # noqa: E731
                StepsCompleted(self.world.now, JOB, generation, step, ended_at, 1, STEP_S, saves, saves * STALL_S)
            )
            self.world.soon(0.1, 0.4, done)
        if step == self.target:
            for agent in members:
                agent.finished()
            return
        self._ticking[generation] = 1
        self.world.after(STEP_S, lambda: self._tick(generation))

    def _saving(self, agent: Agent, generation: int, step: int) -> Callable[[], None]:
        def save() -> None:
            workers = agent.workers
            if agent.alive and workers is not None and workers.order.generation == generation:
                order = workers.order
                agent.save(step)
                for rank in agent.ranks:
                    self.invariants.saved(order.attempt, step, rank, order.mesh)

        return save

    # ------------------------------------------------------------ faults

    def _plan_faults(self) -> None:
        chance = self.world.chance
        kinds: list[Callable[[], None]] = [self._crash_supervisor, self._cut_control, self._cut_telemetry]
        if not self.control_plane_only:
            kinds += [self._crash_worker, self._lose_node, self._hang, self._xid, self._cut_all, self._restart_agent]
            kinds += [self._crash_worker, self._lose_node, self._cordon, self._lose_finding_race]
        if self.store is not None:
            kinds.append(self._store_goes)
        if self.checkpoints.rot and not self.control_plane_only:
            kinds += [self._rot, self._rot, self._lose_node_and_disk]
        first = 3.0 if self.control_plane_only else 1.0
        when = chance.uniform(first, FAULTS_END_S)
        for _ in range(chance.randint(1, 8)):
            # Faults come in swarms: the next one likes to strike while the last one is being repaired.
            near = min(FAULTS_END_S, when + chance.uniform(0.0, 1.5))
            when = near if chance.random() < 0.5 else chance.uniform(first, FAULTS_END_S)
            self.world.after(when, chance.choice(kinds))
        for maintenance in () if self.control_plane_only else Maintenance.of(self.world.seed):
            self.world.after(maintenance.announced_s, lambda each=maintenance: self._announce(each))  # type: ignore[misc]

    def _victim(self) -> Agent | None:
        """Most faults strike a node that runs."""
        running = [a for a in self.agents.values() if a.alive and a.workers is not None]
        alive = (
            running if running and self.world.chance.random() < 0.85 else [a for a in self.agents.values() if a.alive]
        )
        return self.world.chance.choice(alive) if alive else None

    def _crash_supervisor(self) -> None:
        if self.supervisor.leading:
            self.supervisor.crash_in = self.world.chance.randint(1, 8)

    def _cut_control(self) -> None:
        if (agent := self._victim()) is not None and not (self.control_plane_only and agent.name in self._doubted):
            self.world.say(f"FAULT control partition of {agent.name}")
            agent.control_cut = True
            self.supervisor.hang_up(agent)
            self.world.soon(0.1, 10.0, lambda: setattr(agent, "control_cut", False))

    def _cut_telemetry(self) -> None:
        agent = self._victim()
        if agent is None or (self.control_plane_only and not agent.session):
            return
        self.world.say(f"FAULT telemetry partition of {agent.name}")
        self._doubted.add(agent.name)  # losing both is a lost node, whatever is left of it
        agent.telemetry_cut = True
        self._node_lost(agent)
        self.world.soon(0.5, 10.0, lambda: setattr(agent, "telemetry_cut", False))

    def _cut_all(self) -> None:
        """The node is out of sight, its workers live."""
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT full partition of {agent.name}")
            agent.control_cut = agent.telemetry_cut = True
            self.supervisor.hang_up(agent)
            self._node_lost(agent)

            def heal() -> None:
                agent.control_cut = agent.telemetry_cut = False

            self.world.soon(1.0, 20.0, heal)

    def _lose_node(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT node loss: {agent.name}")
            self.supervisor.hang_up(agent)
            self._node_lost(agent)
            agent.die(machine=True)
            self.world.soon(5.0, 30.0, agent.boot)

    def _lose_node_and_disk(self) -> None:
        """Two of them at once take both copies of a shard: what is left is in the object store."""
        for _ in range(self.world.chance.randint(1, 2)):
            if (agent := self._victim()) is not None:
                self.world.say(f"FAULT node loss with its disk: {agent.name}")
                self.supervisor.hang_up(agent)
                self._node_lost(agent)
                agent.die(machine=True, disk=True)
                self.world.soon(5.0, 30.0, agent.boot)

    def _rot(self) -> None:
        """Some copies on one node cannot be read any more, and nobody knows until somebody wants them."""
        if (agent := self._victim()) is not None and agent.memory:
            keys = sorted(agent.memory, key=lambda key: (key.attempt, key.step, key.rank))
            spoilt = self.world.chance.sample(keys, k=self.world.chance.randint(1, len(keys)))
            self.world.say(f"FAULT {len(spoilt)} copies rot on {agent.name}")
            agent.rotten.update(spoilt)

    def _store_goes(self) -> None:
        store = self.store
        assert store is not None
        self.world.say("FAULT the object store is away")
        store.away = True
        self.world.soon(1.0, 40.0, lambda: setattr(store, "away", False))

    def _restart_agent(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT agent restart: {agent.name}")
            self.supervisor.hang_up(agent)
            agent.die(machine=False)
            if self.world.chance.random() < 0.3:
                self._node_lost(agent)
            self.world.soon(0.2, 3.0, agent.boot)

    def _lose_finding_race(self) -> None:
        """A node goes, and peers' collective errors are reported before its loss is."""
        if (agent := self._victim()) is not None and agent.workers is not None:
            generation = agent.workers.order.generation
            peer = next((a for a in self._members(generation) if a is not agent), None)
            if peer is not None and peer.workers is not None:
                peer.workers.dead.add(peer.ranks[0])
                self._find(FindingKind.WORKER_CRASH, peer, generation, 0.01, rank=peer.ranks[0], key="echo")
            self._lose_node_now(agent)

    def _lose_node_now(self, agent: Agent) -> None:
        self.world.say(f"FAULT node loss with an echo: {agent.name}")
        self.supervisor.hang_up(agent)
        self._node_lost(agent)
        agent.die(machine=True)
        self.world.soon(5.0, 30.0, agent.boot)

    def _crash_worker(self) -> None:
        agent = self._victim()
        if agent is not None and agent.workers is not None:
            rank = self.world.chance.choice(agent.ranks)
            self.world.say(f"FAULT worker crash: rank {rank} on {agent.name}")
            agent.workers.dead.add(rank)
            self._find(FindingKind.WORKER_CRASH, agent, agent.workers.order.generation, 0.01, rank=rank)

    def _hang(self) -> None:
        agent = self._victim()
        if agent is not None and agent.workers is not None and agent.workers.started:
            rank = self.world.chance.choice(agent.ranks)
            self.world.say(f"FAULT hang: rank {rank} on {agent.name}")
            agent.workers.hung.add(rank)
            self._find(FindingKind.HANG, agent, agent.workers.order.generation, HANG_S, rank=rank)

    def _xid(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT Xid 79 on {agent.name}")
            self._find(FindingKind.GPU_ERROR, agent, 0, 0.1, severity=Severity.FATAL)
            repaired = lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name))  # noqa: E731
            self.world.soon(5.0, 40.0, repaired)

    def _announce(self, maintenance: Maintenance) -> None:
        agent = list(self.agents.values())[maintenance.node % len(self.agents)]
        self.world.say(f"maintenance of {agent.name} is announced")
        self._find(
            FindingKind.MAINTENANCE, agent, 0, 0.1, None, Severity.WARNING, **maintenance.evidence(self.world.now)
        )

        def take() -> None:
            if agent.alive:
                self._lose_node_now(agent)

        def over() -> None:
            self._find(FindingKind.MAINTENANCE, agent, 0, 0.1, None, Severity.INFO, source="file", withdraws="notice")

        maintenance.play(self.world.after, take, over)

    def _cordon(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT an operator cordons {agent.name}")

            def request(cordoned: bool) -> None:
                self.supervisor.append(NodeCordonRequested(self.world.now, agent.name, cordoned, "maintenance"))

            request(True)
            self.world.soon(5.0, 30.0, lambda: request(False))

    # ------------------------------------------------------------ diagnostics

    def _node_lost(self, agent: Agent) -> None:
        generation = agent.workers.order.generation if agent.workers else 0
        self._find(FindingKind.NODE_LOST, agent, generation, 0.4)

    def _find(
        self,
        kind: FindingKind,
        agent: Agent,
        generation: int,
        delay_s: float,
        rank: int | None = None,
        severity: Severity = Severity.ERROR,
        key: str = "",
        **evidence: str,
    ) -> None:
        """Findings are never lost; they come late, and more than once."""
        since = self.world.now
        self._finding += 1
        identifier = f"{kind}{key}:{agent.name}:{self._finding}"
        at = since + delay_s

        def arrive() -> None:
            finding = Finding(
                identifier,
                kind,
                severity,
                at,
                since,
                f"{kind} on {agent.name}",
                agent.name,
                JOB if generation else "",
                generation,
                rank,
                evidence=evidence,
            )
            self.supervisor.append(FindingArrived(self.world.now, finding))

        self.world.after(delay_s + self.world.chance.uniform(0.0, 0.3), arrive)
        if self.world.chance.random() < 0.2:
            self.world.after(delay_s + self.world.chance.uniform(0.0, 5.0), arrive)


def simulate(seed: int, *, tracing: bool = False, fold: Step = step) -> Result:
    """Run one seed to its end. Raises `Violation` when a promise is broken."""
    scenario = Scenario(seed, tracing=tracing, fold=fold)
    try:
        return scenario.run()
    except Exception as error:
        if isinstance(error, Violation):
            error.args = (f"seed {seed}, at {scenario.world.now - 1000.0:.3f} s: {error}", *scenario.world.trace)
        raise
