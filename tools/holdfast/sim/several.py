"""Several jobs on one simulated fleet that is too small for all of them: priorities, reserved spares, loans; faults, and peace.

The core, the agents and the promises about each single job are those of `scenario`. `SharingPromises` are checked in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from holdfast.domain.evolve import evolve
from holdfast.domain.incidents import LOAN, Action, Incident
from holdfast.domain.job import CheckpointSpec, HangSpec, JobSpec, LaunchSpec, LimitSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import (
    Inject,
    Prepare,
    PrepareTemplate,
    RebootNode,
    ResetGpu,
    SetInterval,
    Start,
    Stop,
)
from holdfast.policy import JobView, default, ignore, wait
from holdfast.sim.agent import Agent
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.faults import Faults
from holdfast.sim.invariants import Invariants
from holdfast.sim.neighbourhood import Neighbourhood
from holdfast.sim.sharing import FAULTS_END_S, SharingPromises
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.training import Training
from holdfast.sim.truth import Truth
from holdfast.sim.watched import Step
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Config, State, step
from holdfast.supervisor.protocol import (
    BreakerResetRequested,
    Command,
    Event,
    FindingArrived,
    GenerationChanged,
    IncidentChanged,
    JobSubmitted,
    Publish,
    Send,
)

STEP_S = 1.0
INTERVAL = 5
PREPARE_S = 5.0
RECONNECT_S = (0.05, 0.5)
SUBMITTED_S = (1.0, 40.0)
STEPS = (25, 110)
LONG_STEPS = (300, 340)  # of the first job, so that it still has the nodes that other jobs lack in peace
CUT_S = (0.1, 8.0)
BACK_S = (5.0, 20.0)  # until a lost machine has booted
LOOK_S = 1.0
LIMIT_S = 3000.0
_OF_JOB = (Prepare, Start, Stop, SetInterval, Inject, PrepareTemplate, ResetGpu, RebootNode)

# Short times, so that many loans happen within one run.
CONFIG = Config(
    loan_settles_s=3.0, loan_look_s=4.0, loan_gap_s=40.0, loan_unused_s=60.0, kept_s=20.0, degraded_start_s=15.0
)


@dataclass(slots=True)
class _Each:
    """Checks the promises of each job on the part of every fold that concerns the job."""

    of: dict[str, Invariants]
    sharing: SharingPromises
    truth: Truth

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        self.sharing.folded(before, event, after, commands)
        self.truth.folded(event, after, commands)
        if isinstance(event, FindingArrived):
            next(iter(self.of.values())).recorded(event, after, commands)
        for name, promises in self.of.items():
            if not commands and before.nodes is after.nodes:
                continue
            elsewhere = isinstance(event, FindingArrived)  # only the core decides which job a finding concerns
            seen = BreakerResetRequested(event.at, "an event that does not concern this job") if elsewhere else event
            mine = tuple(command for command in commands if _is_about(command, name))
            promises.folded(_only(before, name), seen, _only(after, name), mine)


def _only(state: State, name: str) -> State:
    jobs = {name: state.jobs[name]} if name in state.jobs else {}
    incidents = {each: incident for each, incident in state.incidents.items() if incident.job == name}
    return evolve(state, jobs=jobs, incidents=incidents, closed=tuple(i for i in state.closed if i.job == name))


def _is_about(command: Command, name: str) -> bool:
    match command:
        case Publish(record=GenerationChanged(job=job)):
            return job == name
        case Publish(record=IncidentChanged(incident=incident)):
            return incident.job == name
        case Send(order=order) if isinstance(order, _OF_JOB):
            return order.job == name
        case _:
            return True


class SeveralJobs(Neighbourhood):
    """Agents, network, diagnostics and users' jobs around a supervisor."""

    def __init__(
        self, seed: int, *, tracing: bool = False, fold: Step = step, config: Config = CONFIG, more: int = 0
    ) -> None:
        """`more`: number of nodes beyond those that the jobs can use."""
        self.world = World(seed, tracing)
        chance = self.world.chance
        self.specs = _jobs(chance)
        largest = max(spec.nodes for spec in self.specs)
        wanted = sum(spec.nodes + spec.spares for spec in self.specs)
        nodes = chance.randint(largest + 1, max(largest + 1, wanted)) if not more else wanted + more
        self.agents = {
            f"n{index}": Agent(self.world, self, f"n{index}", chance.choice(("a", "b", "")), 1)
            for index in range(nodes)
        }
        self.refuses = chance.choice((0.0, 0.0, 0.3, 1.0))  # fraction of loans that policies refuse
        self.sharing = SharingPromises({spec.name: spec for spec in self.specs}, self.refuses > 0, config)
        each = {
            spec.name: Invariants(self.agents, spec.min_dp, spec.max_dp, INTERVAL, job=spec.name) for spec in self.specs
        }
        self.truth = Truth(self.world, self.agents)
        self.supervisor = Supervisor(
            self.world, self.agents, _Each(each, self.sharing, self.truth), self._decide, fold, config
        )
        self.training = {}
        for spec in self.specs:
            steps = chance.randint(*(LONG_STEPS if spec is self.specs[0] else STEPS))
            self.training[spec.name] = Training(self.world, self.agents, each[spec.name], STEP_S, steps, job=spec.name)
        self.diagnostics = Diagnostics(
            self.world,
            self.agents,
            self.supervisor,
            lambda order: self.training[order.job].steps_of(order),
            self.truth,
        )
        self.faults = Faults(self.world, self.agents, self.supervisor, self.diagnostics, self.truth)
        self._seen: State | None = None  # the last committed state that was looked at
        self._is_complete = False  # every job, in that state

    # ------------------------------------------------------------ the run

    def run(self) -> tuple[float, int, int]:
        """Run until every job is complete. Returns (virtual seconds, generations, incidents)."""
        self.supervisor.lead()
        for agent in self.agents.values():
            agent.patience_s = PREPARE_S
            agent.boot()
            self.supervisor.keep_connected(agent, *RECONNECT_S)
        self.diagnostics.begin()
        for spec in self.specs:
            self.world.soon(*SUBMITTED_S, self._submission(spec))
        self._plan_faults()
        self.world.after(LOOK_S, self._look)
        done = self.world.run(self.world.now + LIMIT_S, self._complete)
        jobs = self.supervisor.committed.jobs
        if not done:
            states = "; ".join(f"{name} is {job.phase}: {job.reason}" for name, job in sorted(jobs.items()))
            raise Violation(f"every job should be complete by now: {states}")
        for name, training in self.training.items():
            if not training.finished:
                raise Violation(f"{name} is {jobs[name].phase} ({jobs[name].reason}), at step {training.step}")
        generations = sum(job.number for job in jobs.values())
        return self.world.now - 1000.0, generations, self.supervisor.committed.incidents_opened

    def trainings(self) -> Iterable[Training]:
        return self.training.values()

    def _submission(self, spec: JobSpec) -> Callable[[], None]:
        return lambda: self.supervisor.append(JobSubmitted(self.world.now, spec, f"token of {spec.name}"))

    def _complete(self) -> bool:
        """Asked before each action; few of them commit another state."""
        state = self.supervisor.committed
        if state is not self._seen:
            jobs = state.jobs
            finished = len(jobs) == len(self.specs) and all(job.phase.finished for job in jobs.values())
            self._seen, self._is_complete = state, finished
        return self._is_complete

    def _look(self) -> None:
        self.sharing.look(self.supervisor.committed, self.world.now)
        self.world.after(LOOK_S, self._look)

    def _decide(self, incident: Incident, job: JobView) -> Action:
        if incident.kind == LOAN and self.world.chance.random() < self.refuses:
            return self.world.chance.choice((ignore("no"), wait("not now"), wait("later", retry_s=50.0)))
        return default(incident, job)

    # ------------------------------------------------------------ faults

    def _plan_faults(self) -> None:
        chance, faults = self.world.chance, self.faults
        kinds: list[Callable[[], None]] = [
            faults.crash_supervisor,
            lambda: faults.cut_control(CUT_S),
            faults.crash_worker,
            lambda: faults.lose_node(BACK_S),
            faults.restart_agent,
        ]
        for _ in range(chance.randint(0, 6)):
            self.world.after(chance.uniform(1.0, FAULTS_END_S), chance.choice(kinds))


def _jobs(chance: Random) -> list[JobSpec]:
    """Return two to four jobs of different priorities, some of which reserve spares."""
    return [_job(chance, f"job{index}") for index in range(chance.randint(2, 4))]


def _job(chance: Random, name: str) -> JobSpec:
    mesh = Mesh.of(chance.choice(({"dp": 1}, {"dp": 2}, {"dp": 3}, {"dp": 2, "pp": 2}, {"dp": 3})))
    return JobSpec(
        name,
        LaunchSpec("/train.py"),
        mesh.world_size,
        1,
        mesh,
        min_dp=chance.randint(1, mesh.dp),
        max_dp=mesh.dp,
        checkpoint=CheckpointSpec(INTERVAL, 2),
        hang=HangSpec(floor_s=30.0, init_s=60.0),
        limits=LimitSpec(prepare_timeout_s=PREPARE_S, first_step_timeout_s=20.0, restarts_without_progress_max=1000),
        spares=chance.choice((0, 0, 1, 2)),
        priority=chance.choice((-1, 0, 0, 0, 1, 5)),
    )
