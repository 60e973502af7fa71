"""A fleet whose agents test the network between nodes without ranks, at speeds that the test sets."""

from __future__ import annotations

from dataclasses import replace

from fleet import Fleet

from holdfast.domain.links import LinkMeasured
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import CheckLink, OrderDone, PrepareTemplate
from holdfast.supervisor.protocol import Send

USUAL = 2e9  # bytes per second
ROUND_TRIP_S = 0.0001
UNREACHED = "it does not answer"


class Idle(Fleet):
    """`bad`: nodes with another speed than the usual one, 0 = not reached. `way`: likewise, between two zones."""

    def __init__(self, nodes: int, **options: object) -> None:
        self.bad: dict[str, float] = {}
        self.between_zones = USUAL
        self.silent: set[str] = set()  # they do not answer
        self.met: list[tuple[str, str]] = []  # tests that were begun: (node, partner)
        # Hours pass: a snapshot with each event is for the tests that ask for it.
        super().__init__(nodes, **{"snapshots": False, **options})  # type: ignore[arg-type]

    def facts(self, node: str, zone: str = "", capacity: int = 1) -> NodeFacts:
        known = self.state.nodes.get(node)
        zone = zone or (known.facts.zone if known is not None else "")
        return replace(super().facts(node, zone, capacity), tests_links=True)

    def play(self, seconds: float) -> None:
        """Time passes, and agents carry out their tests."""
        end = self.now + seconds
        while self.now < end:
            due = min([*self.state.timers.values(), end])
            self.wait(max(0.0, min(due, end) - self.now))
            self.answer_tests()

    def answer_tests(self) -> None:
        for send in [send for send in self.sent if isinstance(send.order, PrepareTemplate)]:
            self.done(send.node, PrepareTemplate)
        while orders := [send for send in self.tests() if send.node not in self.silent]:
            for send in orders:
                self.answer_test(send)

    def until_tests(self) -> list[Send]:
        """Time passes until nodes are ordered to test; no node answers."""
        end = self.now + 1e5
        while not self.tests():
            assert self.now < end
            self.wait(min(self.state.timers.values()) - self.now)
        return self.tests()

    def tests(self) -> list[Send]:
        return [send for send in self.sent if isinstance(send.order, CheckLink)]

    def answer_test(self, send: Send, *, ok: bool = True) -> None:
        order = send.order
        assert isinstance(order, CheckLink)
        link = self.measured(send.node, order.partner) if order.endpoint and ok else None
        if order.endpoint:
            self.met.append((send.node, order.partner))
        self.report(send.node, OrderDone(send.command_id, ok, "" if ok else "it has work", at=self.now, link=link))

    def measured(self, one: str, other: str) -> LinkMeasured:
        speed = min(self.bad.get(one, USUAL), self.bad.get(other, USUAL))
        zones = {self.state.nodes[each].facts.zone for each in (one, other)}
        if len(zones) > 1:
            speed = min(speed, self.between_zones)
        if not speed:
            return LinkMeasured(failure=UNREACHED)
        return LinkMeasured(0.97 * speed, speed, ROUND_TRIP_S)

    def out(self) -> set[str]:
        return {name for name, node in self.state.nodes.items() if node.unschedulable_reason}
