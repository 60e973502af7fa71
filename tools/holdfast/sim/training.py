"""The simulated job: synchronous training, in which a step is finished when every rank of a generation takes part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Prepare
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.releases import Release
from holdfast.sim.telemetry import Finished
from holdfast.sim.world import World

REQUESTED_WAIT_S, AGAIN_S = 5.0, 0.2  # as `DEMANDED_WAIT_S` of holdfast.train
AGREEMENT_WAIT_S = 5.0  # as `AGREEMENT_S_MAX` of holdfast.train
STALL_S = 1e-4  # small, so that the best interval lies between the bounds

# The identity of a generation for its ranks. Ranks with different identities cannot form a group, even if the number is equal.
Run = tuple[object, ...]


class Observer(Protocol):
    """The promises about events on the nodes: `Invariants`."""

    def at_most_one_runs(self, whole: list[tuple[int, int]]) -> None: ...
    def saved(self, attempt: int, step: int, rank: int, mesh: Mesh) -> None: ...
    def all_or_none(self, what: str, acting: Sequence[str], others: Sequence[str]) -> None: ...


@dataclass(slots=True)
class Training:
    world: World
    agents: dict[str, Agent]
    invariants: Observer
    step_s: float
    target: float  # step that ends the job; inf = not decided yet
    step: int = 0  # the newest that was finished
    stepped_at: float = 0.0  # time of `step`
    furthest: int = 0  # the highest step that was ever finished
    further_at: float = 0.0  # time of `furthest`
    finished: bool = False  # all ranks of a generation have ended with exit code 0
    progress: dict[Run, int] = field(default_factory=dict)  # newest step of each run
    finished_steps: dict[Run, list[Finished]] = field(default_factory=dict)  # oldest first
    started: dict[int, int] = field(default_factory=dict)  # started generation → number of its finished steps
    job: str = JOB
    pace: Callable[[int], float] | None = None  # seconds of each step, by its number; None = always `step_s`
    _ticking: set[Run] = field(default_factory=set)
    _runs: dict[str, Run] = field(default_factory=dict)  # node → the run that its ranks take part in
    _parts: dict[Run, dict[str, Agent]] = field(default_factory=dict)  # run → the nodes whose ranks take part
    # run → number of these nodes, and of those that they stand for
    _counts: dict[Run, int] = field(default_factory=dict)
    _whole: set[Run] = field(default_factory=set)  # runs in which all ranks take part
    _alone: set[Run] = field(default_factory=set)  # runs in which ranks went on without the result of a proposal

    @property
    def decided_alone(self) -> int:
        """Number of runs in which ranks went on without the result of a proposal."""
        return len(self._alone)

    def changed(self, agent: Agent) -> None:
        """Handle a change of the workers on a node. Work depends on the node, not on the number of nodes."""
        run, before = self._part_of(agent), self._runs.get(agent.name)
        if run != before:
            if before is not None:
                del self._parts[before][agent.name], self._runs[agent.name]
                self._counts[before] -= len(agent.stands_for)
                if not self._parts[before]:
                    del self._parts[before], self._counts[before]
            if run is not None:
                self._runs[agent.name] = run
                self._parts.setdefault(run, {})[agent.name] = agent
                self._counts[run] = self._counts.get(run, 0) + len(agent.stands_for)
        self._is_whole_now(before)
        self._is_whole_now(run)
        if not self._whole:
            return
        self.invariants.at_most_one_runs([_attempt(each) for each in sorted(self._whole, key=_number)])
        for each in sorted(self._whole - self._ticking, key=_number):
            self.started.setdefault(_number(each), 0)
            self._ticking.add(each)
            self.world.after(self.step_s, lambda r=each: self._tick(r))  # type: ignore[misc]

    def united(self, agent: Agent) -> None:
        """Handle that another agent, which takes part in the same run, stands for `agent` from now on."""
        if (run := self._runs.pop(agent.name, None)) is not None:
            del self._parts[run][agent.name]

    def divided(self, leader: Agent, agent: Agent) -> None:
        """Handle that `agent` has a state of its own from now on; `leader` has stood for it."""
        if (run := self._runs.get(leader.name)) is not None:
            self._runs[agent.name], self._parts[run][agent.name] = run, agent

    def members(self, generation: int) -> list[Agent]:
        return [
            a
            for a in self.agents.values()
            if a.alive
            and a.workers is not None
            and a.workers.order.job == self.job
            and a.workers.order.generation == generation
        ]

    def steps_of(self, order: Prepare) -> Sequence[Finished]:
        """Return the steps that the generation of `order` has finished."""
        return self.finished_steps.get(_run(order), ())

    def _part_of(self, agent: Agent) -> Run | None:
        """Return the run of which all ranks on this node are alive and running. A rank that has ended finishes no further
        step."""
        workers = agent.workers
        if not agent.alive or workers is None or not workers.running or workers.done:
            return None
        return _run(workers.order) if workers.order.job == self.job else None

    def _is_whole_now(self, run: Run | None) -> None:
        """Record whether all nodes of the run take part."""
        if run is None:
            return
        if self._counts.get(run, 0) == _nnodes(run):
            self._whole.add(run)
        else:
            self._whole.discard(run)

    def _tick(self, run: Run) -> None:
        """Finish one step if every rank can take part."""
        self._ticking.discard(run)
        if run not in self._whole:
            return  # a rank is missing; `changed` starts the steps again
        members = list(self._parts[run].values())
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
        for agent in members:
            if first:
                agent.stepped(step)
            if agent.workers is not None:
                agent.workers.step = step
        self._ticking.add(run)
        self._save(run, step, self.world.now)

    def _save(self, run: Run, step: int, ended_at: float) -> None:
        """Save the finished step where that is due, and go on. Ranks wait for the result of a proposed save."""
        if run not in self._whole:  # a rank has failed while others waited
            self._ticking.discard(run)
            return
        members = list(self._parts[run].values())
        parts = [(agent, agent.workers) for agent in members if agent.workers is not None]
        is_decided = not any(step in workers.proposed for _, workers in parts)
        if not is_decided and self.world.now < ended_at + AGREEMENT_WAIT_S:
            self.world.after(AGAIN_S / 10, lambda: self._save(run, step, ended_at))
            return
        saving = [agent for agent, workers in parts if workers.due(step)]
        if is_decided:
            self._all_or_none(
                members, [agent for agent, workers in parts if step in workers.agreed], step, " as agreed"
            )
        else:  # the result is lost, or late
            self._alone.add(run)
        if run not in self._alone and all(agent.release is Release.THIS for agent in members):
            self._all_or_none(members, saving, step)
        for agent in saving:
            self.world.soon(0.0, 0.1, self._saving(agent, run, step))
        ended = Finished(step, ended_at - self._pace_s(step), ended_at, STALL_S if saving else 0.0)
        self.finished_steps.setdefault(run, []).append(ended)
        if step >= self.target:
            self._ticking.discard(run)
            self._end(members)
            return
        self.world.after(self._pace_s(step + 1), lambda: self._tick(run))

    def _all_or_none(self, members: list[Agent], acting: list[Agent], step: int, how: str = "") -> None:
        names = [agent.name for agent in acting]
        others = [agent.name for agent in members if agent.name not in names]
        self.invariants.all_or_none(f"step {step} is saved{how}", names, others)

    def _pace_s(self, step: int) -> float:
        return self.step_s if self.pace is None else self.pace(step)

    def _end(self, members: list[Agent]) -> None:
        self.finished = True
        for agent in members:
            agent.finished()

    def _saving(self, agent: Agent, run: Run, step: int) -> Callable[[], None]:
        """A requested save waits for an image that is being read; one that is due by its interval is skipped."""
        assert agent.workers is not None
        waits_until = self.world.now + (REQUESTED_WAIT_S if step in agent.workers.save_at else 0.0)
        left = set(agent.workers.order.placement.ranks)

        def save() -> None:
            workers = agent.workers
            if not agent.alive or workers is None or _run(workers.order) != run:
                return
            order = workers.order
            for rank in agent.save(step, sorted(left)):
                left.discard(rank)
                self.invariants.saved(order.attempt, step, rank, order.mesh)
            if left and self.world.now + AGAIN_S < waits_until:
                self.world.after(AGAIN_S, save)

        return save


def _run(order: Prepare) -> Run:
    return order.generation, order.attempt, order.mesh.dims, order.nnodes, order.restore_step


def _number(run: Run) -> int:
    number = run[0]
    assert isinstance(number, int)
    return number


def _nnodes(run: Run) -> int:
    count = run[3]
    assert isinstance(count, int)
    return count


def _attempt(run: Run) -> tuple[int, int]:
    number, attempt = run[0], run[1]
    assert isinstance(number, int)
    assert isinstance(attempt, int)
    return number, attempt
