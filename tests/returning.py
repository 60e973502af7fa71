"""Helpers for tests of nodes that a fault took out of service and that return."""

from __future__ import annotations

from dataclasses import replace

from fleet import Fleet, job

from holdfast.domain import orders
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.orders import Hello
from holdfast.supervisor.core import Node
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.rules.offenders import Fault
from holdfast.supervisor.return_rules import ReturnRules

RULES = ReturnRules()
HOLD, PROBATION = RULES.hold_s, RULES.probation_s
UNDER_WAY = Preflight()
FULL = (Check("disk", False, "/data is 99% full"),)


def result(fleet: Fleet, node: str, *checks: Check) -> None:
    fleet.report(node, orders.Tested(Preflight(fleet.now, 0.5, checks)))


def boot(fleet: Fleet, node: str, *, tests: bool = True) -> None:
    """Its machine was booted, and its agent connects; `tests`: which it passes a moment later."""
    fleet.life[node] = fleet.life.get(node, 0) + 1
    fleet.boots[node] = f"boot {fleet.life[node]}"
    fleet.seq[node] = 0
    fleet.report(node, Hello(fleet.facts(node), (), UNDER_WAY))
    if tests:
        result(fleet, node)


def training(dp: int = 2, spares: int = 1, *, min_dp: int = 1) -> Fleet:
    fleet = Fleet(0)
    for index in range(dp + spares):
        boot(fleet, f"n{index}")
    fleet.submit(job(dp=dp, min_dp=min_dp))
    fleet.run()
    return fleet


def xid(fleet: Fleet, node: str, severity: Severity = Severity.FATAL) -> None:
    """79: the catalogue says that the machine must be booted."""
    fleet.find(
        FindingKind.GPU_ERROR, node, severity=severity, recommended_actions=(Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)
    )


def off(fleet: Fleet, node: str) -> None:
    fleet.gone(node)
    fleet.wait(10)


def standing(fleet: Fleet, node: str) -> str:
    return returns.standing(fleet.state.nodes[node], fleet.now, PROBATION)


def spares(fleet: Fleet) -> tuple[str, ...]:
    return fleet.view.spares


def node_of(fleet: Fleet, name: str) -> Node:
    return fleet.state.nodes[name]


def fault(at: float, **changes: object) -> Fault:
    return replace(Fault(at, f"i-{at}", "job", 1.0), **changes)  # type: ignore[arg-type]


def lose(fleet: Fleet, node: str) -> None:
    fleet.lose(node)
    fleet.run()
