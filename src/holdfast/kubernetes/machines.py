"""Machines and pods of a cluster that concern a fleet: a fold over the API server's objects. Pure.

| field of the object | meaning |
|---|---|
| `spec.unschedulable`, and not by Holdfast itself | the machine leaves: "cordoned" |
| a taint of `LEAVING_TAINTS`, or of the operator's list | the machine leaves: the taint |
| a label of `LEAVING_LABELS`, not "false" | the machine leaves: the label |
| the label `SCHEDULED`, Unix seconds | the machine leaves at that time |
| conditions and taints of `node.kubernetes.io/…` (NotReady, unreachable, pressure) | nothing |
| a label of `zone_labels` | the machine's failure domain |
| the object is deleted | the machine leaves, and its node is deleted from the state when it is lost |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.evolve import evolve

CONDEMNED = "holdfast/condemned"  # annotation of a machine that Holdfast itself has cordoned; its value is the reason
SCHEDULED = "cloud.google.com/scheduled-maintenance-time"
LEAVING_LABELS = ("cloud.google.com/active-node-maintenance", "cloud.google.com/perform-maintenance")
LEAVING_TAINTS = (
    "cloud.google.com/impending-node-termination",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
)
ZONE_LABELS = ("cloud.google.com/gce-topology-subblock", "topology.kubernetes.io/zone")
MEANS_NOTHING = ("", "false", "none")
TEXT_CHARS_MAX = 200  # of one cause
DELETED_MAX = 10_000  # remembered names of deleted machines
NODE, POD = "Node", "Pod"

Object = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """The operator's settings for labels and taints of the cluster."""

    taints: tuple[str, ...] = LEAVING_TAINTS  # keys of taints of a machine that leaves
    zone_labels: tuple[str, ...] = ZONE_LABELS  # the first label that a machine has is its failure domain


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    leaving: str = ""  # short reason why the machine leaves; empty = it does not
    scheduled_at: float | None = None  # Unix seconds of scheduled maintenance; None = none is scheduled
    zone: str = ""  # failure domain; empty = unknown


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod of an agent."""

    namespace: str
    name: str
    uid: str
    machine: str  # name of its machine; empty = not scheduled yet


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects of a kind; of pods, those of one namespace. Objects that are missing have been deleted."""

    kind: str
    objects: tuple[Object, ...]
    namespace: str = ""  # of the pods


@dataclass(frozen=True, slots=True)
class Put:
    """An object was added or changed."""

    object: Object


@dataclass(frozen=True, slots=True)
class Deleted:
    object: Object


ClusterEvent = Listed | Put | Deleted


@dataclass(frozen=True, slots=True)
class Cluster:
    machines: Mapping[str, Machine] | None = None  # None: not listed yet, so unknown
    pods: Mapping[tuple[str, str], Pod] = field(default_factory=dict)  # by namespace and name
    deleted: frozenset[str] = frozenset()  # names of deleted machines

    def machine_of(self) -> dict[str, str]:
        """Return name of a pod → its machine. Agents that share a machine have the names of their pods."""
        return {pod.name: pod.machine for pod in self.pods.values() if pod.machine}


def fold(cluster: Cluster, event: ClusterEvent, rules: Rules) -> Cluster:
    """Return the cluster after the event. Raises `MalformedMessage` if the object is invalid; invalid objects of a list are
    skipped."""
    match event:
        case Listed(kind=kind, objects=objects) if kind == NODE:
            machines = {each.name: each for each in _read(objects, lambda found: machine(found, rules))}
            return _with(cluster, machines, cluster.deleted | (cluster.machines or {}).keys())
        case Listed(objects=objects, namespace=namespace):
            others = {key: each for key, each in cluster.pods.items() if key[0] != namespace}
            return evolve(cluster, pods={**others, **{(namespace, each.name): each for each in _read(objects, pod)}})
        case Put(object=found) if found.get("kind") == NODE:
            seen = machine(found, rules)
            if (before := cluster.machines or {}).get(seen.name) == seen:
                return cluster  # a heartbeat
            return _with(cluster, {**before, seen.name: seen}, cluster.deleted)
        case Put(object=found):
            held = pod(found)
            key = (held.namespace, held.name)
            same = cluster.pods.get(key) == held
            return cluster if same else evolve(cluster, pods={**cluster.pods, key: held})
        case Deleted(object=found) if found.get("kind") == NODE:
            seen = machine(found, rules)
            machines = {name: each for name, each in (cluster.machines or {}).items() if name != seen.name}
            return _with(cluster, machines, cluster.deleted | {seen.name})
        case Deleted(object=found):
            held = pod(found)
            pods = {key: each for key, each in cluster.pods.items() if key != (held.namespace, held.name)}
            return evolve(cluster, pods=pods)


def _with(cluster: Cluster, machines: Mapping[str, Machine], seen: Set[str]) -> Cluster:
    """Return the cluster with these machines. Names in `seen` that are missing in `machines` are recorded as deleted."""
    missing = sorted(seen - machines.keys())
    return evolve(cluster, machines=machines, deleted=frozenset(missing[:DELETED_MAX]))


def _read(objects: Iterable[Object], read: Callable[[Object], T]) -> list[T]:
    found: list[T] = []
    for each in objects:
        try:
            found.append(read(each))
        except MalformedMessage:
            continue  # an invalid object must not hide the others
    return found


# ---------------------------------------------------------------- objects


def machine(found: Object, rules: Rules) -> Machine:
    """Read a Node. Raises `MalformedMessage`."""
    about, spec = _metadata(found), _mapping(found.get("spec"))
    labels, marks = _mapping(about.get("labels")), _mapping(about.get("annotations"))
    causes = ["cordoned"] if spec.get("unschedulable") is True and CONDEMNED not in marks else []
    taints = spec.get("taints")
    for taint in taints if isinstance(taints, list) else ():
        if isinstance(taint, dict) and taint.get("key") in rules.taints:
            causes.append(f"taint {_text(taint['key'])}")
    for label in LEAVING_LABELS:
        value = _text(labels.get(label, ""))
        if value.lower() not in MEANS_NOTHING:
            causes.append(f"label {label}={value}")
    zones = (_text(labels.get(label, "")) for label in rules.zone_labels)
    return Machine(
        name=_text(about["name"]),
        leaving=", ".join(dict.fromkeys(causes)),
        scheduled_at=_time(labels.get(SCHEDULED)),
        zone=next((zone for zone in zones if zone), ""),
    )


def pod(found: Object) -> Pod:
    """Read a Pod. Raises `MalformedMessage`."""
    about, spec = _metadata(found), _mapping(found.get("spec"))
    namespace = _text(about.get("namespace", ""))
    return Pod(namespace, _text(about["name"]), _text(about.get("uid", "")), _text(spec.get("nodeName", "")))


def _metadata(found: object) -> Mapping[str, Any]:
    about = _mapping(_mapping(found).get("metadata"))
    name = about.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedMessage(
            "metadata.name", f"an object of the API server has no name: {str(found)[:TEXT_CHARS_MAX]}"
        )
    return about


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Return the text as one line without lone surrogates, which JSON may contain."""
    return " ".join(str(value).encode(errors="replace").decode().split())[:TEXT_CHARS_MAX]


def _time(value: object) -> float | None:
    try:
        at = float(str(value))
    except ValueError:
        return None
    return at if math.isfinite(at) and at > 0 else None
