"""Repeat offenders leave service: a node whose own past says that it will fail again gets no ranks until somebody looks.

    incident opens ──► counted against its node ──► an offender? ──► can the jobs spare it? ──► quarantined
         │ its root moves to another node, or nothing was lost after all: counted there, or nowhere

Quarantine must never do more harm than the node. It needs a closed breaker, takes at most a tenth of the fleet, and never a
node without which a job would run fewer replicas than it does. When a job cannot run at all for want of nodes, quarantined
ones are given back to it, the best first: a node that fails now and then is better than none.
"""

from __future__ import annotations

from holdfast.domain.incidents import Incident
from holdfast.supervisor.core import breaker, nodes, offenders
from holdfast.supervisor.core.index import By
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.lifecycle import Deferred, Pending, Waiting
from holdfast.supervisor.core.offenders import Fault
from holdfast.supervisor.core.planner import Plan
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.core.views import faults_per_day, reachable


def count(turn: Turn, incident: Incident) -> None:
    """`incident` has a root on its node, for now: remember it there, and draw the conclusion."""
    rules = turn.config.offenders
    job = turn.jobs.get(incident.job)
    spread = len(job.generation.nodes) if job is not None and job.generation is not None else 1
    weight = offenders.weight_of(incident, rules, spread)
    node = turn.nodes.get(incident.node)
    if node is None or not weight:
        return
    last_at, last_node = turn.last_fault
    shared = last_node != node.name and turn.at - last_at <= rules.together_s
    if shared and last_node in turn.nodes:
        before = turn.nodes[last_node].faults
        if before and not before[-1].shared:
            turn.put_node(last_node, faults=offenders.newest_shared(before))
    turn.set(last_fault=(turn.at, node.name))
    fault = Fault(turn.at, incident.id, incident.job, weight, shared)
    turn.put_node(node.name, faults=offenders.added(node.faults, fault, rules))
    _review(turn, node.name)


def forget(turn: Turn, incident: Incident) -> None:
    """`incident` has nothing to do with its node after all."""
    node = turn.nodes.get(incident.node)
    if node is not None and any(fault.incident == incident.id for fault in node.faults):
        turn.put_node(node.name, faults=offenders.without(node.faults, incident.id))


def _review(turn: Turn, name: str) -> None:
    node = turn.nodes[name]
    offence = offenders.offence(node.faults, turn.at, turn.config.offenders)
    if not offence or node.unschedulable_reason:
        return
    if why_not := _why_not(turn, name):
        turn.note(name, f"not quarantined, though {offence}: {why_not}")
        return
    nodes.mark_unschedulable(
        turn, name, f"quarantined: {offence}; release it with `holdfast nodes uncordon` or `repair`"
    )
    turn.put_node(name, quarantined=True)


def _why_not(turn: Turn, name: str) -> str:
    """What stands in the way of a quarantine; empty when nothing does."""
    if breaker.is_open(turn):
        return "the breaker is open"
    fleet = max(1, turn.count(By.CONNECTED))
    most = max(1, int(turn.config.offenders.fraction_max * fleet))
    if turn.count(By.QUARANTINED) >= most:
        return f"{most} of {fleet} nodes are in quarantine already"
    for job in turn.in_order({*turn.found(By.CLAIM, name), *turn.found(By.WANTS_NODES)}):
        if not _wants(job, name):
            continue
        running = job.generation is not None and job.generation.slot_of(name) is not None
        dp = job.generation.mesh.dp if job.generation is not None and running else job.spec.min_dp
        if not isinstance(reachable(turn, job, dp, dp, frozenset({name})), Plan):
            return f"{job.name} could not run {dp} replicas without it"
    return ""


def _wants(job: Job, name: str) -> bool:
    """Whether the job runs there, or waits for nodes such as this one."""
    if isinstance(job.doing, Pending | Waiting | Deferred):
        return True
    return job.generation is not None and job.generation.slot_of(name) is not None


def release_for(turn: Turn, job: Job) -> None:
    """`job` waits for nodes: give quarantined ones back, the best first, if that lets it run."""
    quarantined = (turn.nodes[name] for name in turn.found(By.QUARANTINED))
    held = [node for node in quarantined if node.connected and not node.lost]
    if not held or isinstance(reachable(turn, job, job.target_dp, job.spec.min_dp), Plan):
        return
    trial, released = Turn(turn.finish(), turn.at), []
    for node in sorted(held, key=lambda node: (faults_per_day(turn, node), node.name)):
        trial.put_node(node.name, unschedulable_reason="", quarantined=False)
        released.append(node.name)
        if isinstance(reachable(trial, job, job.target_dp, job.spec.min_dp), Plan):
            for name in released:
                turn.put_node(name, unschedulable_reason="", quarantined=False)
                nodes.refresh(turn, name, f"released from quarantine: {job.name} cannot run without it")
            return
