"""What objects of the API server mean, and what does not matter in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kube_cluster import node, pod

from holdfast.domain.errors import MalformedMessage
from holdfast.kubernetes.machines import (
    CONDEMNED,
    NODE,
    POD,
    Cluster,
    Deleted,
    Listed,
    Machine,
    Put,
    Rules,
    fold,
    machine,
)

RULES = Rules()
TERMINATION = "cloud.google.com/impending-node-termination"


def cluster(*events: Any, rules: Rules = RULES) -> Cluster:
    found = Cluster()
    for event in events:
        found = fold(found, event, rules)
    return found


@pytest.mark.parametrize(
    ("found", "leaving"),
    [
        (node("m1"), ""),
        (node("m1", unschedulable=True), "cordoned"),
        (node("m1", taints=(TERMINATION,)), f"taint {TERMINATION}"),
        (node("m1", unschedulable=True, taints=("node.kubernetes.io/unschedulable",)), "cordoned"),
        (node("m1", taints=("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "nvidia.com/gpu")), ""),
        (node("m1", labels={"cloud.google.com/x": "y"}), ""),
        ({"metadata": {"name": "m1"}}, ""),
        ({"metadata": {"name": "m1", "labels": None}, "spec": {"taints": None, "unschedulable": None}}, ""),
        ({"metadata": {"name": "m1"}, "spec": {"taints": ["x", {"key": 7}, {}], "unschedulable": "true"}}, ""),
        (
            {"metadata": {"name": "m1", "labels": {"cloud.google.com/active-node-maintenance": "ONGOING"}}},
            "label cloud.google.com/active-node-maintenance=ONGOING",
        ),
        ({"metadata": {"name": "m1", "labels": {"cloud.google.com/perform-maintenance": "false"}}}, ""),
        (
            {"metadata": {"name": "m1", "annotations": {CONDEMNED: "Xid 79"}}, "spec": {"unschedulable": True}},
            "",  # our own cordon is no notice of somebody else's
        ),
    ],
    ids=str,
)
def test_what_makes_a_machine_leave(found: dict[str, Any], leaving: str) -> None:
    assert machine(found, RULES).leaving == leaving


def test_not_ready_is_nothing() -> None:
    conditions = [{"type": "Ready", "status": "Unknown"}, {"type": "MemoryPressure", "status": "True"}]
    before = cluster(Put(node("m1")))
    assert fold(before, Put({**node("m1"), "status": {"conditions": conditions}}), RULES) is before


@pytest.mark.parametrize(
    ("value", "at"), [("1790000000", 1.79e9), ("soon", None), ("", None), ("-5", None), ("nan", None), ("1e400", None)]
)
def test_scheduled_maintenance(value: str, at: float | None) -> None:
    found = {"metadata": {"name": "m1", "labels": {"cloud.google.com/scheduled-maintenance-time": value}}}
    assert machine(found, RULES) == Machine("m1", "", at)


def test_the_first_label_that_a_machine_has_names_its_failure_domain() -> None:
    labels = {"topology.kubernetes.io/zone": "us-central1-a"}
    found: dict[str, Any] = {"metadata": {"name": "m1", "labels": labels}}
    assert machine(found, RULES).zone == "us-central1-a"
    labels["cloud.google.com/gce-topology-subblock"] = "b7"
    assert machine(found, RULES).zone == "b7"
    assert machine(found, replace(RULES, zone_labels=("rack",))).zone == ""


def test_the_operators_taints_are_his() -> None:
    rules = Rules(taints=("example.com/retire",))
    assert machine(node("m1", taints=("example.com/retire",)), rules).leaving == "taint example.com/retire"
    assert machine(node("m1", taints=(TERMINATION,)), rules).leaving == ""


def test_what_a_list_does_not_have_has_been_deleted_and_may_come_back() -> None:
    found = cluster(Listed(NODE, (node("m1"), node("m2"))))
    assert found.deleted == frozenset()
    found = fold(found, Listed(NODE, (node("m2"),)), RULES)
    assert set(found.machines or {}) == {"m2"}
    assert found.deleted == {"m1"}
    found = fold(found, Deleted(node("m2")), RULES)
    assert found.machines == {}
    assert found.deleted == {"m1", "m2"}
    found = fold(found, Put(node("m1", unschedulable=True)), RULES)
    assert found.deleted == {"m2"}
    assert found.machines == {"m1": Machine("m1", "cordoned")}


def test_heartbeats_and_repeats_change_nothing() -> None:
    found = cluster(Listed(NODE, (node("m1"),)), Put(pod("p1", "m1")))
    for event in (Put(node("m1")), Put(pod("p1", "m1")), Put({**node("m1"), "status": {"images": ["x"]}})):
        assert fold(found, event, RULES) is found


def test_pods_of_several_namespaces_are_listed_apart() -> None:
    found = cluster(Listed(POD, (pod("p1", "m1", "a"),), "a"), Listed(POD, (pod("p2", "m2", "b"),), "b"))
    assert found.machine_of() == {"p1": "m1", "p2": "m2"}
    found = fold(found, Listed(POD, (), "a"), RULES)
    assert found.machine_of() == {"p2": "m2"}
    assert fold(found, Deleted(pod("p2", "m2", "b")), RULES).machine_of() == {}


@pytest.mark.parametrize("found", [{}, {"metadata": None}, {"metadata": {"name": ""}}, {"metadata": {"name": 7}}])
def test_an_object_that_is_none_hides_no_other(found: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match="has no name"):
        fold(Cluster(), Put({**found, "kind": NODE}), RULES)
    assert set(cluster(Listed(NODE, (found, node("m2")))).machines or {}) == {"m2"}


def test_texts_are_one_line_of_limited_length_without_lone_surrogates() -> None:
    labels = {"cloud.google.com/active-node-maintenance": "a\nb\ud800" + "x" * 1000}
    text = machine({"metadata": {"name": "m1", "labels": labels}}, RULES).leaving
    text.encode()
    assert "\n" not in text
    assert len(text) < 300
