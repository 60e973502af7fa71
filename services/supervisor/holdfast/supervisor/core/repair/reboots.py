"""Orders the boot of machines that only a boot brings back, where their agents have a command for it.

    out of service, cured by a boot ──nothing needs the node──► RebootNode ──another boot id──► hold-down (returns.py)
                                                                    └──────► three tries failed, or no boot came: an operator

Theory of operation. The node has no ranks: a fault took it out (`Removal` with `Cure.REBOOT`). Only its memory could be lost:
a checkpoint that has no other copy yet, or shards that a change of a job fetches from it now. `review` runs when the node's
row has changed, and every `LOOK_S` while something prevents the boot. An agent that finds workers refuses. While the circuit
breaker is open no order is sent: then the supervisor's view is more likely wrong.

That the machine has booted is never concluded from the answer, but from its boot id (returns.py).
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.orders import OrderDone, RebootNode
from holdfast.supervisor.core.fleet import breaker, nodes
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.lifecycle import Deferred, Pending, Running, Suspended, Waiting
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.holddown import REBOOTS_MAX, REQUESTS_MAX, Cure, Reboot, Removal, Replacement
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.timers import RebootDue

COMMAND_S = 60.0
_SETTLED = Running | Pending | Waiting | Suspended | Deferred  # such a job fetches no shards
INVENTORY_S = 15.0  # a replicator scans its directories when it starts, which takes a second or two
LOOK_S = 30.0  # between two checks of what prevents a boot or a replacement, and before another boot
BOOT_S = 1800.0  # large machines test their memory for minutes


def review(turn: Turn, name: str) -> None:
    """Order the boot if it is due and possible now."""
    node = turn.nodes.get(name)
    if node is None or (removal := _waits_for_boot(turn, node)) is None:
        return
    reboot = removal.reboot or Reboot()
    if reboot.ordered_at is not None:
        if turn.at >= reboot.ordered_at + BOOT_S:
            withdraw(turn, name)
            _fail(turn, name, f"{BOOT_S / 60:.0f} min after the order it had not booted")
        return
    if breaker.is_open(turn) or not node.connected or node.unheard or node.lost or reboot.tries >= REBOOTS_MAX:
        return
    if RebootDue(name) in turn.timers and turn.timers[RebootDue(name)] > turn.at:
        return
    if waits := obstacle(turn, node):
        turn.set_timer(RebootDue(name), turn.at + LOOK_S)
        if reboot.waits != waits:
            turn.put_node(name, removal=evolve(removal, reboot=evolve(reboot, waits=waits)))
        return
    reboot = evolve(reboot, tries=reboot.tries + 1, ordered_at=turn.at, waits="")
    turn.put_node(name, removal=evolve(removal, reboot=reboot))
    turn.set_timer(RebootDue(name), turn.at + BOOT_S)
    turn.send(name, RebootNode(removal.cause, COMMAND_S))
    nodes.refresh(turn, name, f"its machine is booted: {removal.cause}")


def _waits_for_boot(turn: Turn, node: Node) -> Removal | None:
    removal = node.removal
    if removal is None or removal.final or removal.back_at is not None or removal.cure is not Cure.REBOOT:
        return None
    if _is_replaced(turn, removal):
        return None
    same = bool(removal.boot_id) and node.facts.boot_id == removal.boot_id
    return removal if node.facts.reboots and same else None


def _is_replaced(turn: Turn, removal: Removal) -> bool:
    """Whether another machine replaces it, or will be requested before a boot is tried."""
    request = removal.replacement or Replacement()
    if request.under_way:
        return True
    return removal.replace and bool(turn.config.replacements.provider) and request.tries < REQUESTS_MAX


def obstacle(turn: Turn, node: Node) -> str:
    """What prevents the boot of the node now, one clause; empty if nothing does."""
    if turn.group(By.HELD, node.name) or node.workers:
        return "workers still run on it"
    if may_hold_shards(turn, node):
        return "it has not reported which shards it holds"
    for name in sorted(node.inventory):
        if is_in_change(turn, name):
            return f"{name} is in a change, and may fetch shards from it"
        if saved.only_in_memory_of(turn, name, node):
            return f"its memory has the only copy of a checkpoint of {name}"
    return ""


def may_hold_shards(turn: Turn, node: Node) -> bool:
    """Whether the node has just connected and may still report shards. A node that never held any reports none."""
    silent = bool(node.facts.replicator_endpoint) and not node.inventoried
    return silent and turn.at < node.connected_at + INVENTORY_S


def is_in_change(turn: Turn, name: str) -> bool:
    """Whether the job may be fetching shards from any node now."""
    job = turn.jobs.get(name)
    settled = job is None or job.phase.finished or isinstance(job.doing, _SETTLED)
    return not settled


def on_answer(turn: Turn, name: str, done: OrderDone) -> None:
    if done.ok:
        turn.note(name, f"its machine has been ordered to boot{f': {done.reason}' if done.reason else ''}")
    else:
        _fail(turn, name, done.reason)


def _fail(turn: Turn, name: str, why: str) -> None:
    removal = turn.nodes[name].removal
    if removal is None or removal.reboot is None:
        return  # an operator has decided
    reboot = evolve(removal.reboot, ordered_at=None, failure=why)
    turn.put_node(name, removal=evolve(removal, reboot=reboot))
    turn.set_timer(RebootDue(name), turn.at + LOOK_S)
    nodes.refresh(turn, name, f"its machine could not be booted: {why}")


def withdraw(turn: Turn, name: str) -> None:
    """Withdraw the unanswered order, if there is one: the machine has booted, or need not any more."""
    turn.cancel_timer(RebootDue(name))
    if (send := turn.order_to(name, RebootNode)) is not None:
        turn.forget_order(send)
