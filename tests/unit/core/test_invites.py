"""Invitations in the leader's state: what ends one, and that the list stays short."""

from __future__ import annotations

import pytest
from fleet import Fleet

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound
from holdfast.supervisor.core.fleet import invites
from holdfast.supervisor.core.fleet.invites import KEPT_S, TTL_S_MAX
from holdfast.supervisor.protocol import InviteMade, InviteRevoked, InviteUsed, Noted, Publish
from holdfast.supervisor.requests import OperatorEvent, accepted, check, fingerprint

HOUR_S = 3600.0


def made(fleet: Fleet, name: str = "i1", node: str = "node-7", uses: int = 1, ttl_s: float = HOUR_S) -> InviteMade:
    return InviteMade(fleet.now, name, f"digest of {name}", node, uses, ttl_s, "ada")


def fold(fleet: Fleet, event: OperatorEvent) -> str:
    """As the leader does: the reason of a refusal, or nothing."""
    try:
        check(fleet.state, event)
    except HoldfastError as error:
        return str(error)
    fleet.fold(event)
    assert accepted(event)
    return ""


def test_the_first_that_is_folded_has_it() -> None:
    fleet = Fleet(1)
    assert fold(fleet, made(fleet)) == ""
    commands = fleet.fold(InviteUsed(fleet.now, "i1", "node-7"))
    assert [each.record.text for each in commands if isinstance(each, Publish) and isinstance(each.record, Noted)] == [
        "joined by invitation i1 of ada"
    ]
    assert "was used already, by node-7" in fold(fleet, InviteUsed(fleet.now, "i1", "node-7"))
    assert "was used already" in fold(fleet, InviteRevoked(fleet.now, "i1")), "there is nothing to revoke"


def test_it_ends_at_its_time_and_not_before() -> None:
    fleet = Fleet(1)
    fold(fleet, made(fleet))
    begun = fleet.now
    fleet.now = begun + HOUR_S
    assert "has expired" in fold(fleet, InviteUsed(fleet.now, "i1", "node-7"))
    assert fold(fleet, InviteUsed(fleet.now - 0.001, "i1", "node-7")) == ""


def test_what_is_no_invitation_is_refused_by_name() -> None:
    fleet = Fleet(1)
    for event, kind in (
        (made(fleet, ttl_s=TTL_S_MAX + 1), InvalidSpec),
        (made(fleet, uses=2), InvalidSpec),  # of one node
        (made(fleet, node="", uses=1001), InvalidSpec),
        (InviteRevoked(fleet.now, "none"), NotFound),
        (InviteUsed(fleet.now, "none", "node-7"), NotFound),
    ):
        with pytest.raises(kind):
            check(fleet.state, event)
    fold(fleet, made(fleet))
    with pytest.raises(Conflict, match="there is an invitation i1 already"):
        check(fleet.state, made(fleet))


def test_the_same_request_again_is_the_same_whenever_it_is_made() -> None:
    fleet = Fleet(1)
    first = made(fleet)
    fleet.now += 10
    assert fingerprint(first) == fingerprint(made(fleet))
    assert fingerprint(first) != fingerprint(made(fleet, node="node-8"))


def test_the_list_has_a_bound_and_loses_no_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(invites.OPEN_MAX, invites.ENDED_MAX) <= 500, "the whole list is in each snapshot"
    monkeypatch.setattr(invites, "OPEN_MAX", open_max := 50)
    monkeypatch.setattr(invites, "ENDED_MAX", ended_max := 50)
    fleet = Fleet(1)
    for number in range(open_max):
        assert fold(fleet, made(fleet, f"i{number}")) == ""
    assert f"there are {open_max} open invitations" in fold(fleet, made(fleet, "more"))
    for number in range(open_max):
        assert fold(fleet, InviteRevoked(fleet.now, f"i{number}")) == ""
    for number in range(ended_max):
        assert fold(fleet, made(fleet, f"j{number}")) == ""
    assert len(fleet.state.invites) <= open_max + ended_max
    assert {f"j{number}" for number in range(open_max)} <= {each.id for each in fleet.state.invites}
    fleet.now += KEPT_S + HOUR_S + 1
    fold(fleet, made(fleet, "last"))
    assert [each.id for each in fleet.state.invites] == ["last"], "what ended a week ago is forgotten"
