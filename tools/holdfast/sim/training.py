"""The simulated job: synchronous training, in which a step is finished when every rank of a generation takes part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.domain.orders import Prepare
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.invariants import Invariants
from holdfast.sim.world import World
from holdfast.supervisor.protocol import StepsCompleted

STALL_S = 1e-4  # small, so that the best interval lies between the bounds

# The identity of a generation for its ranks. Ranks with different identities cannot form a group, even if the number is equal.
Run = tuple[object, ...]


@dataclass(slots=True)
class Training:
    world: World
    agents: dict[str, Agent]
    invariants: Invariants
    diagnostics: Diagnostics
    step_s: float
    target: float  # step that ends the job; inf = not decided yet
    step: int = 0  # the newest that was finished
    stepped_at: float = 0.0  # time of `step`
    furthest: int = 0  # the highest step that was ever finished
    further_at: float = 0.0  # time of `furthest`
    finished: bool = False  # all ranks of a generation have ended with exit code 0
    progress: dict[Run, int] = field(default_factory=dict)  # newest step of each run
    started: dict[int, int] = field(default_factory=dict)  # started generation → number of its finished steps
    job: str = JOB
    _ticking: set[Run] = field(default_factory=set)

    def changed(self) -> None:
        """Handle a change of the workers on any node."""
        whole = self._whole()
        self.invariants.at_most_one_runs([_attempt(run) for run in whole])
        for run in whole:
            self.started.setdefault(_number(run), 0)
            if run not in self._ticking:
                self._ticking.add(run)
                self.world.after(self.step_s, lambda r=run: self._tick(r))  # type: ignore[misc]

    def members(self, generation: int) -> list[Agent]:
        return [
            a
            for a in self.agents.values()
            if a.alive
            and a.workers is not None
            and a.workers.order.job == self.job
            and a.workers.order.generation == generation
        ]

    def _whole(self) -> list[Run]:
        """Return the runs whose ranks are all alive and running. A rank that has ended finishes no further step."""
        ranks: dict[Run, int] = {}
        world_size: dict[Run, int] = {}
        for agent in self.agents.values():
            workers = agent.workers
            if (
                agent.alive
                and workers is not None
                and workers.running
                and not workers.done
                and workers.order.job == self.job
            ):
                order = workers.order
                ranks[_run(order)] = ranks.get(_run(order), 0) + order.placement.nproc
                world_size[_run(order)] = order.mesh.world_size
        return sorted((run for run, count in ranks.items() if count == world_size[run]), key=_number)

    def _tick(self, run: Run) -> None:
        """Finish one step if every rank can take part."""
        self._ticking.discard(run)
        if run not in self._whole():
            return  # a rank is missing; `changed` starts the steps again
        members = [agent for agent in self.members(_number(run)) if agent.workers and _run(agent.workers.order) == run]
        first = run not in self.progress
        start = members[0].workers.order.restore_step if members[0].workers else 0
        step = self.progress.get(run, start) + 1
        if step > self.target:  # the run was restored at its last step, so no step is left
            self._end(members)
            return
        self.progress[run] = self.step = step
        self.stepped_at = self.world.now
        if step > self.furthest:
            self.furthest, self.further_at = step, self.world.now
        self.started[_number(run)] += 1
        saves = 0
        for agent in members:
            if first:
                agent.stepped(step)
            if agent.workers is not None:
                agent.workers.step = step
            if agent.workers is not None and agent.workers.due(step):
                saves = 1
                self.world.soon(0.0, 0.1, self._saving(agent, run, step))
        ended_at = max(agent.clock.now() for agent in members)
        steps = StepsCompleted(
            self.world.now, self.job, _number(run), step, ended_at, 1, self.step_s, saves, saves * STALL_S
        )
        self.diagnostics.stepped(steps, members)
        if step >= self.target:
            self._end(members)
            return
        self._ticking.add(run)
        self.world.after(self.step_s, lambda: self._tick(run))

    def _end(self, members: list[Agent]) -> None:
        self.finished = True
        for agent in members:
            agent.finished()

    def _saving(self, agent: Agent, run: Run, step: int) -> Callable[[], None]:
        def save() -> None:
            workers = agent.workers
            if agent.alive and workers is not None and _run(workers.order) == run:
                order = workers.order
                for rank in agent.save(step):
                    self.invariants.saved(order.attempt, step, rank, order.mesh)

        return save


def _run(order: Prepare) -> Run:
    return order.generation, order.attempt, order.mesh, order.nnodes, order.restore_step


def _number(run: Run) -> int:
    number = run[0]
    assert isinstance(number, int)
    return number


def _attempt(run: Run) -> tuple[int, int]:
    number, attempt = run[0], run[1]
    assert isinstance(number, int)
    assert isinstance(attempt, int)
    return number, attempt
