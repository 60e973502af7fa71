"""What a cluster says of machines: failure domains that agents do not know, and machines that are gone for good."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import Prepare
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.leader.cluster import FleetOfTerm
from holdfast.supervisor.protocol import JobPhase, MachineDeleted, MachineLabelled, Noted, NoticeRequested
from holdfast.supervisor.timers import NoticeDue


def label(fleet: Fleet, node: str, zone: str) -> None:
    fleet.fold(MachineLabelled(fleet.now, node, zone))


def delete(fleet: Fleet, node: str) -> None:
    fleet.fold(MachineDeleted(fleet.now, node, "its machine was deleted from the cluster"))


def test_copies_go_to_other_failure_domains_than_their_own() -> None:
    fleet = Fleet(4)
    for index, zone in enumerate("aabb"):
        label(fleet, f"n{index}", zone)
    fleet.submit(job(dp=4))
    orders = fleet.orders(Prepare)
    assert len(orders) == 4
    domains = dict(zip(("n0", "n1", "n2", "n3"), "aabb", strict=True))
    for node, order in orders.items():
        assert isinstance(order, Prepare)
        assert domains[order.peers[0].node] != domains[node]


def test_the_setting_of_an_agent_takes_precedence_and_labels_outlive_its_restart() -> None:
    fleet = Fleet(2, zones="xx")
    fleet.connect("n2")
    for node in ("n0", "n2", "unknown"):
        label(fleet, node, "a")
    assert [fleet.state.nodes[node].zone for node in ("n0", "n1", "n2")] == ["x", "x", "a"]
    fleet.connect("n2")
    assert fleet.state.nodes["n2"].zone == "a"
    label(fleet, "n2", "b")
    assert fleet.state.nodes["n2"].zone == "b"


def test_a_spare_whose_machine_is_deleted_is_forgotten_once_it_is_lost() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.fold(NoticeRequested(fleet.now, "n2", "kubernetes", "cordoned"))
    delete(fleet, "n2")
    assert "n2" in fleet.state.nodes  # its agent is there, whatever the cluster says
    fleet.gone("n2")
    delete(fleet, "n2")
    assert "n2" in fleet.state.nodes  # it may be back
    fleet.wait(fleet.state.config.lost_after_s + 1)
    assert fleet.state.nodes["n2"].state is NodeState.LOST
    delete(fleet, "n2")
    delete(fleet, "n2")
    assert "n2" not in fleet.state.nodes
    assert NoticeDue("n2") not in fleet.state.timers
    assert [each.text for each in fleet.records if isinstance(each, Noted) and each.subject == "n2"] == [
        "removed: its machine was deleted from the cluster"
    ]
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_node_whose_ranks_may_still_run_is_not_forgotten() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.lose("n1")
    delete(fleet, "n1")
    assert "n1" in fleet.state.nodes
    assert JOB in fleet.state.live_on(fleet.state.nodes["n1"])
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_lost_node_is_away_when_its_workers_have_ended_and_the_cluster_is_compared_again() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    seen = FleetOfTerm(lambda: fleet.state, lambda event: None, lambda: fleet.now)
    fleet.lose("n1")
    before = seen.version()
    assert not seen.known()["n1"].away
    assert seen.version() is before
    turn = Turn(fleet.state, fleet.now)
    turn.end_live(JOB, ("n1",))
    fleet.state = turn.finish()
    assert seen.known()["n1"].away
    assert seen.version() is not before


@pytest.mark.parametrize("node", ["n9", ""])
def test_machines_that_no_node_has_are_nobodys(node: str) -> None:
    fleet = Fleet(1)
    before = fleet.state.nodes
    delete(fleet, node)
    label(fleet, node, "a")
    assert fleet.state.nodes == before
