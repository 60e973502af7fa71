"""The circuit breaker of the fleet. If too much fails at once, the supervisor's view is more likely wrong than the nodes.

While it is open, no new changes begin because of faults, including those that are being decided. Nothing is stopped: healthy
runs continue. It closes when an operator resets it, when the window has passed, or when the suspected nodes prove to have been
lost. Open incidents are then decided.
"""

from __future__ import annotations

from itertools import islice
from math import ceil
from operator import itemgetter

from holdfast.domain.evolve import evolve
from holdfast.domain.incidents import Incident
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.state import Breaker
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.timers import BreakerWindowOver, ResetTimeout

_NAMES_MAX = 16  # in its reason, which is repeated with every deferred incident


def is_open(turn: Turn) -> bool:
    return turn.breaker.open_until is not None


def defer_incident(turn: Turn, incident: Incident) -> None:
    """Record that `incident` is not decided while the breaker is open."""
    turn.note(
        incident.job, f"no action for {incident.id} while the breaker is open ({turn.breaker.reason}): {incident.cause}"
    )


def count_failed(turn: Turn, node: str) -> None:
    """Count a node that was lost or taken out of service because of a finding."""
    breaker = _recent(turn)
    failed = (*breaker.failed_nodes, (turn.at, node))
    turn.set(breaker=evolve(breaker, failed_nodes=failed))
    # Evaluated only if it may matter: there may be thousands of failed nodes, and this runs for each of them.
    if not is_open(turn) and len(failed) > _limit(turn, turn.count(By.CONNECTED)):
        _doubt(turn, set(map(itemgetter(1), failed)))


def _doubt(turn: Turn, failed: set[str]) -> None:
    """Open if more nodes have failed than is plausible."""
    if _acceptable(turn, failed):
        return
    fleet = _seen(turn, failed) + _away(turn, failed)
    names = ", ".join(sorted(failed)[:_NAMES_MAX])
    names += f" and {len(failed) - _NAMES_MAX} more" if len(failed) > _NAMES_MAX else ""
    reason = (
        f"{len(failed)} of {fleet} nodes failed within {turn.config.breaker_window_s:.0f} s ({names}); "
        f"more than {_limit(turn, fleet)} at once is more likely a fault of the network or of the supervisor's view"
    )
    _open(turn, reason, opened_by_node_failures=True)


def count_agent_restart(turn: Turn, node: str) -> None:
    """The agent of `node` restarted: the node really was lost, so its loss is no sign of a wrong view."""
    breaker = _recent(turn)
    failed = tuple(item for item in breaker.failed_nodes if item[1] != node)
    turn.set(breaker=evolve(breaker, failed_nodes=failed))
    names = {name for _, name in failed}
    if is_open(turn) and breaker.opened_by_node_failures and _acceptable(turn, names):
        close(turn, f"{node} started again, so what was seen of it was right", counts=turn.breaker)


def count_change(turn: Turn) -> None:
    """A generation change began."""
    breaker = _recent(turn)
    changes = (*breaker.changes, turn.at)
    turn.set(breaker=evolve(breaker, changes=changes))
    limit = max(turn.config.changes_max, int(turn.config.changes_per_job_max * len(turn.jobs)))
    if len(changes) > limit:
        reason = f"{len(changes)} generation changes within {turn.config.breaker_window_s:.0f} s: acting does not help"
        _open(turn, reason, opened_by_node_failures=False)


def close(turn: Turn, why: str, *, counts: Breaker | None = None) -> None:
    """Close the breaker, with empty counts or these."""
    if is_open(turn):
        turn.note("breaker", f"closed: {why}")
    turn.set(breaker=evolve(counts or Breaker(), open_until=None, reason="", opened_by_node_failures=False))
    turn.touch_all()
    turn.cancel_timer(BreakerWindowOver())
    for timer in [each for each in turn.timers if isinstance(each, ResetTimeout)]:
        turn.postpone_timer(timer, turn.at + turn.config.reset_s)  # no reset was ordered while it was open


def _recent(turn: Turn) -> Breaker:
    return turn.breaker.since(turn.at - turn.config.breaker_window_s)


def _acceptable(turn: Turn, failed: set[str]) -> bool:
    """Whether it is plausible that all of these nodes have failed."""
    seen = _seen(turn, failed)
    # Disconnected nodes make the fleet larger; they are counted only if that matters.
    if len(failed) <= _limit(turn, seen):
        return True
    fraction = turn.config.breaker_failed_fraction_max
    needed = max(0, ceil(len(failed) / fraction) + 1 - seen) if fraction > 0 else 0
    return len(failed) <= _limit(turn, seen + _away(turn, failed, at_most=needed))


def _seen(turn: Turn, failed: set[str]) -> int:
    """Return how many nodes have a session or have failed."""
    connected = turn.group(By.CONNECTED)
    return len(connected) + len(failed - connected.keys())


def _away(turn: Turn, failed: set[str], *, at_most: int | None = None) -> int:
    """Number of other nodes that had a session within the window: they may return at any moment and belong to the fleet. Nodes
    that disconnected earlier count only if they are among the failed ones. `at_most`: counting ends there."""
    since, nodes = turn.at - turn.config.breaker_window_s, turn.nodes
    away = (1 for name in turn.group(By.AWAY) if name not in failed and nodes[name].gone_at > since)
    return sum(islice(away, at_most))


def _limit(turn: Turn, fleet: int) -> int:
    """Return how many of `fleet` nodes may fail within the window."""
    return max(turn.config.breaker_failed_nodes_min, int(turn.config.breaker_failed_fraction_max * fleet))


def _open(turn: Turn, reason: str, *, opened_by_node_failures: bool) -> None:
    if is_open(turn):
        return
    until = turn.at + turn.config.breaker_window_s
    turn.set(
        breaker=evolve(turn.breaker, open_until=until, reason=reason, opened_by_node_failures=opened_by_node_failures)
    )
    turn.set_timer(BreakerWindowOver(), until)
    turn.note(
        "breaker", f"open, no action until an operator resets it or {turn.config.breaker_window_s:.0f} s pass: {reason}"
    )
    asked = [turn.incidents[each] for each in turn.questions]
    held = [incident for incident in asked if not incident.planned]
    turn.withdraw_all(incident.id for incident in held)
    for incident in held:
        defer_incident(turn, incident)
