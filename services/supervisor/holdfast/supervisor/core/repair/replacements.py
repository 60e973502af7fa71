"""Requests another machine in place of one that does not return, if the operator has configured a provider.

    out of service ──only an operator brings it back, or `after_s` over──► RequestReplacement ──agreed──► another machine
                                                                     └──refused──► three tries, then an operator

Theory of operation. The node has no ranks: a fault took it out (`Removal`), and its job has recovered. A replaced machine takes
its disks along, so it must not hold the only copy of anything of a job: neither shards of the newest step that can be restored,
nor any that a change fetches now. Disconnected machines count as holders of their shards, because they may return, unless they
are being replaced. While the circuit breaker is open nothing is requested: then the supervisor's view is more likely wrong.

A request is sent once. After an agreement, no other one is sent for the same fault. If no answer arrives, because the leader
ended meanwhile, it is unknown whether a machine was replaced: an operator must find out.

The arrival of another machine is not concluded from the answer, but from its machine id (`returns.on_other_machine`).
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.supervisor.core.fleet import breaker, nodes, returns
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import reboots
from holdfast.supervisor.core.rules.holddown import REQUESTS_MAX, Cure, Removal, Replacement
from holdfast.supervisor.core.rules.wording import moment
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.protocol import ProviderAnswered, RequestReplacement
from holdfast.supervisor.return_rules import DAY_S
from holdfast.supervisor.timers import ReplacementDue

RETRY_S = 300.0  # after a refusal


def review(turn: Turn, name: str) -> None:
    """Request another machine if it is due and possible now."""
    node, rules = turn.nodes.get(name), turn.config.replacements
    if not rules.provider or node is None or (removal := _out(node)) is None:
        return
    request = removal.replacement or Replacement()
    if request.asked_at is not None:
        if turn.at >= request.asked_at + turn.config.provider_s and not request.failure:
            why = f"{rules.provider} has not answered: look whether the machine is replaced"
            _put(turn, name, evolve(request, failure=why))
        return
    if request.agreed_at is not None or request.tries >= REQUESTS_MAX or breaker.is_open(turn):
        return
    due = max(_due(turn, node, removal), turn.timers.get(ReplacementDue(name), 0.0))
    if turn.at < due:
        if ReplacementDue(name) not in turn.timers:
            turn.set_timer(ReplacementDue(name), due)
        return
    waits, again = obstacle(turn, node), turn.at + reboots.LOOK_S
    if not waits and (until := _full_until(turn)) > turn.at:
        waits = f"{rules.per_day_max} machines have been replaced within a day: until {moment(until, turn.at)}"
        again = until
    if waits:
        turn.set_timer(ReplacementDue(name), again)
        if request.waits != waits:
            _put(turn, name, evolve(request, waits=waits))
        return
    _ask(turn, node, removal, request)


def _ask(turn: Turn, node: Node, removal: Removal, request: Replacement) -> None:
    tries = request.tries + 1
    identifier = f"{node.name}-{int(removal.at)}-{tries}"
    turn.set(replaced=(*(at for at in turn.replaced if turn.at - at < DAY_S), turn.at))
    reboots.withdraw(turn, node.name)
    _put(turn, node.name, evolve(request, tries=tries, request=identifier, asked_at=turn.at, waits="", failure=""))
    turn.set_timer(ReplacementDue(node.name), turn.at + turn.config.provider_s)
    facts = node.facts
    turn.commands.append(RequestReplacement(node.name, identifier, facts.hostname, facts.address, removal.cause))
    turn.note(node.name, f"another machine is requested from {turn.config.replacements.provider}: {removal.cause}")


def _out(node: Node) -> Removal | None:
    """The removal of a node whose machine may be replaced: it is not back, or only an operator brings it back. A node that
    fails its own tests is excluded: no machine is replaced for a full disk."""
    removal = node.removal
    if removal is None or (removal.cure is Cure.TESTS and not removal.final):
        return None
    return removal if removal.back_at is None or removal.final else None


def _due(turn: Turn, node: Node, removal: Removal) -> float:
    """When the machine has had enough time to return by itself."""
    if removal.final or removal.replace or not returns.comes_back(node):
        return removal.at
    due = removal.at + turn.config.replacements.after_s
    if removal.reboot is not None and removal.reboot.ordered_at is not None:
        return max(due, removal.reboot.ordered_at + reboots.BOOT_S)
    return due


def _full_until(turn: Turn) -> float:
    """Until when the daily limit of replacements is reached; in the past if there is room."""
    recent = [at for at in turn.replaced if turn.at - at < DAY_S]
    most = turn.config.replacements.per_day_max
    if len(recent) < most:
        return 0.0
    return recent[-most] + DAY_S if most else turn.at + DAY_S


def obstacle(turn: Turn, node: Node) -> str:
    """What prevents the replacement of the machine now, one clause; empty if nothing does."""
    if node.connected and (turn.group(By.HELD, node.name) or node.workers):
        return "workers still run on it"
    if node.connected and reboots.may_hold_shards(turn, node):
        return "it has not reported which shards it holds"
    for name in sorted(node.inventory):
        if reboots.is_in_change(turn, name):
            return f"{name} is in a change, and may fetch shards from it"
        if saved.only_on(turn, name, node):
            return f"it has the only copy of a checkpoint of {name}"
    return ""


def on_answer(turn: Turn, event: ProviderAnswered) -> None:
    node = turn.nodes.get(event.node)
    request = node.removal.replacement if node is not None and node.removal is not None else None
    if request is None or request.request != event.request or request.agreed_at is not None:
        return  # an operator has decided, or the answer is repeated
    turn.cancel_timer(ReplacementDue(event.node))
    if event.ok:
        _put(turn, event.node, evolve(request, asked_at=None, agreed_at=turn.at, answer=event.reason, failure=""))
        nodes.refresh(turn, event.node, f"its machine is being replaced{_suffix(event.reason)}")
        return
    _put(turn, event.node, evolve(request, asked_at=None, failure=event.reason))
    turn.note(event.node, f"its machine is not replaced: {event.reason}")
    turn.set_timer(ReplacementDue(event.node), turn.at + RETRY_S)


def withdraw(turn: Turn, name: str) -> None:
    """An operator keeps the node out of service: no longer wait for another machine."""
    turn.cancel_timer(ReplacementDue(name))


def _put(turn: Turn, name: str, request: Replacement) -> None:
    removal = turn.nodes[name].removal
    assert removal is not None
    turn.put_node(name, removal=evolve(removal, replacement=request))


def _suffix(words: str) -> str:
    return f": {words}" if words else ""
