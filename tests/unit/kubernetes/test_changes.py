"""The changes reported to the supervisor: the difference between the cluster and what it knows, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kube_cluster import node, pod

from holdfast.kubernetes.changes import (
    DELETED,
    RENEW_S,
    SCHEDULED_LEAD_S,
    Announce,
    Change,
    Forget,
    Known,
    SetZone,
    Withdraw,
    changes,
    words,
)
from holdfast.kubernetes.machines import NODE, SCHEDULED, Cluster, ClusterEvent, Deleted, Listed, Put, Rules, fold

NOW = 1_790_000_000.0
CORDONED = "Kubernetes: cordoned"


def cluster(*events: ClusterEvent) -> Cluster:
    found = Cluster()
    for event in events:
        found = fold(found, event, Rules())
    return found


def changes_of(found: Cluster, *fleet: Known, at: float = NOW, confirmed: bool = True) -> list[Change]:
    return changes(found, {each.node: each for each in fleet}, at, confirmed=confirmed)


def folded(fleet: Iterable[Known], said: Iterable[Change], at: float = NOW) -> list[Known]:
    """What the supervisor knows then."""
    known = {each.node: each for each in fleet}
    for change in said:
        before = known[change.node]
        match change:
            case Announce(node=name, event=event, starts_at=starts_at):
                known[name] = Known(name, event, starts_at, at, before.zone)
            case Withdraw(node=name):
                known[name] = Known(name, "", None, at, before.zone)
            case SetZone(node=name, zone=zone):
                known[name] = Known(name, before.event, before.starts_at, before.notified_at, zone)
            case Forget(node=name):
                del known[name]
    return list(known.values())


def test_nothing_is_said_before_the_machines_are_listed() -> None:
    assert changes_of(Cluster(), Known("m1", CORDONED), Known("m2", away=True)) == []
    assert changes_of(cluster(Put(pod("p1", "m1"))), Known("m1", CORDONED)) == []


def test_a_cordon_is_announced_once_and_withdrawn_when_it_is_over() -> None:
    fleet = [Known("m1"), Known("m2")]
    cordoned = cluster(Listed(NODE, (node("m1", unschedulable=True), node("m2"))))
    said = changes_of(cordoned, *fleet)
    assert said == [Announce("m1", CORDONED, None)]
    fleet = folded(fleet, said)
    assert changes_of(cordoned, *fleet) == []
    free = fold(cordoned, Put(node("m1")), Rules())
    said = changes_of(free, *fleet)
    assert said == [Withdraw("m1")]
    assert changes_of(free, *folded(fleet, said)) == []


def test_a_notice_that_holds_is_repeated_while_the_cluster_is_seen() -> None:
    found, known = cluster(Listed(NODE, (node("m1", unschedulable=True),))), Known("m1", CORDONED, None, NOW)
    late = NOW + RENEW_S
    assert changes_of(found, known, at=late - 1) == []
    assert changes_of(found, known, at=late) == [Announce("m1", CORDONED, None)]
    assert changes_of(found, known, at=late, confirmed=False) == []


def test_nodes_outside_of_the_cluster_are_left_alone() -> None:
    found = cluster(Listed(NODE, (node("m1"),)))
    assert changes_of(found, Known("elsewhere", CORDONED), Known("another", away=True)) == []


def test_agents_that_share_a_machine_are_known_by_their_pods() -> None:
    found = cluster(
        Listed(NODE, (node("m1", unschedulable=True),)), Put(pod("p1", "m1")), Put(pod("p2", "m1")), Put(pod("p3", ""))
    )
    said = changes_of(found, Known("p1"), Known("p2"), Known("p3"))
    assert said == [Announce("p1", CORDONED, None), Announce("p2", CORDONED, None)]


def test_a_machine_that_is_deleted_leaves_and_its_node_is_forgotten_once_it_is_away() -> None:
    found = cluster(Listed(NODE, (node("m1"), node("m2"))), Deleted(node("m1")))
    assert changes_of(found, Known("m1"), Known("m2")) == [Announce("m1", DELETED, None)]
    assert changes_of(found, Known("m1", away=True)) == [Forget("m1", DELETED)]
    again = fold(found, Put(node("m1")), Rules())
    assert changes_of(again, Known("m1", DELETED)) == [Withdraw("m1")]
    assert changes_of(again, Known("m1", away=True)) == []  # a machine of this name is there


@pytest.mark.parametrize(("ahead_s", "is_near"), [(SCHEDULED_LEAD_S - 1, True), (SCHEDULED_LEAD_S + 1, False)])
def test_scheduled_maintenance_is_announced_when_it_is_near(ahead_s: float, is_near: bool) -> None:
    at = round(NOW + ahead_s)
    found = cluster(Put({"kind": NODE, "metadata": {"name": "m1", "labels": {SCHEDULED: str(at)}}}))
    said = changes_of(found, Known("m1"))
    assert said == ([Announce("m1", "Kubernetes: scheduled maintenance", float(at))] if is_near else [])
    if said:
        (known,) = folded([Known("m1")], said)
        assert changes_of(found, known) == []
        moved = {"kind": NODE, "metadata": {"name": "m1", "labels": {SCHEDULED: str(at + 3000)}}}
        assert changes_of(fold(found, Put(moved), Rules()), known) == [Withdraw("m1")]  # it is far ahead again


def test_zones_come_from_labels_and_only_when_they_are_others() -> None:
    labels = {"topology.kubernetes.io/zone": "b"}
    found = cluster(Put({"kind": NODE, "metadata": {"name": "m1", "labels": labels}}))
    assert changes_of(found, Known("m1")) == [SetZone("m1", "b")]
    assert changes_of(found, Known("m1", zone="a")) == [SetZone("m1", "b")]
    assert changes_of(found, Known("m1", zone="b")) == []


def test_everything_at_once_is_said_of_each_and_once() -> None:
    names = [f"m{index:03}" for index in range(500)]
    found = cluster(Listed(NODE, tuple(node(name, taints=("karpenter.sh/disrupted",)) for name in names)))
    said = changes_of(found, *(Known(name) for name in names))
    assert [each.node for each in said] == names
    assert changes_of(found, *folded((Known(name) for name in names), said)) == []


def test_any_order_of_events_ends_in_what_the_cluster_is() -> None:
    events: list[ClusterEvent] = [
        Put(node("m1", unschedulable=True)),
        Put(node("m1")),
        Put(node("m1", taints=("karpenter.sh/disrupted",))),
        Deleted(node("m1")),
        Put(node("m1")),
        Listed(NODE, (node("m1"),)),
    ]
    fleet = [Known("m1")]
    found = cluster(Listed(NODE, (node("m1"),)))
    for event in events:
        for _ in range(2):  # each twice
            found = fold(found, event, Rules())
            fleet = folded(fleet, changes_of(found, *fleet))
    assert fleet == [Known("m1", "", None, NOW)]


def test_words() -> None:
    assert words(Announce("m1", CORDONED, None)) == CORDONED
    assert "1790000000 (Unix seconds)" in words(Announce("m1", CORDONED, NOW))
    for change in (Withdraw("m1"), SetZone("m1", "b"), Forget("m1", DELETED)):
        assert words(change)
