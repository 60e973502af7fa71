"""Cohorts: nodes of one job in equal states, which receive the same order at the same time and answer it in the same way.

One agent of a cohort, its *leader*, stands for all: production's rules of an agent run for it alone, and each of its messages
is also sent for every *follower*, with the follower's name, slot, ranks and numbers. What the supervisor and diagnostics
receive is the same as without cohorts, except that the finished steps of a cohort are in one report.

Nodes are united while they train and nothing is in progress on them. A node leaves, with a state of its own, before anything
happens to it alone: a fault, or an order that the others do not get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.construct import constructor_of
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Placement
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import OrderDone, RanksStepping, Report, Start, WorkersChanged
from holdfast.domain.runs import Workers as Running
from holdfast.domain.runs import worker_runs
from holdfast.domain.signals import (
    GenerationStarted,
    GenerationStopped,
    NodeSignal,
    RankProgress,
    StepColumns,
    Tick,
)
from holdfast.sim.agent import Agent
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.telemetry import Telemetry
from holdfast.sim.training import Training
from holdfast.sim.workers import Workers
from holdfast.sim.world import Violation
from holdfast.supervisor.protocol import Broadcast, NodeReported, node_reported

COHORT_NODES_MAX = 64

_tick: Callable[..., Tick] = constructor_of(Tick)


@dataclass(eq=False, slots=True)
class Follower:
    """A node whose state is that of its leader, except for these differences."""

    agent: Agent
    place: Placement
    reports_ahead: int  # number of the last report, compared with the leader's; likewise the others
    version_ahead: int
    ticks_ahead: int
    ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = tuple(self.place.ranks)


class Cohort:
    def __init__(self, leader: Agent, telemetry: Telemetry, place: Placement) -> None:
        self.leader, self.telemetry, self.place = leader, telemetry, place
        self.followers: dict[str, Follower] = {}
        self.ranks: tuple[int, ...] = ()  # of all its nodes
        # To its members: the preparation of their generation, and its start.
        self.broadcasts: tuple[Broadcast, ...] = ()
        leader.cohort = self

    def changed(self) -> None:
        """Handle a change of the members. A cohort of one node is none."""
        self.ranks = (*self.place.ranks, *chain.from_iterable(each.ranks for each in self.followers.values()))
        if not self.followers:
            self.leader.cohort = None

    def version_of(self, node: str) -> int:
        """The version of the set of workers on this node."""
        known = self.followers.get(node)
        return self.leader.version + (known.version_ahead if known is not None else 0)

    # ------------------------------------------------------------ messages of the followers

    def reported(self, event: NodeReported) -> Iterator[NodeReported]:
        """The reports of the followers at the leader's report."""
        first = event.report
        if isinstance(first, OrderDone | WorkersChanged):
            first = evolve(first, workers=Running(worker_runs(first.workers)))
        for each in self.followers.values():
            agent, seq = each.agent, event.seq + each.reports_ahead if event.seq else 0
            report = self.report_of(each, first)
            yield node_reported(event.at, agent.name, agent.incarnation, seq, report, agent.session)

    def report_of(self, follower: Follower, report: Report) -> Report:
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

    def answers_of(self, follower: Follower) -> Iterator[OrderDone]:
        """What the follower has answered to its orders."""
        for broadcast in self.broadcasts:
            if (known := self.leader.admission.known_answer(broadcast.id_of(self.place.slot))) is not None:
                answer = self.report_of(follower, known)
                assert isinstance(answer, OrderDone)
                yield answer

    def _workers(self, follower: Follower, workers: Iterable[RunningWorker]) -> Running:
        ahead = follower.place.first_rank - self.place.first_rank
        return Running(tuple(run._replace(rank=run.rank + ahead) for run in worker_runs(workers)))

    def ticks(self, tick: Tick) -> Iterator[Tick]:
        """The ticks of the followers at the leader's tick."""
        for each in self.followers.values():
            agent, seq = each.agent, tick.seq + each.ticks_ahead
            yield _tick(agent.name, agent.incarnation, seq, tick.at, tuple(self._signals(each, tick.signals)), 0)

    def _signals(self, follower: Follower, signals: Iterable[NodeSignal]) -> Iterator[NodeSignal]:
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


class Cohorts:
    """All cohorts of one job."""

    def __init__(self, agents: Mapping[str, Agent], diagnostics: Diagnostics, training: Training) -> None:
        self._agents, self._diagnostics, self._training = agents, diagnostics, training
        self._broadcasts: tuple[Broadcast, ...] = ()  # that have arrived: the newest preparation, and its start

    def receive(self, epoch: int, broadcast: Broadcast, slots: Iterable[int]) -> bool:
        """Let the orders to these slots arrive. Returns False if that must wait: a cohort does not get them as a whole, and
        something is in progress in it."""
        nodes = {broadcast.placements[slot].node: slot for slot in slots}
        cohorts = dict.fromkeys(
            cohort for cohort in (self._agents[node].cohort for node in nodes) if cohort is not None
        )
        for cohort in cohorts:
            if not self._is_for_all(cohort, nodes, broadcast) and not self._dissolve(cohort):
                return False
        self._broadcasts = _of_generation(self._broadcasts, broadcast)
        for cohort in cohorts:
            cohort.broadcasts = _of_generation(cohort.broadcasts, broadcast)
        for node, slot in nodes.items():
            agent = self._agents[node]
            if agent.represented_by is agent:
                send = broadcast.send(slot)
                agent.receive(epoch, send.command_id, send.order)
        return True

    def unite(self) -> None:
        """Let neighbouring nodes of the running generation be cohorts, if nothing is in progress on them."""
        if len(self._broadcasts) < 2 or self._broadcasts[0].restore:
            return
        cohorts: dict[tuple[int, int], Cohort] = {}  # by block of slots and newest step of their ranks
        joining: dict[Cohort, list[tuple[Agent, Placement]]] = {}
        for place in self._broadcasts[0].placements:
            agent = self._agents[place.node]
            workers = agent.workers
            if workers is None or not self._is_training(agent, workers):
                continue  # a follower has no workers of its own
            block = place.slot // COHORT_NODES_MAX, workers.step
            if (cohort := cohorts.get(block)) is None:
                cohorts[block] = agent.cohort or Cohort(agent, self._diagnostics.telemetry_of(agent), place)
            elif agent.cohort is None:
                joining.setdefault(cohort, []).append((agent, place))
        for cohort, members in joining.items():
            for agent in (cohort.leader, *(agent for agent, _ in members)):
                self._diagnostics.flush(agent)  # so that all have reported the same steps
            for agent, place in members:
                self._join(cohort, agent, place)
        for cohort in cohorts.values():
            cohort.broadcasts = self._broadcasts
            cohort.changed()

    def _is_training(self, agent: Agent, workers: Workers) -> bool:
        is_newest = workers.order.generation == self._broadcasts[0].order.generation
        is_healthy = workers.running and not workers.done and not agent.replicator.files(workers.order.job)
        return is_newest and is_healthy and self._is_settled(agent)

    def alone(self, agent: Agent) -> bool:
        """Give a node a state of its own. Returns False if something is in progress in its cohort."""
        cohort = agent.cohort
        if cohort is None:
            return True
        if not self._is_settled(cohort.leader):
            return False
        if cohort.leader is agent:
            self._replace_leader(cohort)
        else:
            self._leave(cohort, cohort.followers[agent.name])
        return True

    # ------------------------------------------------------------ members

    def _is_for_all(self, cohort: Cohort, nodes: Mapping[str, int], broadcast: Broadcast) -> bool:
        """Whether the order of each member differs from the leader's in its place alone, which is as before."""
        places = (cohort.place, *(each.place for each in cohort.followers.values()))
        return not broadcast.restore and all(
            each.node in nodes
            and broadcast.placements[nodes[each.node]] == each
            and each.slot not in broadcast.suspected
            for each in places
        )

    def _is_settled(self, agent: Agent) -> bool:
        return agent.settled and self._diagnostics.is_settled(agent)

    def _join(self, cohort: Cohort, agent: Agent, place: Placement) -> None:
        leader = cohort.leader
        self._training.united(agent)
        cohort.followers[agent.name] = Follower(
            agent,
            place,
            agent.last_report - leader.last_report,
            agent.version - leader.version,
            self._diagnostics.telemetry_of(agent).sent_seq - cohort.telemetry.sent_seq,
        )
        agent.cohort, agent.workers = cohort, None

    def _leave(self, cohort: Cohort, follower: Follower) -> None:
        leader, agent = cohort.leader, follower.agent
        sends = [each.send(follower.place.slot) for each in cohort.broadcasts]
        seq, version = leader.last_report + follower.reports_ahead, leader.version + follower.version_ahead
        agent.continue_as(leader, sends, cohort.answers_of(follower), seq, version)
        self._diagnostics.telemetry_of(agent).continue_as(cohort.telemetry, follower.ticks_ahead)
        self._training.divided(leader, agent)
        del cohort.followers[agent.name]
        agent.cohort = None
        cohort.changed()

    def _replace_leader(self, cohort: Cohort) -> None:
        """Let the first follower be the leader."""
        first = next(iter(cohort.followers.values()))
        before = cohort.leader
        self._leave(cohort, first)
        before.cohort = None
        if cohort.followers:
            first.agent.cohort = cohort
            cohort.leader, cohort.place = first.agent, first.place
            cohort.telemetry = self._diagnostics.telemetry_of(first.agent)
            for each in cohort.followers.values():
                each.reports_ahead -= first.reports_ahead
                each.version_ahead -= first.version_ahead
                each.ticks_ahead -= first.ticks_ahead
            cohort.changed()

    def _dissolve(self, cohort: Cohort) -> bool:
        if not self._is_settled(cohort.leader):
            return False
        for each in list(cohort.followers.values()):
            self._leave(cohort, each)
        return True


def _of_generation(known: Iterable[Broadcast], newest: Broadcast) -> tuple[Broadcast, ...]:
    """The broadcasts of the newest generation: its preparation, and its start."""
    before = known if isinstance(newest.order, Start) else ()
    return (*(each for each in before if each.command_id != newest.command_id), newest)
