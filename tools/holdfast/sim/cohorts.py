"""Cohorts: nodes of one job in equal states, which receive the same order at the same time and answer it in the same way.

One agent of a cohort, its *leader*, stands for all: production's rules of an agent run for it alone, and each of its messages
is also sent for every *follower*, with the follower's name, slot, ranks and numbers. What the supervisor and diagnostics
receive is the same as without cohorts, except that the finished steps of a cohort are in one report.

Nodes are united while they train and nothing is in progress on them. A node leaves, with a state of its own, before anything
happens to it alone: a fault, or an order that the others do not get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.domain.generations import Placement
from holdfast.domain.orders import Start
from holdfast.sim.agent import Agent
from holdfast.sim.cohort import Cohort, Follower
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.training import Training
from holdfast.sim.workers import Workers
from holdfast.supervisor.protocol import Broadcast

COHORT_NODES_MAX = 64


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
        cohorts: dict[tuple[int, int], Cohort[Agent]] = {}  # by block of slots and newest step of their ranks
        joining: dict[Cohort[Agent], list[tuple[Agent, Placement]]] = {}
        for place in self._broadcasts[0].placements:
            agent = self._agents[place.node]
            workers = agent.workers
            if workers is None or not self._is_training(agent, workers):
                continue  # a follower has no workers of its own
            block = place.slot // COHORT_NODES_MAX, workers.step
            if (cohort := cohorts.get(block)) is None:
                cohorts[block] = agent.cohort or Cohort(agent, place)
            elif agent.cohort is None:
                joining.setdefault(cohort, []).append((agent, place))
        for cohort, members in joining.items():
            for agent in (cohort.leader, *(agent for agent, _ in members)):
                self._diagnostics.flush(agent)  # so that all have reported the same steps
            for agent, place in members:
                self._join(cohort, agent, place)
        for cohort in cohorts.values():
            cohort.broadcasts = self._broadcasts
            self._changed(cohort)

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

    def _is_for_all(self, cohort: Cohort[Agent], nodes: Mapping[str, int], broadcast: Broadcast) -> bool:
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

    def _changed(self, cohort: Cohort[Agent]) -> None:
        """Handle a change of the members. A cohort of one node is none."""
        cohort.leader.cohort = cohort if cohort.followers else None
        cohort.changed()

    def _sent_seq(self, agent: Agent) -> int:
        return self._diagnostics.telemetry_of(agent).sent_seq

    def _join(self, cohort: Cohort[Agent], agent: Agent, place: Placement) -> None:
        leader = cohort.leader
        self._training.united(agent)
        cohort.followers[agent.name] = Follower(
            agent,
            place,
            agent.last_report - leader.last_report,
            agent.version - leader.version,
            self._sent_seq(agent) - self._sent_seq(leader),
        )
        agent.cohort, agent.workers = cohort, None

    def _leave(self, cohort: Cohort[Agent], follower: Follower[Agent]) -> None:
        leader, agent = cohort.leader, follower.agent
        sends = [each.send(follower.place.slot) for each in cohort.broadcasts]
        seq, version = leader.last_report + follower.reports_ahead, leader.version + follower.version_ahead
        agent.continue_as(leader, sends, cohort.answers_of(follower), seq, version)
        telemetry_of = self._diagnostics.telemetry_of
        telemetry_of(agent).continue_as(telemetry_of(leader), follower.ticks_ahead)
        self._training.divided(leader, agent)
        del cohort.followers[agent.name]
        agent.cohort = None
        self._changed(cohort)

    def _replace_leader(self, cohort: Cohort[Agent]) -> None:
        """Let the first follower be the leader."""
        first = next(iter(cohort.followers.values()))
        before = cohort.leader
        self._leave(cohort, first)
        before.cohort = None
        if cohort.followers:
            cohort.leader, cohort.place = first.agent, first.place
            for each in cohort.followers.values():
                each.reports_ahead -= first.reports_ahead
                each.version_ahead -= first.version_ahead
                each.ticks_ahead -= first.ticks_ahead
            self._changed(cohort)

    def _dissolve(self, cohort: Cohort[Agent]) -> bool:
        if not self._is_settled(cohort.leader):
            return False
        for each in list(cohort.followers.values()):
            self._leave(cohort, each)
        return True


def _of_generation(known: Iterable[Broadcast], newest: Broadcast) -> tuple[Broadcast, ...]:
    """The broadcasts of the newest generation: its preparation, and its start."""
    before = known if isinstance(newest.order, Start) else ()
    return (*(each for each in before if each.command_id != newest.command_id), newest)
