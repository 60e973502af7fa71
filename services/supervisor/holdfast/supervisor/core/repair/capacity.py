"""Number of nodes that the jobs of a pool lack. A provider of machines is asked for them (providers/demand.py). Pure.

A job wants the nodes of its full size, and its reserved spares. It has those of its generation; free nodes go to the jobs in
their usual order. A node counts as present if it has ranks or may get some, if it is held down after a fault, and if its
machine is being booted or replaced: requesting another one as well would result in one too many. A node does not count if an
operator has cordoned it, if it is about to be taken away, or if only an operator brings it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.model.indexing import nodes_in_use
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node, State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import reboots
from holdfast.supervisor.protocol import JobPhase, MoreNodesRequested

REPLACED_S = 3600.0  # a machine whose replacement was agreed counts as present for this long


@dataclass(frozen=True, slots=True)
class Lack:
    """The lack of one pool; "" = nodes and jobs without a pool. `there`: present nodes; `missing`: additional ones needed."""

    pool: str
    there: int
    missing: int
    jobs: tuple[str, ...]  # jobs that lack nodes, in the order in which they get free nodes


def lacking(state: State) -> tuple[Lack, ...]:
    """The pools whose jobs could use more nodes, by name."""
    wanting = [job.name for job in state.jobs.values() if _wants(job)]
    if not wanting:
        return ()
    turn = Turn(state, state.folded_at)
    users = {node: job.name for job in state.jobs.values() for node in nodes_in_use(job)}
    there = {name: node for name, node in state.nodes.items() if _is_there(node, users, state.folded_at)}
    free = [node for name, node in sorted(there.items()) if name not in users]
    missing: dict[str, int] = {}
    short: dict[str, list[str]] = {}
    for job in turn.in_order(wanting):
        has = sum(node in there for node in nodes_in_use(job))
        needs = max(0, _size(job) - has)
        taken = {node.name for node in _able(free, job)[:needs]} if needs else set()
        free = [node for node in free if node.name not in taken] if taken else free
        if needs > len(taken):
            missing[job.spec.pool] = missing.get(job.spec.pool, 0) + needs - len(taken)
            short.setdefault(job.spec.pool, []).append(job.name)
    return tuple(
        Lack(pool, sum(node.facts.pool == pool for node in there.values()), count, tuple(short[pool]))
        for pool, count in sorted(missing.items())
    )


def record(turn: Turn, event: MoreNodesRequested) -> None:
    """Note the request and its result in the records of the jobs."""
    answer = f"agreed{f' ({event.said})' if event.said else ''}" if event.ok else f"refused: {event.said}"
    for job in event.jobs:
        if job in turn.jobs:
            turn.note(job, f"more nodes are requested, {event.wanted} in all, because of {event.reason}: {answer}")


def _wants(job: Job) -> bool:
    return not job.phase.finished and job.phase is not JobPhase.STOPPING


def _size(job: Job) -> int:
    """Number of nodes of the job's full size, with its spares."""
    return math.ceil(job.spec.mesh.resized(job.target_dp).world_size / job.spec.nproc_per_node) + job.spec.spares


def _able(free: Iterable[Node], job: Job) -> list[Node]:
    """Free nodes that the job can use, smallest first: other jobs may need the larger ones."""
    able = [
        node for node in free if node.facts.pool == job.spec.pool and node.facts.capacity >= job.spec.nproc_per_node
    ]
    return sorted(able, key=lambda node: (node.facts.capacity, node.name))


def _is_there(node: Node, users: dict[str, str], at: float) -> bool:
    if node.notice is not None or node.quarantined:
        return False
    if (removal := node.removal) is not None:
        replacement, reboot = removal.replacement, removal.reboot
        if replacement is not None and replacement.agreed_at is not None and at - replacement.agreed_at < REPLACED_S:
            return True
        if reboot is not None and reboot.ordered_at is not None and at - reboot.ordered_at < reboots.BOOT_S:
            return True
        return removal.back_at is not None and node.connected and returns.comes_back(node)
    if node.unschedulable_reason or node.unfit:
        return False
    return node.connected or (node.name in users and not node.lost)
