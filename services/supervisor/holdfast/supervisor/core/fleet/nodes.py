"""The state of a node, as far as it does not depend on the progress of its jobs."""

from __future__ import annotations

from collections.abc import Container

from holdfast.domain.evolve import evolve
from holdfast.domain.nodes import NodeState
from holdfast.domain.runs import worker_runs
from holdfast.supervisor.core.fleet import breaker
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.holddown import Removal, merged
from holdfast.supervisor.protocol import JobPhase
from holdfast.supervisor.timers import NoticeDue, RebootDue, ReplacementDue, ReturnDue, WitnessTimeout


def job_of(turn: Turn, node: str) -> Job | None:
    """The unfinished job whose newest generation includes `node`."""
    return next(iter(turn.in_order(turn.group(By.CLAIM, node))), None)


def refresh(turn: Turn, name: str, reason: str) -> None:
    """Publish the node's state if it has changed."""
    node = turn.nodes[name]
    job = job_of(turn, name)
    busy_with = job.name if job else unknown_job(node, turn.jobs)
    turn.set_node_state(name, _state(node, busy_with), busy_with, reason)


def unknown_job(node: Node, jobs: Container[str]) -> str:
    """A job with workers on the node that is not in this state (which may have been lost); "" if there is none."""
    return min((run.job for run in worker_runs(node.workers) if run.job not in jobs), default="")


def _state(node: Node, busy_with: str) -> NodeState:
    if node.lost:
        return NodeState.LEFT if node.asked_to_end else NodeState.LOST
    if node.unschedulable_reason:
        return NodeState.CORDONED
    if busy_with:
        return NodeState.ACTIVE
    out_of_use = node.unfit or node.notice is not None or node.reset_due is not None
    return NodeState.CORDONED if out_of_use else NodeState.SPARE


def declare_lost(turn: Turn, name: str, reason: str) -> None:
    """Two witnesses agree, or its incarnation has ended: the workers that it had are no longer part of any run."""
    if not turn.nodes[name].lost:
        turn.put_node(name, lost=True, suspicion=None)
        turn.cancel_timer(WitnessTimeout(name))
        refresh(turn, name, reason)
        for job in turn.found(By.WANTS_NODES):  # a job that cannot start without it gives this reason
            # While the breaker is open, jobs in other phases do not change, and its end touches all.
            if not breaker.is_open(turn) or turn.jobs[job].phase is JobPhase.PENDING:
                turn.touch(job)
        if not turn.nodes[name].asked_to_end:
            breaker.count_failed(turn, name)


def mark_unschedulable(
    turn: Turn, name: str, reason: str, *, by_operator: bool = False, removal: Removal | None = None
) -> None:
    """Give this node no ranks until it returns by itself (`removal`: after a fault) or an operator allows it.

    An explicit reason overrides a quarantine. One without a `removal` also overrides any return by itself."""
    node = turn.nodes[name]
    before, kept = node.unschedulable_reason, removal
    if removal is not None:
        if before and node.removal is None and not node.quarantined:
            return  # cordoned by an operator or a policy
        kept = merged(node.removal, removal)
        if node.quarantined:  # the quarantine remains after the fault has been repaired
            kept = evolve(kept, final=before)
        reason = kept.cause
    elif before and node.removal is None and not node.quarantined:
        return
    turn.put_node(name, unschedulable_reason=reason, quarantined=False, removal=kept)
    refresh(turn, name, reason)
    if not by_operator and not before:
        breaker.count_failed(turn, name)


def set_zone(turn: Turn, name: str, zone: str) -> None:
    """Set the failure domain of the node's machine, for future placements."""
    if (node := turn.nodes.get(name)) is not None and node.machine_zone != zone:
        turn.put_node(name, machine_zone=zone)


def forget(turn: Turn, name: str, reason: str) -> None:
    """Delete a node whose machine no longer exists, unless it is connected or ranks of an unfinished job may run on it."""
    node = turn.nodes.get(name)
    if node is None or node.connected or not node.lost or job_of(turn, name) is not None:
        return
    if any(job in turn.jobs and not turn.jobs[job].phase.finished for job in turn.group(By.HELD, name)):
        return
    _drop(turn, name)
    turn.note(name, f"removed: {reason}")


def forget_old_lost(turn: Turn) -> None:
    """Delete the oldest lost nodes beyond `lost_nodes_max`."""
    if turn.count(By.GONE) <= turn.config.lost_nodes_max:
        return
    gone = (turn.nodes[name] for name in turn.found(By.GONE))
    lost = sorted((node for node in gone if not node.connected), key=lambda node: (node.gone_at, node.name))
    for node in lost[: max(0, len(lost) - turn.config.lost_nodes_max)]:
        if job_of(turn, node.name) is None:
            _drop(turn, node.name)


def _drop(turn: Turn, name: str) -> None:
    for send in turn.orders(node=name):
        turn.forget_order(send)
    turn.cancel_timer(ReturnDue(name))
    turn.cancel_timer(RebootDue(name))
    turn.cancel_timer(ReplacementDue(name))
    turn.cancel_timer(NoticeDue(name))
    turn.drop_node(name)
