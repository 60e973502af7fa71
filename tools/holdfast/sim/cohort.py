"""One cohort: its leader's messages, and how those of each follower differ from them (`cohorts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

from holdfast.agent.connection.admission import Record
from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.construct import constructor_of
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Placement
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import OrderDone, RanksStepping, Report, WorkersChanged
from holdfast.domain.runs import Workers, worker_runs
from holdfast.domain.signals import (
    GenerationStarted,
    GenerationStopped,
    NodeSignal,
    RankProgress,
    StepColumns,
    Tick,
)
from holdfast.sim.world import Violation
from holdfast.supervisor.protocol import Broadcast, NodeReported, node_reported

_tick: Callable[..., Tick] = constructor_of(Tick)


class Member(Protocol):
    """What a cohort reads of the agents of its nodes."""

    name: str
    incarnation: str
    session: int
    version: int
    record: Record


A = TypeVar("A", bound=Member)


@dataclass(eq=False, slots=True)
class Follower(Generic[A]):
    """A node whose state is that of its leader, except for these differences."""

    agent: A
    place: Placement
    # Compared with the leader's: the number of the last report, the version of the workers, the number of the last tick.
    reports_ahead: int
    version_ahead: int
    ticks_ahead: int
    ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = tuple(self.place.ranks)


class Cohort(Generic[A]):
    def __init__(self, leader: A, place: Placement) -> None:
        self.leader, self.place = leader, place
        self.followers: dict[str, Follower[A]] = {}
        self.ranks: tuple[int, ...] = ()  # of all its nodes
        # To its members: the preparation of their generation, and its start.
        self.broadcasts: tuple[Broadcast, ...] = ()

    def changed(self) -> None:
        """Handle a change of the members."""
        self.ranks = (*self.place.ranks, *chain.from_iterable(each.ranks for each in self.followers.values()))

    def version_of(self, node: str) -> int:
        """The version of the set of workers on this node."""
        known = self.followers.get(node)
        return self.leader.version + (known.version_ahead if known is not None else 0)

    # ------------------------------------------------------------ messages of the followers

    def reported(self, event: NodeReported) -> Iterator[NodeReported]:
        """The reports of the followers at the leader's report."""
        first = event.report
        if isinstance(first, OrderDone | WorkersChanged):
            first = evolve(first, workers=Workers(worker_runs(first.workers)))
        for each in self.followers.values():
            agent, seq = each.agent, event.seq + each.reports_ahead if event.seq else 0
            report = self.report_of(each, first)
            yield node_reported(event.at, agent.name, agent.incarnation, seq, report, agent.session)

    def report_of(self, follower: Follower[A], report: Report) -> Report:
        name, ahead = follower.agent.name, follower.version_ahead
        match report:
            case OrderDone(ok=True, tested=None):
                return evolve(
                    report,
                    command_id=f"{report.command_id.rpartition('/')[0]}/{follower.place.slot}",
                    master=f"{name}:{report.master.rpartition(':')[2]}" if report.master else "",
                    workers=self._workers(follower, report.workers),
                    workers_version=report.workers_version + ahead if report.workers_version else 0,
                )
            case WorkersChanged(ended=()):
                return evolve(report, version=report.version + ahead, workers=self._workers(follower, report.workers))
            case RanksStepping():
                return evolve(report, ranks=follower.ranks)
            case _:
                raise Violation(f"{name} is to send for itself what {self.leader.name} sends: {report}")

    def answers_of(self, follower: Follower[A]) -> Iterator[OrderDone]:
        """What the follower has answered to its orders."""
        for broadcast in self.broadcasts:
            if (known := self.leader.record.answer(broadcast.id_of(self.place.slot))) is not None:
                answer = self.report_of(follower, known)
                assert isinstance(answer, OrderDone)
                yield answer

    def _workers(self, follower: Follower[A], workers: Iterable[RunningWorker]) -> Workers:
        ahead = follower.place.first_rank - self.place.first_rank
        return Workers(tuple(run._replace(rank=run.rank + ahead) for run in worker_runs(workers)))

    def ticks(self, tick: Tick) -> Iterator[Tick]:
        """The ticks of the followers at the leader's tick."""
        for each in self.followers.values():
            agent, seq = each.agent, tick.seq + each.ticks_ahead
            yield _tick(agent.name, agent.incarnation, seq, tick.at, tuple(self._signals(each, tick.signals)), 0)

    def _signals(self, follower: Follower[A], signals: Iterable[NodeSignal]) -> Iterator[NodeSignal]:
        name = follower.agent.name
        for signal in signals:
            match signal:
                case StepColumns():
                    pass  # the leader's has the ranks of all nodes
                case RankProgress():
                    yield evolve(signal, node=name, rank=follower.ranks)
                case StallSnapshot(rows=rows):
                    yield evolve(signal, node=name, rank=follower.ranks, rows=evolve(rows, rank=follower.ranks))
                case GenerationStarted():
                    yield evolve(signal, node=name, ranks=follower.ranks)
                case GenerationStopped():
                    yield evolve(signal, node=name)
                case _:
                    raise Violation(f"{name} is to send for itself what {self.leader.name} sends: {signal}")
