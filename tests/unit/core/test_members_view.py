"""The view that a plan gets of the members of a generation: their values are computed when they are read."""

from __future__ import annotations

import pytest
from fleet import JOB, job, running

from holdfast.supervisor.core.incidents.views import _OfMembers
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn


def test_it_has_the_members_of_the_generation_and_reads_only_those_that_are_asked_for() -> None:
    fleet = running(job(3, min_dp=1), spares=2)
    generation = fleet.state.jobs[JOB].generation
    assert generation is not None
    read: list[str] = []

    def zone(node: Node) -> str:
        read.append(node.name)
        return f"zone of {node.name}"

    view = _OfMembers(Turn(fleet.state, fleet.now), generation, zone)
    assert (len(view), set(view)) == (3, set(generation.nodes))
    assert set(fleet.state.nodes) - set(view), "spares are no members"
    assert not read
    member, *_ = generation.nodes
    assert view[member] == f"zone of {member}"
    assert read == [member]


def test_spares_unknown_nodes_and_members_that_are_gone_are_absent() -> None:
    fleet = running(job(3, min_dp=1), spares=1)
    generation = fleet.state.jobs[JOB].generation
    assert generation is not None
    (spare,) = set(fleet.state.nodes) - set(generation.nodes)
    turn = Turn(fleet.state, fleet.now)
    view = _OfMembers(turn, generation, lambda node: node.zone)
    for name in (spare, "unknown"):
        assert name not in view
        assert view.get(name) is None
        with pytest.raises(KeyError):
            view[name]


def test_without_a_generation_it_is_empty() -> None:
    fleet = running(job(2, min_dp=1))
    view = _OfMembers(Turn(fleet.state, fleet.now), None, lambda node: node.zone)
    assert (len(view), list(view)) == (0, [])
    assert not any(name in view for name in fleet.state.nodes)
