"""One large job through the simulator: production's core, log, messages and detectors at the size of a whole fleet.

Faults follow one another: a rank crashes, a node is lost, or a GPU falls off the bus. The next one comes when the run has
finished some steps. A fault that is not recovered within `RECOVER_S` breaks a promise, as does a finding that blames a healthy
node (`truth`). With `checkpoints`, the run sometimes goes on until it has saved a step, which later recoveries restore;
without, no step is ever saved. The promises of `invariants`, most of which compare every node after every event, are for small
worlds.

Nodes in equal states are in cohorts (`cohorts`), of which one agent runs; a node leaves its cohort before a fault. With
`checkpoints` there are none, because shards differ from node to node.

Compared with the small worlds, steps are longer, and telemetry, heartbeats, and the plans and reports of replicators are rarer,
in proportion to each other.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from holdfast.diagnostics.detectors.liveness import Liveness
from holdfast.domain.findings import FindingKind
from holdfast.domain.job import CheckpointSpec, HangSpec, JobSpec, LaunchSpec, LimitSpec
from holdfast.domain.mesh import Mesh
from holdfast.policy import default
from holdfast.replicator.view import Held, View
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.answers import Answers
from holdfast.sim.cohorts import Cohorts
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.large_report import Progress, Recovery, Result
from holdfast.sim.neighbourhood import Neighbourhood
from holdfast.sim.releases import Release
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.training import Training
from holdfast.sim.truth import Truth
from holdfast.sim.watched import Unrepeated
from holdfast.sim.worker_faults import WorkerFaults
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Config, Job, State
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import Command, Event, JobPhase, JobSubmitted, NodeRepaired

RANKS_PER_NODE = 8
SPARES_MIN = 4
STEP_S = 10.0
SAVE_STEPS = 10
STEPS_BETWEEN = 2  # between a recovery and the next fault …
NEVER = 1_000_000  # interval of the saves without checkpoints
SAVED_EVERY = 4  # … but with checkpoints, after every so many faults two steps more than there are between saves
TICK_S = 30.0  # of an agent
BEATS_S = 10.0
BACK_S = 60.0  # until a lost machine has booted
RECOVER_S = 600.0
LOOK_S = 1.0
PLAN_S = 4.0  # of a replicator
REPORT_S = (2.0, 10.0)
TURN_S = (0.02, 0.1)  # the commit of some thousand reports; a leader folds meanwhile what has arrived
ORDERS_KEPT = 8  # of each node: those of four generations; after a thousand faults, more would take gigabytes
EVENTS_MAX = 10**12
SHARE_CHECKED = 0.0


Show = Callable[[Sequence[Recovery], str], None]  # receives the recoveries so far, and what the job does


class _Steps:
    """What `Training` tells the invariants. Those about single shards are for small worlds."""

    def at_most_one_runs(self, whole: list[tuple[int, int]]) -> None:
        if len(whole) > 1:
            raise Violation(f"generations {[number for number, _ in whole]} could all make progress")

    def saved(self, attempt: int, step: int, rank: int, mesh: Mesh) -> None:
        """Does nothing."""

    def all_or_none(self, what: str, acting: Sequence[str], others: Sequence[str]) -> None:
        """Does nothing."""


@dataclass(slots=True)
class _Findings:
    truth: Truth

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        self.truth.folded(event, after, commands)


class LargeJob(Neighbourhood):
    def __init__(
        self, nodes: int, faults: int, seed: int = 1, show: Show = lambda _, __: None, *, checkpoints: bool = False
    ) -> None:
        self.world = World(seed, events_max=EVENTS_MAX)
        self.nodes, self.faults, self._show = nodes, faults, show
        self._checkpoints = checkpoints
        self._chance = Random(f"large job of {seed}")
        spares = max(SPARES_MIN, nodes // 100)
        self.agents = {name: self._agent(name) for name in (f"n{index}" for index in range(nodes + spares))}
        self.spec = JobSpec(
            JOB,
            LaunchSpec("/train.py"),
            nodes,
            RANKS_PER_NODE,
            Mesh.of({"dp": nodes, "tp": RANKS_PER_NODE}),
            min_dp=1,
            max_dp=nodes,
            checkpoint=CheckpointSpec(SAVE_STEPS if checkpoints else NEVER, 1),
            hang=HangSpec(floor_s=6 * STEP_S, init_s=60 * STEP_S),
            limits=LimitSpec(first_step_timeout_s=12 * STEP_S, restarts_without_progress_max=1000),
        )
        self.truth = Truth(self.world, self.agents)
        self.supervisor = Supervisor(
            self.world,
            self.agents,
            _Findings(self.truth),
            default,
            config=Config(offenders=OffenderRules(limit=inf)),
            log_length_max=1000 + nodes // 10,  # entries have up to 32 reports; nobody reads the leader's events
            batch=Unrepeated,
            beats_s=BEATS_S,
            checked_share=SHARE_CHECKED,
            gathers=True,
            turn_s=TURN_S,
        )
        self.training = Training(self.world, self.agents, _Steps(), STEP_S, inf)
        self.diagnostics = Diagnostics(
            self.world,
            self.agents,
            self.supervisor,
            self.training.steps_of,
            self.truth,
            tick_s=TICK_S,
            liveness=Liveness(silence_s=3 * TICK_S, reconnect_grace_s=1.5),
        )
        if not checkpoints:  # which are copied from node to node
            self.supervisor.cohorts = Cohorts(self.agents, self.diagnostics, self.training)
        self.workers = WorkerFaults(self.world, self.diagnostics, self.truth)
        self._faulted_at = -inf  # the fault that has not been recovered
        self._generation = 0  # in which the fault occurred
        self._kind = ""
        self._victim: Agent | None = None  # the node of the next fault, while something is in progress in its cohort
        self._resumed = 0  # number of finished steps at the last recovery
        self.recoveries: list[Recovery] = []
        self._spent_s = 0.0  # CPU of this process until the last recovery

    def _agent(self, name: str) -> Agent:
        """An agent of this version. The small worlds have agents of earlier versions, too."""
        record = Answers(ORDERS_KEPT)
        agent = Agent(
            self.world, self, name, "", RANKS_PER_NODE, release=Release.THIS, orders_kept=ORDERS_KEPT, record=record
        )
        agent.slow_share = 0.0
        agent.replicator.plan_s, agent.replicator.report_s = PLAN_S, REPORT_S
        return agent

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        begun = self._spent_s = time.process_time()
        self.supervisor.lead()
        for agent in self.agents.values():
            agent.boot()
            self.supervisor.dial(agent)
        self.diagnostics.begin()
        self.world.after(1.0, lambda: self.supervisor.append(JobSubmitted(self.world.now, self.spec, "token")))
        self.world.after(LOOK_S, self._look)
        self.world.run(inf, lambda: len(self.recoveries) >= self.faults)
        spent_s = time.process_time() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory_mb = peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
        return Result(
            self.nodes,
            self.nodes * RANKS_PER_NODE,
            tuple(self.recoveries),
            self.training.furthest,
            self.world.now - 1000.0,
            spent_s,
            self.world.events,
            memory_mb,
        )

    def _look(self) -> None:
        if len(self.supervisor.sessions) < len(self.agents):
            for agent in self.agents.values():
                if not agent.session and agent.alive:
                    self.supervisor.dial(agent)
        job = self.supervisor.committed.jobs.get(JOB)
        steps = sum(self.training.started.values())
        if job is not None and job.phase.finished:
            raise Violation(f"the job is {job.phase}: {job.reason}")
        if self._kind:
            number = job.running.number if job is not None and job.running is not None else 0
            if number > self._generation and job is not None and job.phase is JobPhase.RUNNING:
                before, self._spent_s = self._spent_s, time.process_time()
                self.recoveries.append(Recovery(self._kind, self.world.now - self._faulted_at, self._spent_s - before))
                self._kind, self._resumed = "", steps
            elif self.world.now > self._faulted_at + RECOVER_S:
                state = f"{job.phase}: {job.reason}" if job is not None else "not there"
                raise Violation(f"{self._kind}: {RECOVER_S:g} s later, the job is {state}")
        elif job is not None and job.phase is JobPhase.RUNNING and steps >= self._resumed + self._steps_between():
            self._break(job.running.number if job.running is not None else 0)
        self._show(self.recoveries, self._doing(job))
        self.world.after(LOOK_S, self._look)

    def _doing(self, job: Job | None) -> str:
        phase = "is not accepted yet" if job is None else f"is {job.phase}"
        fault = f", {self.world.now - self._faulted_at:.0f} s after a {self._kind}" if self._kind else ""
        return f"the job {phase}{fault}, at step {self.training.step}"

    def _steps_between(self) -> int:
        """How many steps the run finishes before the next fault."""
        saves = self._checkpoints and len(self.recoveries) % SAVED_EVERY == 1
        return SAVE_STEPS + 2 if saves else STEPS_BETWEEN

    def _break(self, generation: int) -> None:
        job = self.supervisor.committed.jobs[JOB]
        assert job.running is not None
        if self.supervisor.cohorts is not None:
            self.supervisor.cohorts.unite()
        agent = self._victim = self._victim or self.agents[self._chance.choice(job.running.nodes)]
        if self.supervisor.cohorts is not None and not self.supervisor.cohorts.alone(agent):
            return
        self._victim = None
        self._faulted_at, self._generation = self.world.now, generation
        self._kind = self._chance.choice(("worker crash", "worker crash", "lost node", "GPU off the bus"))
        match self._kind:
            case "worker crash":
                self.workers.crash_on_device(agent, self._chance.choice(agent.ranks))
            case "lost node":
                self.supervisor.hang_up(agent)
                self.truth.out_of_contact(agent)
                # recovered in time, or there is a violation
                self.truth.begins(FindingKind.NODE_LOST, agent, expected=False)
                agent.die(machine=True)
                self.world.after(BACK_S, agent.boot)
            case _:
                self.workers.off_the_bus(agent)
                repaired = lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name))  # noqa: E731
                self.world.after(BACK_S, repaired)

    # ------------------------------------------------------------ surroundings of the agents

    def trainings(self) -> Iterable[Training]:
        return (self.training,)

    def is_deleting(self, job: str, view: Callable[[], View], deleted: Held, node: str) -> None:
        """Does nothing: the promise about deletions compares the copies of all nodes."""

    def has_saved(self, job: str, node: str) -> None:
        """Does nothing: the promise about copies examines each shard."""


def run(nodes: int, faults: int, seed: int, *, checkpoints: bool = False) -> int:
    """Simulate one job. Prints its progress to stderr, at most a line in five seconds, and its result. Returns an exit code."""
    gc.disable()  # an event leaves no garbage with cycles, and a collection walks a heap that grows with the nodes
    try:
        result = LargeJob(nodes, faults, seed, Progress(faults).show, checkpoints=checkpoints).run()
    except Violation as violation:
        sys.stdout.write(f"VIOLATION {violation}\n")
        return 1
    finally:
        gc.enable()
    sys.stdout.write(f"{result}\n")
    return 0
