"""One simulated run: a job on a small fleet, random faults, and then *peace*, a time without faults. The job must complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from random import Random

from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.domain.job import CheckpointSpec, HangSpec, JobSpec, LaunchSpec, LimitSpec
from holdfast.domain.mesh import Mesh
from holdfast.policy import JobView, default
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.allocations import ALLOCATIONS_FROM, AllocationPromises, Allocations
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.endings import Endings
from holdfast.sim.faults import Faults
from holdfast.sim.hostility import Hostilities, Hostility
from holdfast.sim.idle import IdleLinks
from holdfast.sim.invariants import Invariants
from holdfast.sim.leader_time import LeaderTime
from holdfast.sim.log import FLUSHED_S
from holdfast.sim.machines import Hardware, Machines
from holdfast.sim.neighbourhood import Neighbourhood
from holdfast.sim.own_faults import requests_of
from holdfast.sim.recipes import Cook
from holdfast.sim.replacements import ReplacementPromises
from holdfast.sim.returns import RULES, ReturnPromises
from holdfast.sim.several import SeveralJobs
from holdfast.sim.store import URL, Store
from holdfast.sim.supervisor import Policy, Supervisor
from holdfast.sim.training import Training
from holdfast.sim.truth import Truth
from holdfast.sim.watched import Step
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Config, Job, State, step
from holdfast.supervisor.core.rules.interval import STEPS_UNMEASURED
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import (
    JobPhase,
    JobStopRequested,
    JobSubmitted,
    NodeCordonRequested,
    NodeRepaired,
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
        self.hardware = Hardware.of(seed)
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
        if self.hardware.returns.faults:
            apart = config.offenders if config.offenders is HARSH else OffenderRules(together_s=0.2)
            config = replace(config, returns=RULES, offenders=apart)
            self.invariants.returns = ReturnPromises(self.world)
        if self.hardware.replacing.rules is not None:
            config = replace(config, replacements=self.hardware.replacing.rules, provider_s=15.0)
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
        self.truth = self.invariants.truth = Truth(self.world, self.agents)
        self.training = Training(
            self.world,
            self.agents,
            self.invariants,
            HOSTILE_STEP_S if self.hostility else STEP_S,
            inf if self.hostility else steps,
        )
        self.diagnostics = Diagnostics(self.world, self.agents, self.supervisor, self.training.steps_of, self.truth)
        self.faults = Faults(self.world, self.agents, self.supervisor, self.diagnostics, self.truth)
        self.faults.running_share = 0.85
        self.machines = Machines(self.hardware, self.faults, self.invariants.replacements)
        self.supervisor.provider = self.machines.request_replacement
        self.endings = Endings(self.faults, self.training)
        self.hostilities = Hostilities(self.hostility, self, control_plane_only=self.control_plane_only)
        self._seen: State | None = None  # the last committed state that was looked at
        self._is_complete = False  # the job, in that state
        self._submissions = 0

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        self.supervisor.lead()
        for agent in self.agents.values():
            agent.slow_share = 0.0 if self.control_plane_only else agent.slow_share
            agent.patience_s = self.spec.limits.prepare_timeout_s
            self.hardware.furnish(agent)
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
            if JOB in state.live:  # of a run that the log has lost
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
        since_step = sum(at > self.training.stepped_at for at in self.faults.times)
        since_further = sum(at > self.training.further_at for at in self.faults.times)
        return since_step >= limit or since_further >= 3 * limit

    # ------------------------------------------------------------ peace

    def _make_peace(self) -> None:
        self.hostilities.peace()
        self.hardware.calm()
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

    def trainings(self) -> Iterable[Training]:
        return (self.training,)

    def gpus_reset(self, agent: Agent, failure: str) -> None:
        if failure:
            self.machines.reset_failed(agent)
        else:
            self.invariants.gpus_reset(agent.name)

    def failed_tests(self, agent: Agent) -> None:
        self.machines.tests_failed(agent)

    def booting(self, agent: Agent) -> None:
        self.machines.boot_soon(agent)

    # ------------------------------------------------------------ faults

    def _plan_faults(self) -> None:
        if self.allocations is not None:
            assert self.invariants.allocations is not None
            self.endings.plan_allocations(self.allocations, self.invariants.allocations, self._complete)
            return
        chance, faults, alone = self.world.chance, self.faults, self.control_plane_only
        kinds: list[Callable[[], None]] = [
            faults.crash_supervisor,
            lambda: faults.cut_control(spare_doubted=alone),
            lambda: faults.cut_telemetry(spare_unseen=alone),
        ]
        if not alone:
            kinds += [faults.crash_worker, faults.lose_node, faults.hang, faults.xid, faults.cut_all]
            kinds += [faults.restart_agent, faults.crash_worker, faults.lose_node, faults.cordon]
            kinds.append(lambda: faults.lose_finding_race(self.training))
        if (store := self.store) is not None:
            kinds.append(lambda: faults.lose_store(store))
        if self.checkpoints.rot and not alone:
            kinds += [faults.rot, faults.rot, faults.lose_node_and_disk]
        first = 3.0 if alone else 1.0
        when = chance.uniform(first, FAULTS_END_S)
        for _ in range(chance.randint(1, 8)):
            # Half of the faults follow shortly after another one, so that they occur during its recovery.
            near = min(FAULTS_END_S, when + chance.uniform(0.0, 1.5))
            when = near if chance.random() < 0.5 else chance.uniform(first, FAULTS_END_S)
            self.world.after(when, chance.choice(kinds))
        if self.hostility:
            self.hostilities.plan(first, FAULTS_END_S)
            self.world.after(self.hostility.peace_s, self._make_peace)
        if not alone:
            self.machines.plan(first, FAULTS_END_S)
        for kill in self.kills:
            self.world.after(kill.at_s, lambda each=kill: self.supervisor.append(each.event(self.world.now)))  # type: ignore[misc]
        if not alone:
            self.endings.plan(self.world.seed)

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
