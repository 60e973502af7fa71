"""An operator has an agent replaced: once, never under workers, and what cannot be is said."""

from __future__ import annotations

import dataclasses

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.errors import HoldfastError
from holdfast.domain.orders import RestartAgent
from holdfast.supervisor.core import State, check_agent_restart
from holdfast.supervisor.protocol import AgentRestartRequested, JobPhase


def able(fleet: Fleet, node: str) -> State:
    """The state with an agent that takes the order."""
    known = fleet.state.nodes[node]
    facts = dataclasses.replace(known.facts, restarts=True)
    return dataclasses.replace(fleet.state, nodes={**fleet.state.nodes, node: dataclasses.replace(known, facts=facts)})


def test_a_spare_gets_the_order_once_and_its_new_incarnation_ends_the_order() -> None:
    fleet = running(job(dp=2), spares=1)
    for _ in range(2):
        fleet.fold(AgentRestartRequested(fleet.now, "n2", "a new version"))
    assert fleet.orders(RestartAgent) == {"n2": RestartAgent("a new version")}
    fleet.connect("n2")
    assert not fleet.orders(RestartAgent)
    fleet.expect(JobPhase.RUNNING)


def test_no_agent_is_restarted_under_workers() -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.fold(AgentRestartRequested(fleet.now, "n0", "a new version"))
    assert not fleet.orders(RestartAgent)
    assert "not restarted: the node has workers" in fleet.notes()


@pytest.mark.parametrize(
    ("node", "gone", "why"),
    [
        ("n9", False, "there is no node n9"),
        ("n2", True, "n2 has no session"),
        ("n0", False, f"n0 has workers of {JOB}"),
    ],
)
def test_what_cannot_be_is_said_at_once(node: str, gone: bool, why: str) -> None:
    fleet = running(job(dp=2), spares=1)
    if gone:
        fleet.gone(node)
    state = able(fleet, node) if node in fleet.state.nodes else fleet.state
    with pytest.raises(HoldfastError, match=why):
        check_agent_restart(state, AgentRestartRequested(fleet.now, node, "a new version"))


def test_an_agent_of_an_earlier_version_is_not_asked() -> None:
    fleet = running(job(dp=2), spares=1)
    with pytest.raises(HoldfastError, match="does not support this order"):
        check_agent_restart(fleet.state, AgentRestartRequested(fleet.now, "n2", "a new version"))
    check_agent_restart(able(fleet, "n2"), AgentRestartRequested(fleet.now, "n2", "a new version"))
