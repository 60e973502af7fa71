"""Quarantine of repeat offenders: a node whose record predicts that it will fail again gets no ranks until an operator acts.

    incident opens ──► counted against its node ──► an offender? ──► can the jobs spare it? ──► quarantined
         │ its root moves to another node, or it was contradicted: counted there, or nowhere

Quarantine must never do more harm than the node. It requires a closed breaker, takes at most a tenth of the fleet, and never a
node without which a job would run fewer replicas than it does. If a job cannot run at all for lack of nodes, quarantined nodes
are released for it, the best first: a node that fails now and then is better than none. Before those, nodes are released that
are held down after a loss (returns.py) or have a slow network (link_tests.py).
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.incidents import Incident
from holdfast.supervisor.core.fleet import breaker, nodes, resets, returns
from holdfast.supervisor.core.fleet.spares import faults_per_day
from holdfast.supervisor.core.incidents.views import reachable
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Deferred, Pending, Suspended, Waiting
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules import offenders
from holdfast.supervisor.core.rules.holddown import Cure, second_fault
from holdfast.supervisor.core.rules.offenders import Fault
from holdfast.supervisor.core.rules.planner import Plan


def count(turn: Turn, incident: Incident) -> None:
    """Count `incident` against its node, and quarantine the node if it is an offender now."""
    job = turn.jobs.get(incident.job)
    spread = len(job.generation.nodes) if job is not None and job.generation is not None else 1
    weight = offenders.weight_of(incident, turn.config.offenders, spread)
    node = turn.nodes.get(incident.node)
    if node is None or not weight or (node.asked_to_end and incident.kind == FindingKind.NODE_LOST):
        return
    is_restart = incident.kind == FindingKind.NODE_LOST and not node.lost and node.booted_at != turn.at
    _add(turn, node, Fault(turn.at, incident.id, incident.job, weight, agent_only=is_restart))


def count_idle(turn: Turn, finding: Finding) -> None:
    """Count a fault of a node without ranks, which opens no incident."""
    node = turn.nodes[finding.node]
    weight = offenders.weight_when_idle(finding)
    if weight and not any(fault.incident == finding.id for fault in node.faults):
        _add(turn, node, Fault(turn.at, finding.id, "", weight))


def count_failed_test(turn: Turn, incident: Incident, name: str) -> None:
    """Count a failed test of this node, which `incident` suspected."""
    _add(turn, turn.nodes[name], Fault(turn.at, incident.id, incident.job, 1.0))


def count_bad_links(turn: Turn, name: str) -> None:
    """Count bad network tests of this node with other nodes without ranks."""
    _add(turn, turn.nodes[name], Fault(turn.at, f"link:{name}:{turn.at:.0f}", "", 1.0))


def _add(turn: Turn, node: Node, fault: Fault) -> None:
    rules = turn.config.offenders
    last_at, last_node = turn.last_fault
    shared = last_node != node.name and turn.at - last_at <= rules.together_s
    if shared and last_node in turn.nodes:
        before = turn.nodes[last_node].faults
        if before and not before[-1].shared:
            turn.put_node(last_node, faults=offenders.newest_shared(before))
            returns.judge(turn, last_node)
    turn.set(last_fault=(turn.at, node.name))
    turn.put_node(node.name, faults=offenders.added(node.faults, evolve(fault, shared=shared), rules))
    returns.judge(turn, node.name)
    _review(turn, node.name)


def forget(turn: Turn, incident: Incident) -> None:
    """Remove `incident` from the record of its node: the node is not its cause."""
    node = turn.nodes.get(incident.node)
    if node is not None and any(fault.incident == incident.id for fault in node.faults):
        turn.put_node(node.name, faults=offenders.without(node.faults, incident.id))
        returns.judge(turn, node.name)


def _review(turn: Turn, name: str) -> None:
    node = turn.nodes[name]
    offence = offenders.offence(node.faults, turn.at, turn.config.offenders)
    offence = offence or second_fault(node.probation, node.faults)
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
    """What prevents a quarantine; empty if nothing does."""
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
    """Whether the job runs on the node, or waits for nodes."""
    if isinstance(job.doing, Pending | Waiting | Suspended | Deferred):
        return True
    return job.generation is not None and job.generation.slot_of(name) is not None


def release_for(turn: Turn, job: Job) -> None:
    """`job` waits for nodes: release nodes that are held down after a loss, or in quarantine, the best first, if that lets the
    job run."""
    names = {*turn.found(By.QUARANTINED), *turn.found(By.RETURNING)}
    held = [node for node in map(turn.nodes.__getitem__, sorted(names)) if _may_be_released(turn, node)]
    if not held or isinstance(reachable(turn, job, job.target_dp, job.spec.min_dp), Plan):
        return
    trial, released = Turn(turn.finish(), turn.at), list[Node]()

    def runs() -> bool:
        return isinstance(reachable(trial, job, job.target_dp, job.spec.min_dp), Plan)

    for node in sorted(held, key=lambda node: (_is_sent_away(node), faults_per_day(turn, node), node.name)):
        due = node.reset_due if node.reset_due is not None and not resets.is_possible(node) else None
        trial.put_node(node.name, unschedulable_reason="", quarantined=False, removal=None, reset_due=due)
        released.append(node)
        if runs():
            break
    else:
        return
    for node in released[:-1]:  # the job needs the last one, but perhaps not all of the others
        trial.put_node(node.name, unschedulable_reason=node.unschedulable_reason)
        if runs():
            released.remove(node)
        else:
            trial.put_node(node.name, unschedulable_reason="")
    for node in released:
        _release(turn, node.name, f"{job.name} cannot run without it")


def _may_be_released(turn: Turn, node: Node) -> bool:
    if not node.connected or node.lost:
        return False
    removal = node.removal
    if removal is None:
        return node.quarantined
    if not node.unschedulable_reason or removal.hardware or not returns.has_passed(node):
        return False
    return returns.is_cured(turn, node) or removal.cure is Cure.LINKS


def _is_sent_away(node: Node) -> bool:
    return node.quarantined or (node.removal is not None and bool(node.removal.final))


def _release(turn: Turn, name: str, why: str) -> None:
    if turn.nodes[name].removal is not None:
        returns.admit(turn, name, why)
    else:
        turn.put_node(name, unschedulable_reason="", quarantined=False)
        nodes.refresh(turn, name, f"released from quarantine: {why}")
