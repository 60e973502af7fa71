"""A large job with cohorts takes the same course as with a production agent for every node, which may leave its cohort at any
fault; and what goes wrong in a cohort is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from holdfast.agent.connection.reports import Numbered, Reports
from holdfast.domain.evolve import evolve
from holdfast.domain.orders import OrderDone
from holdfast.domain.signals import GenerationStarted, Tick
from holdfast.sim import cohorts
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.cohort import Cohort, Follower
from holdfast.sim.cohorts import Cohorts
from holdfast.sim.large import LargeJob
from holdfast.sim.world import Violation
from holdfast.supervisor.protocol import (
    Command,
    Event,
    FindingJudged,
    GenerationChanged,
    IncidentChanged,
    JobChanged,
    NodeChanged,
    NodeReported,
    Publish,
    Record,
)

take, reported, ticks = Reports.take, Cohort.reported, Cohort.ticks


class _Even(Random):
    """Every delay is the middle of its interval, and nothing is repeated: runs with other numbers of draws have equal times."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def random(self) -> float:
        return 0.5


class _Apart(Cohorts):
    """Nodes send their telemetry at the same times as if they were united."""

    def unite(self) -> None:
        for agent in self._agents.values():
            if agent.workers is not None:  # a follower has none of its own
                self._diagnostics.flush(agent)


class _Flushed(_Apart):
    def unite(self) -> None:
        super().unite()
        Cohorts.unite(self)


class _Recorded(LargeJob):
    """`united`: the nodes are in cohorts."""

    def __init__(self, nodes: int, faults: int, seed: int, *, united: bool) -> None:
        super().__init__(nodes, faults, seed)
        self.world.chance = self.diagnostics.chance = _Even(seed)
        self.records: list[tuple[Any, ...]] = []
        self.followers_max = 0
        self.supervisor.observer = self
        of = (self.agents, self.diagnostics, self.training)
        self.supervisor.cohorts = _Flushed(*of) if united else _Apart(*of)

    def folded(self, before: object, event: Event, after: Any, commands: tuple[Command, ...]) -> None:
        self.truth.folded(event, after, commands)
        self.records += [_facts(each.record) for each in commands if isinstance(each, Publish)]
        followers = sum(agent.represented_by is not agent for agent in self.agents.values())
        self.followers_max = max(self.followers_max, followers)


def _facts(record: Record) -> tuple[Any, ...]:
    """A record without times, and without durations in texts."""
    match record:
        case JobChanged():
            return "job", record.phase
        case GenerationChanged():
            return "generation", record.stage, record.generation.number, record.generation.placements
        case IncidentChanged(incident=each):
            action = each.action.kind if each.action is not None else ""
            return "incident", each.kind, each.node, each.rank, each.state, action, each.new_generation
        case FindingJudged(finding=each):
            return "finding", each.kind, each.node, each.rank, each.generation, each.severity, record.verdict
        case NodeChanged():
            return "node", record.node, record.state
        case _:
            return (type(record).__name__,)


@pytest.mark.parametrize("seed", range(3))
def test_cohorts_take_the_course_of_single_agents(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohorts, "COHORT_NODES_MAX", 5)
    alone, united = (_Recorded(17, 8, seed, united=united) for united in (False, True))
    assert [each.kind for each in united.run().recoveries] == [each.kind for each in alone.run().recoveries]
    assert [round(each.took_s) for each in united.recoveries] == [round(each.took_s) for each in alone.recoveries]
    assert united.followers_max > 8
    assert alone.followers_max == 0
    assert united.records == alone.records
    assert united.training.started == alone.training.started
    assert _nodes(united) == _nodes(alone)


def _nodes(job: LargeJob) -> dict[str, tuple[Any, ...]]:
    """What the supervisor knows of each node, and the state of each agent, when it has left its cohort."""
    state, sessions = job.supervisor.committed, job.supervisor.sessions
    assert state.jobs[JOB].running is not None
    job.world.run(job.world.now + 25.0, lambda: False)
    assert job.supervisor.cohorts is not None
    assert all(job.supervisor.cohorts.alone(agent) for agent in job.agents.values())
    return {
        name: (
            sessions.get(name),
            node.session,
            node.workers_version,
            node.facts.incarnation,
            (agent := job.agents[name]).last_report,
            agent.version,
            agent.epoch_seen,
            None if agent.workers is None else (agent.workers.order, agent.workers.started, agent.workers.step),
            [type(order).__name__ for order in agent.orders.values()][-2:],
        )
        for name, node in state.nodes.items()
    }


def _answers_nothing(self: Reports) -> Numbered | None:
    """Planted: answers to orders are lost in the agent."""
    numbered = take(self)
    return take(self) if numbered is not None and isinstance(numbered.report, OrderDone) else numbered


def _without_the_last(self: Cohort[Agent], event: NodeReported) -> Iterator[NodeReported]:
    yield from list(reported(self, event))[:-1]


def _as_the_leader(self: Cohort[Agent], follower: Follower[Agent], report: object) -> object:
    return report


def _without_a_start(self: Cohort[Agent], tick: Tick) -> Iterator[Tick]:
    for each in ticks(self, tick):
        yield evolve(each, signals=tuple(s for s in each.signals if not isinstance(s, GenerationStarted)))


def test_a_bug_in_the_agent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job = LargeJob(8, 2)
    job.run()
    assert any(agent.cohort is not None for agent in job.agents.values())
    job.faults += 1
    monkeypatch.setattr(Reports, "take", _answers_nothing)
    with pytest.raises(Violation):
        job.world.run(job.world.now + 1000.0, lambda: len(job.recoveries) >= job.faults)


@pytest.mark.parametrize(
    ("name", "planted"),
    [("reported", _without_the_last), ("report_of", _as_the_leader), ("ticks", _without_a_start)],
)
def test_a_bug_in_what_followers_send_changes_the_course(
    name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with single agents would find it."""
    right, wrong = (_Recorded(8, 2, 1, united=True) for _ in range(2))
    right.run()
    monkeypatch.setattr(Cohort, name, planted)
    with suppress(Violation):
        wrong.run()
    assert (wrong.records, wrong.recoveries) != (right.records, right.recoveries)
