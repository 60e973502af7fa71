"""Upgrades snapshots of earlier versions to the JSON that this version reads.

Each function takes the tree of one row and returns it in today's shape. A row that already has it is returned as it is. The
decoder ignores unknown fields, so moved fields are copied, and removed ones are left in the tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from holdfast.domain import old_evidence
from holdfast.domain.evolve import evolve
from holdfast.domain.numbers import Numbers
from holdfast.supervisor.core.model.live import Live
from holdfast.supervisor.core.model.state import Node, heard_in
from holdfast.supervisor.timers import Timer
from holdfast.wire import records
from holdfast.wire.records import TAG

Tree = dict[str, Any]

# Format 2 had all fields of a job side by side: group → {today's name: name in format 2}.
JOB_GROUPS = {
    "numbering": {"attempt_base": "attempt_base", "first_attempt": "first_attempt", "seen": "numbers_seen"},
    "membership": {"running_at": "running_at", "absent": "absent", "finished": "finished"},
    "progress": {
        "step": "step",
        "best_step": "best_step",
        "step_s": "step_s",
        "loss": "loss",
        "reports_no_steps": "blind",
        "progressed": "progressed",
        "furthest_step": "furthest",
        "restarts_without_progress": "fruitless",
        "restarts_without_advance": "stuck",
        "outages": "outages",
        "seen_step": "seen_step",
        "seen_at": "seen_at",
    },
    "checkpoints": {
        "lineage": "lineage",
        "step": "checkpoint_step",
        "saved_at": "saved_at",
        "at_home": "at_home",
        "ever_saved": "ever_saved",
        "stored": "stored",
        "saved_by_all": "saved_by_all",
        "sharded": "sharded",
        "skipped": "passed_over",
        "trusted": "trusted",
        "resumed": "resumed",
        "measured": "measured",
        "interval": "interval",
        "on_demand": "asked",
        "requests": "awaited",
    },
}


def job(tree: Tree) -> Tree:
    if "numbering" in tree:
        return tree
    groups = {
        group: {name: tree[old] for name, old in names.items() if old in tree} for group, names in JOB_GROUPS.items()
    }
    if save := groups["checkpoints"].get("on_demand"):
        groups["checkpoints"]["on_demand"] = {**save, "to_object_store": save["far"]}
    stays = {node: _renamed(each, options="candidates") for node, each in tree.get("stays", {}).items()}
    return {**tree, **groups, "doing": _doing(tree), "deferred_evictions": stays}


def _doing(old: Tree) -> Tree:
    """The job's state as one value, from a phase and seven optional values."""
    change: Any = old.get("change")
    blocked: Any = old.get("blocked")
    stopping: Any = old.get("stopping")
    awaited = _renamed(blocked, options="candidates") if blocked else None
    if stopping and stopping.get("at_step") is not None:
        return {**stopping, TAG: "Saving"}
    if stopping:
        return _renamed(stopping, waiting="stops") | {TAG: "Stopping"}
    match old["phase"]:
        case "pending":
            return {TAG: "Pending", "awaited": awaited}
        case "preparing" | "starting" if change is None:
            return {TAG: "Replanning"}
        case "preparing":
            return _renamed(change, waiting="stops") | {TAG: "Preparing", "change": change}
        case "starting":
            return {**change, TAG: "Starting", "change": change}
        case "running":
            planned = {**old["planned"], TAG: "Planned"} if old.get("planned") else awaited
            return {TAG: "Running", "planned": {TAG: "AwaitedNodes", **planned} if planned else None}
        case "waiting" if blocked and blocked.get("until"):
            return {**blocked, TAG: "Deferred"}
        case "waiting":
            return {TAG: "Waiting", "awaited": awaited or {"since": old["submitted_at"], "candidates": []}}
        case "completed":
            upload = _renamed(old["leaving"], news="status", over="finished") if old.get("leaving") else None
            return {TAG: "Completed", "upload": upload}
        case "stopped" | "failed" as phase:
            return {TAG: phase.capitalize()}
        case phase:
            raise ValueError(f"no job was ever {phase!r}")


def _renamed(tree: Tree, **names: str) -> Tree:
    """The tree with fields renamed: old names are the keys, today's names the values."""
    return {names.get(name, name): value for name, value in tree.items()}


# Until format 3 a timer was stored as its text: the word, then the values.
_TIMERS: dict[str, type[Timer]] = {kind.word: kind for kind in get_args(Timer)}


def timer(name: str, tree: Any) -> Any:
    """A row of the timers, [timer, due]; earlier, it was `due` alone."""
    if isinstance(tree, list):
        return tree
    word, *values = name.split(":")
    kind = _TIMERS[word]
    known = {each.name: each.type for each in fields(kind)}
    read = {"int": int, "float": float}
    named = {each: read.get(str(of), str)(value) for (each, of), value in zip(known.items(), values, strict=True)}
    return [{TAG: kind.__name__, **named}, tree]


def incident(tree: Tree) -> Tree:
    """Until format 3, the evidence contained the attribution."""
    if "attribution" in tree:
        return tree
    found = old_evidence.attribution(tree["kind"], tree.get("evidence", {}))
    return {**tree, "attribution": asdict(found)}


def node(tree: Tree) -> Tree:
    """Until format 4, `unschedulable_reason` was named "condemned". Later versions stored `announced` as a flag, whether an
    inventory was reported."""
    tree = _renamed(tree, condemned="unschedulable_reason")
    return {**tree, "announced": []} if tree.pop("inventoried", False) else tree


# The number of a node's newest report was a field of its row in format 2. Later versions kept it there until the node's next
# report.


def has_last_seq(row: bytes) -> bool:
    """Whether this stored row of a node contains the number of its newest report."""
    return b'"last_seq":' in row


def last_seq(row: bytes) -> int:
    """The number of the node's newest report in this stored row. Raises `MalformedMessage`."""
    return records.loads(row, _LastSeq).last_seq


@dataclass(frozen=True, slots=True)
class _LastSeq:
    """The only field of a node's row that is read here."""

    last_seq: int = 0


def heard(known: Mapping[str, Mapping[str, int]], numbers: Mapping[str, int]) -> Mapping[str, Mapping[str, int]]:
    """`State.heard` with the numbers of these nodes' newest reports, where it has none."""
    rows = {group: dict(row) for group, row in known.items()}
    for node, number in numbers.items():
        if number:
            rows.setdefault(heard_in(node), {}).setdefault(node, number)
    return rows


# Until format 8, each node had the generations that may live on it: in a part of their own, until format 4 in its row.
LiveOn = dict[str, tuple[int, ...]]  # job → generations, ascending


def live_on(row: bytes) -> LiveOn:
    """The generations that may live on the node with this stored row, if they are in it. Raises `MalformedMessage`."""
    return records.loads(row, _LiveOn).holds


@dataclass(frozen=True, slots=True)
class _LiveOn:
    """The only field of a node's row that is read here."""

    holds: LiveOn = field(default_factory=dict)


def live(nodes: Mapping[str, Node], live_on: Mapping[str, LiveOn]) -> tuple[dict[str, Node], dict[str, Live]]:
    """`State.nodes`, numbered, and `State.live`."""
    numbered = {name: evolve(node, number=number) for number, (name, node) in enumerate(sorted(nodes.items()))}
    table: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, node in numbered.items():
        for job, generations in live_on.get(name, {}).items():
            for generation in generations:
                table[job][generation].append(node.number)
    return numbered, {
        job: {generation: Numbers(by_generation[generation]) for generation in sorted(by_generation)}
        for job, by_generation in table.items()
    }


def breaker(tree: Tree) -> Tree:
    return _renamed(tree, condemned="failed_nodes", doubts_view="opened_by_node_failures")


def config(tree: Tree) -> Tree:
    return _renamed(
        tree, condemned_min="breaker_failed_nodes_min", condemned_fraction_max="breaker_failed_fraction_max"
    )


def send(tree: Tree) -> Tree:
    """Until format 4, the field for the object store was named "far"."""
    order = tree["order"]
    return {**tree, "order": _renamed(order, far="to_object_store")} if "far" in order else tree
