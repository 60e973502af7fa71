"""Nodes of a simulation whose network is bad for a while, and the promises about network tests, implemented again.

* In peace, an idle node with a bad network is found within `FOUND_S`, if there are enough other nodes to compare with.
* A node is taken out of service for its network only if its network was bad, and gets no ranks before it is good. Exception: a
  slow node without which a job could not run.
* The node is in service again within `BACK_S` of peace, unless it has failed twice.
* At most a tenth of the idle nodes, but at least one, may be out of service for its network. No node with work gets an order to
  test, and no node gets two at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from holdfast.domain.links import LinkMeasured
from holdfast.domain.orders import CheckLink
from holdfast.sim.world import Violation
from holdfast.supervisor.core import Node, State
from holdfast.supervisor.core.rules.holddown import Cure
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.protocol import (
    Command,
    Event,
    GenerationChanged,
    GenerationStage,
    NodeChanged,
    Publish,
    Send,
)

RULES = LinkRules(every_s=8.0)
USUAL = 1e9
SLOW = 0.1  # speed of a slow network, as a fraction of the usual speed
NOISE = 0.7  # the usual speed varies between this fraction of it and the full speed
REMEMBERED_S = 30.0  # an earlier test may take a node out of service for so long after its network has become good
FOUND_S = 90.0
BACK_S = 120.0
OTHERS_MIN = 5  # healthy nodes, idle and in peace for the same time, that are needed to find a bad one


@dataclass(slots=True)
class Bad:
    node: str
    since: float
    until: float
    slow: bool  # False: not reachable


@dataclass(slots=True)
class Links:
    """The outcomes of the network tests of one seed."""

    chance: Random
    bad: list[Bad] = field(default_factory=list)
    pair: frozenset[str] = frozenset()  # two healthy nodes that cannot reach each other
    zones: dict[str, str] = field(default_factory=dict)
    zones_until: float = 0.0  # until this time no node can reach the other zone
    takes_s: tuple[float, float] = (0.02, 2.0)

    def measured(self, one: str, other: str, at: float) -> LinkMeasured:
        found = [each for each in self.bad if each.node in (one, other) and each.since <= at < each.until]
        cut = at < self.zones_until and self.zones[one] != self.zones[other]
        if cut or {one, other} == self.pair or any(not each.slow for each in found):
            return LinkMeasured(failure="it does not answer")
        speed = USUAL * self.chance.uniform(NOISE, 1.0) * (SLOW if found else 1.0)
        return LinkMeasured(speed, speed * self.chance.uniform(NOISE, 1.0), 0.0001)

    def was_bad(self, node: str, at: float) -> bool:
        return any(each.node == node and each.since <= at < each.until + REMEMBERED_S for each in self.bad)

    def is_bad(self, node: str, at: float) -> Bad | None:
        return next((each for each in self.bad if each.node == node and each.since <= at < each.until), None)


@dataclass(slots=True)
class LinkPromises:
    links: Links
    peace_at: float  # no faults of another kind from then on
    found: set[str] = field(default_factory=set)
    findable_since: dict[str, float] = field(default_factory=dict)
    returns_since: dict[str, float] = field(default_factory=dict)

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        now = event.at
        if after.nodes is not before.nodes:
            for name, node in after.nodes.items():
                if is_out(node) and not (name in before.nodes and is_out(before.nodes[name])):
                    self._put_out(name, after, now)
        if any(isinstance(command, Send) and isinstance(command.order, CheckLink) for command in commands):
            self._tests_only_idle_nodes(after, commands)
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage=GenerationStage.PLANNED, generation=generation)):
                    for name in set(generation.nodes) & before.nodes.keys():
                        if is_out(before.nodes[name]):
                            self._gets_ranks(name, commands, now)

    def _put_out(self, name: str, after: State, now: float) -> None:
        if not self.links.was_bad(name, now):
            raise Violation(
                f"{name} is out of service, and its network is good: {after.nodes[name].unschedulable_reason}"
            )
        self.found.add(name)
        idle = [node for node in after.nodes.values() if is_out(node) or is_waiting(after, node)]
        out = sum(map(is_out, idle))
        if out > max(1, len(idle) // 10):
            raise Violation(f"{out} of {len(idle)} nodes without ranks are out of service for their network")

    def _tests_only_idle_nodes(self, after: State, commands: tuple[Command, ...]) -> None:
        measured_nodes = [send.node for send in after.sends() if isinstance(send.order, CheckLink)]
        for name, times in Counter(measured_nodes).items():
            if times > 1:
                raise Violation(f"{name} gets orders for {times} network tests at the same time")
        for command in commands:
            if isinstance(command, Send) and isinstance(command.order, CheckLink):
                node = after.nodes[command.node]
                if not (is_out(node) or is_waiting(after, node)):
                    raise Violation(f"{node.name} gets an order to test its network, and has work or is not connected")

    def _gets_ranks(self, name: str, commands: tuple[Command, ...], now: float) -> None:
        released = any(
            isinstance(command, Publish)
            and isinstance(command.record, NodeChanged)
            and command.record.node == name
            and "cannot run without it" in command.record.reason
            for command in commands
        )
        bad = self.links.is_bad(name, now)
        if bad is not None and not (released and bad.slow):
            raise Violation(f"{name} gets ranks while its network is bad, and that is known")

    # ------------------------------------------------------------ changes that must happen

    def look(self, state: State, now: float) -> None:
        """Check the state. Called once a second."""
        calm = now >= self.peace_at and state.breaker.open_until is None and now >= self.links.zones_until
        well = [
            name
            for name, node in state.nodes.items()
            if is_waiting(state, node) and not self.links.was_bad(name, now) and name not in self.links.pair
        ]
        findable, returns = {}, {}
        for name, node in state.nodes.items():
            bad = self.links.is_bad(name, now) is not None
            others = [each for each in well if self.links.zones[each] == self.links.zones[name]]
            room = not any(map(is_out, state.nodes.values()))
            if calm and bad and room and is_waiting(state, node) and len(others) >= OTHERS_MIN:
                findable[name] = self.findable_since.get(name, now)
            final = node.removal is not None and bool(node.removal.final)
            if calm and is_out(node) and not final and not self.links.was_bad(name, now) and len(well) >= OTHERS_MIN:
                returns[name] = self.returns_since.get(name, now)
        self.findable_since, self.returns_since = findable, returns
        for name, since in findable.items():
            if now > since + FOUND_S:
                raise Violation(f"the network of {name} has been bad for {now - since:.0f} s, and it is in service")
        for name, since in returns.items():
            if now > since + BACK_S:
                reason = state.nodes[name].unschedulable_reason
                raise Violation(f"the network of {name} has been good for {now - since:.0f} s: {reason}")


def is_out(node: Node) -> bool:
    return node.removal is not None and node.removal.cure is Cure.LINKS and bool(node.unschedulable_reason)


def is_waiting(state: State, node: Node) -> bool:
    """Whether a node is connected, in service or held down, and without work."""
    members = {
        name
        for job in state.jobs.values()
        if job.generation is not None and not job.phase.finished and job.phase.value != "pending"
        for name in job.generation.nodes
    }
    busy = state.live_on(node) or node.workers or node.name in members
    return node.connected and not node.lost and not busy and node.notice is None
