"""Invitations: with each of them, one node or a counted number of nodes may get a certificate.

    made ──► used up      by the last node that it is for
      ├────► expired
      └────► revoked      by an administrator

Invitations are part of the leader's state. If two machines use one at the same time, the first request that is folded gets the
certificate, whichever supervisor leads. The state contains only a digest of the token. An invitation that is used up, expired
or revoked is kept for a week, so that a refusal can state the reason.
"""

from __future__ import annotations

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.evolve import evolve
from holdfast.supervisor.core.model.state import Invite, State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import InviteMade, InviteRevoked, InviteUsed

OPEN_MAX, ENDED_MAX = 500, 500
USES_MAX = 1000
TTL_S_MAX = 30 * 86_400.0
KEPT_S = 7 * 86_400.0  # after its end


def check_made(state: State, event: InviteMade) -> None:
    """Raises `InvalidSpec` or `Conflict`."""
    if not 0 < event.ttl_s <= TTL_S_MAX:
        raise InvalidSpec("ttl_s", event.ttl_s, f"more than 0, and at most {TTL_S_MAX:.0f} (30 days)")
    if not 1 <= event.uses <= (1 if event.node else USES_MAX):
        expected = "1 for the invitation of one node" if event.node else f"1 to {USES_MAX}"
        raise InvalidSpec("uses", event.uses, expected)
    if any(each.id == event.invite or each.digest == event.digest for each in state.invites):
        raise Conflict(f"there is an invitation {event.invite} already")
    if sum(not state_of(each, event.at) for each in state.invites) >= OPEN_MAX:
        raise Conflict(f"there are {OPEN_MAX} open invitations: revoke some (holdfast nodes invites list)")


def check_revoked(state: State, event: InviteRevoked) -> None:
    """Raises `NotFound`, or `Conflict` if it is over already."""
    found = _find(state, event.invite)
    if over := state_of(found, event.at):
        raise Conflict(f"invitation {event.invite} {over}")


def check_used(state: State, event: InviteUsed) -> None:
    """Raises `NotFound`, or `Conflict` with the reason why this node may not join by it."""
    found = _find(state, event.invite)
    if over := state_of(found, event.at):
        raise Conflict(f"invitation {event.invite} {over}; ask for another one (holdfast nodes invite)")
    if found.node not in ("", event.node):
        raise Conflict(f"invitation {event.invite} is for node {found.node}, not for {event.node}")
    if any(node == event.node for node, _ in found.used):
        raise Conflict(
            f"node {event.node} has joined by invitation {event.invite} already: each node needs its own name"
        )
    if not found.node and event.node in state.nodes:
        raise Conflict(
            f"the fleet has a node {event.node}, whose name an invitation for any node cannot take; if that is this machine, "
            f"invite it by name (holdfast nodes invite {event.node})"
        )


def make(turn: Turn, event: InviteMade) -> None:
    over = [each.id for each in turn.invites if (ended := each.ended_at(turn.at)) and turn.at - ended < KEPT_S]
    kept = set(over[-ENDED_MAX:])
    known = (each for each in turn.invites if each.id in kept or not each.ended_at(turn.at))
    made = Invite(event.invite, event.digest, event.node, event.uses, turn.at, turn.at + event.ttl_s, event.by)
    turn.set(invites=(*known, made))


def revoke(turn: Turn, event: InviteRevoked) -> None:
    _change(turn, event.invite, revoked_at=turn.at)


def use(turn: Turn, event: InviteUsed) -> None:
    found = next(each for each in turn.invites if each.id == event.invite)
    _change(turn, event.invite, used=(*found.used, (event.node, turn.at)))
    turn.note(f"node {event.node}", f"joined by invitation {event.invite} of {found.by or 'an administrator'}")


def state_of(invite: Invite, at: float) -> str:
    """Return how an invitation ended, as the predicate of a sentence; empty for one that is open."""
    if invite.revoked_at is not None:
        return "was revoked"
    if len(invite.used) >= invite.uses:
        return f"was used already, by {', '.join(node for node, _ in invite.used[-3:])}"
    return "has expired" if at >= invite.expires_at else ""


def _find(state: State, invite: str) -> Invite:
    for each in state.invites:
        if each.id == invite:
            return each
    raise NotFound(f"there is no invitation {invite}, or it is too long ago")


def _change(turn: Turn, invite: str, **changes: object) -> None:
    turn.set(invites=tuple(evolve(each, **changes) if each.id == invite else each for each in turn.invites))
