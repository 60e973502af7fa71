"""The circuit breaker of the whole fleet: when too much goes wrong at once, the view is more likely broken than the nodes.

Open, it stops new changes that faults ask for. Nothing is stopped: healthy runs go on. It closes by an operator or when the
window has passed; open incidents are then decided.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.supervisor.core.state import Breaker
from holdfast.supervisor.core.turn import Turn

TIMER = "breaker"


def is_open(turn: Turn) -> bool:
    return turn.breaker.open_until is not None


def count_condemned(turn: Turn, node: str) -> None:
    """`node` was lost or condemned by a finding."""
    breaker = _recent(turn)
    condemned = (*((at, name) for at, name in breaker.condemned if name != node), (turn.at, node))
    turn.set(breaker=replace(breaker, condemned=condemned))
    fleet = {node.name for node in turn.nodes.values() if node.connected} | {name for _, name in condemned}
    limit = max(turn.config.condemned_min, int(turn.config.condemned_fraction_max * len(fleet)))
    if len(condemned) > limit:
        names = ", ".join(sorted(name for _, name in condemned))
        _open(
            turn,
            f"{len(condemned)} of {len(fleet)} nodes condemned within {turn.config.breaker_window_s:.0f} s ({names}); "
            f"more than {limit} at once is more likely a fault of the network or of the supervisor's view",
        )


def count_change(turn: Turn) -> None:
    """A generation change began."""
    breaker = _recent(turn)
    changes = (*breaker.changes, turn.at)
    turn.set(breaker=replace(breaker, changes=changes))
    if len(changes) > turn.config.changes_max:
        _open(
            turn,
            f"{len(changes)} generation changes within {turn.config.breaker_window_s:.0f} s: acting does not help",
        )


def close(turn: Turn, why: str) -> None:
    """Act again, with clean counts."""
    if is_open(turn):
        turn.note("breaker", f"closed: {why}")
    turn.set(breaker=Breaker())
    turn.cancel_timer(TIMER)


def _recent(turn: Turn) -> Breaker:
    since = turn.at - turn.config.breaker_window_s
    breaker = turn.breaker
    return replace(
        breaker,
        condemned=tuple(item for item in breaker.condemned if item[0] > since),
        changes=tuple(at for at in breaker.changes if at > since),
    )


def _open(turn: Turn, reason: str) -> None:
    if is_open(turn):
        return
    until = turn.at + turn.config.breaker_window_s
    turn.set(breaker=replace(turn.breaker, open_until=until, reason=reason))
    turn.set_timer(TIMER, until)
    turn.note(
        "breaker", f"open, no action until an operator resets it or {turn.config.breaker_window_s:.0f} s pass: {reason}"
    )
