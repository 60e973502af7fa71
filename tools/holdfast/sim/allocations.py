"""Ends of allocations in a simulation: a scheduler takes all machines at once, and returns them later. Apart from this only the
supervisor fails, so that the promises are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State
from holdfast.supervisor.core.model.lifecycle import Suspended
from holdfast.supervisor.protocol import Command, GenerationChanged, GenerationStage, Publish

ALLOCATIONS_FROM, ALLOCATIONS_TO = 800_000, 900_000  # the seeds of these worlds
APART_S = 0.8  # between the SIGTERM of the first and of the last agent
AWAY_S = (12.0, 90.0)  # from the end of the grace to the next allocation
BACK_WITHIN_S = 6.0  # its nodes connect one after the other within this time
AMPLE_S = 14.0  # a grace period that suffices to save a running job, despite all delays
TRAINS_S = (8.0, 20.0)  # between two ends
KNOWN_S = 8.0  # the job must be suspended this long after the last agent has ended and a supervisor leads


@dataclass(frozen=True, slots=True)
class Allocation:
    """The end of one allocation, and the start of the next."""

    ends_s: float  # after the start of the simulation
    grace_s: float
    away_s: float  # from the end of the grace period to the next allocation
    boots: bool  # the machines boot, so that shards in memory are lost
    supervisor_goes_s: float | None  # crash of the supervisor, after the end was announced; None = no crash


class Allocations:
    def __init__(self, seed: int) -> None:
        self.chance = Random(f"allocations of {seed}")
        self.all = tuple(self._drawn())

    @classmethod
    def of(cls, seed: int) -> Allocations | None:
        return cls(seed) if ALLOCATIONS_FROM <= seed < ALLOCATIONS_TO else None

    def _drawn(self) -> list[Allocation]:
        found, at_s = [], self.chance.uniform(3.0, 20.0)
        for _ in range(self.chance.randint(1, 3)):
            grace_s, away_s = self.chance.uniform(1.5, 40.0), self.chance.uniform(*AWAY_S)
            goes_s = self.chance.uniform(0.0, grace_s + 10.0) if self.chance.random() < 0.3 else None
            found.append(Allocation(at_s, grace_s, away_s, self.chance.random() < 0.5, goes_s))
            at_s += grace_s + away_s + BACK_WITHIN_S + self.chance.uniform(*TRAINS_S)
        return found


@dataclass(slots=True)
class AllocationPromises:
    """A job all of whose nodes ended is suspended at a step that is really stored, and continues from it. No saved step is
    repeated, and no step at all if the grace period was long enough to save."""

    agents: dict[str, Agent]
    complete: Mapping[tuple[int, int], set[int]]  # (attempt, step) → ranks that saved it
    meshes: Mapping[tuple[int, int], Mesh]
    at: tuple[int, int] | None = None  # (attempt, step) at which the job is suspended; None after it continues
    # the newest step at the SIGTERM of the agents, if the grace period was long enough
    newest_at_sigterm: int | None = None
    ended: int = 0  # suspensions after which the job has continued

    def folded(self, after: State, commands: tuple[Command, ...]) -> None:
        job = after.jobs.get(JOB)
        if job is not None and isinstance(job.doing, Suspended):
            self.at = job.doing.attempt, job.doing.step
            self._is_stored(*self.at)
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage=GenerationStage.STARTED, generation=generation)):
                    self._check_continued(generation.restore.attempt, generation.restore.step)
                case _:
                    pass

    def _is_stored(self, attempt: int, step: int) -> None:
        if step:
            mesh = self.meshes.get((attempt, step))
            if mesh is None or set(range(mesh.world_size)) - self.complete[attempt, step]:
                raise Violation(f"the job is suspended at step {step} of attempt {attempt}, which was not saved")

    def _check_continued(self, attempt: int, step: int) -> None:
        if self.at is None:
            return
        if (attempt, step) < self.at and self._is_left(*self.at):
            raise Violation(f"the job was suspended at (attempt, step) {self.at}, and continues from {(attempt, step)}")
        if self.newest_at_sigterm is not None and step < self.newest_at_sigterm:
            raise Violation(f"there was time to save, and steps {step + 1} … {self.newest_at_sigterm} are done again")
        self.at = self.newest_at_sigterm = None
        self.ended += 1

    def _is_left(self, attempt: int, step: int) -> bool:
        """Whether each shard is still on a node. Shards that were only in memory are lost with a boot."""
        held = {key for agent in self.agents.values() for key in agent.replicator.keys(JOB) if agent.alive}
        return all(ShardKey(attempt, step, rank) in held for rank in self.complete[attempt, step])

    def agents_end(self, allocation: Allocation, newest_step: int, *, trains: bool) -> None:
        """Record the SIGTERM of all agents. A worker whose disk is slow may have no free image for the save."""
        slow = any(agent.replicator.slow_disk for agent in self.agents.values() if agent.workers is not None)
        ample = trains and not slow and allocation.grace_s >= AMPLE_S and allocation.supervisor_goes_s is None
        self.newest_at_sigterm = newest_step if ample else None

    def before_return(self, state: State, *, trained: bool, known_s: float) -> None:
        """Check the job just before the next allocation starts."""
        job = state.jobs.get(JOB)
        if job is None or not trained or known_s < KNOWN_S:
            return
        if not isinstance(job.doing, Suspended):
            raise Violation(f"all nodes of the job have ended, and it is {job.phase}: {job.reason}")
