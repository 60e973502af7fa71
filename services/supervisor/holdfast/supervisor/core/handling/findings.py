"""Findings open or extend incidents.

A finding about a worker belongs to a generation. If the generation is an older one, the finding is ignored. If an incident of
the same generation is open, the finding is a cascading failure of it. A finding about a node does not depend on a generation:
it concerns the job that has ranks on the node now.
"""

from __future__ import annotations

from holdfast.domain import tracing
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Severity
from holdfast.domain.incidents import Incident, IncidentState, RungEnd
from holdfast.supervisor.core import binding, progress
from holdfast.supervisor.core.changes import change, planned
from holdfast.supervisor.core.fleet import nodes, resets, returns
from holdfast.supervisor.core.handling import decisions, notices
from holdfast.supervisor.core.incidents import recipes, standing_warnings
from holdfast.supervisor.core.incidents.opening import open_incident
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Replanning, Suspended
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import quarantine
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.protocol import JobPhase
from holdfast.supervisor.timers import WitnessTimeout

_WORKER_FAULTS = frozenset(
    {
        FindingKind.WORKER_CRASH,
        FindingKind.WORKER_EXCEPTION,
        FindingKind.REPEATED_EXCEPTION,
        FindingKind.HANG,
        FindingKind.RANKS_MISSING,
    }
)
_SAME_CONCLUSION_S = 1.0  # ages are measured; those of one finding that is delivered twice differ by less


def on_finding(turn: Turn, published: Finding, age_s: float) -> None:
    finding = _redated(published, turn.at - age_s)
    is_warning = finding.severity is Severity.WARNING and finding.kind is not FindingKind.MAINTENANCE
    if not is_warning and _is_known(turn, finding):
        return  # the log delivers at least once, and diagnostics repeats findings that still apply
    if age_s > finding.ttl_s and not _is_node_fault(finding) and not _concerns_what_runs(turn, finding):
        turn.judge(finding, f"ignored: the finding is {age_s:.0f} s old and expired after {finding.ttl_s:.0f} s")
    elif finding.kind is FindingKind.MAINTENANCE:
        notices.on_finding(turn, finding)
    elif not _is_node_fault(finding) and (why := binding.not_of_the_job(turn, finding)):
        turn.judge(finding, f"ignored: {why}")
    elif is_warning:
        _withdraw_suspicion(turn, finding)
        standing_warnings.on_finding(turn, finding)
    elif finding.severity is Severity.INFO:
        _withdraw_suspicion(turn, finding)
        for name in standing_warnings.on_withdrawn(turn, finding):
            planned.drop(turn, name, f"withdrawn: {finding.summary}")
        turn.judge(finding, f"recorded: a finding of severity {finding.severity} calls for no action")
    elif finding.kind is FindingKind.NODE_LOST:
        _judge_lost_node(turn, finding)
    elif finding.severity is Severity.FATAL and finding.node:
        _fatal(turn, finding)
    elif resets.is_demanded_by(finding):
        _reset_demanded(turn, finding)
    else:
        record_fault(turn, finding)


def _redated(finding: Finding, at: float) -> Finding:
    """The finding in this clock's time: `at` is now minus its age; `since` keeps its distance from `at`."""
    return evolve(finding, at=at, since=at - max(0.0, finding.at - finding.since))


def _concerns_what_runs(turn: Turn, finding: Finding) -> bool:
    """Whether a late finding is about the running generation. It still counts: nothing else may ever explain the failure."""
    job = turn.jobs.get(finding.job)
    return job is not None and job.running is not None and finding.generation == job.running.number == job.number


def _is_known(turn: Turn, finding: Finding) -> bool:
    """Whether the finding has been handled: by an open incident, by a closed incident with this very conclusion, or, for a
    repeat, because its node is suspected for it."""
    if turn.found(By.FINDING, finding.id):
        return True
    node = turn.nodes.get(finding.node)
    suspected = node is not None and node.connected and node.suspicion is not None and node.suspicion.id == finding.id
    if finding.repeat and suspected:
        return True
    return any(
        finding.id in incident.findings
        and (finding.repeat > 0 or finding.at <= incident.detected_at + _SAME_CONCLUSION_S)
        for incident in turn.closed
    )


def _judge_lost_node(turn: Turn, finding: Finding) -> None:
    """Apply the two-witness rule: the node is lost if the supervisor has lost its control session, too."""
    node = turn.nodes.get(finding.node)
    if node is None:
        turn.judge(finding, "ignored: this node has never connected here")
    elif node.lost or (node.connected and finding.at < node.connected_at):
        turn.judge(finding, "ignored: its loss has already been handled")
    elif node.connected:
        turn.put_node(node.name, suspicion=finding)
        turn.set_timer(WitnessTimeout(node.name), turn.at + turn.config.witness_s)
        turn.judge(finding, "contradicted: its control session is alive, so only the telemetry path broke")
    else:
        confirm_lost(turn, finding)


def _withdraw_suspicion(turn: Turn, finding: Finding) -> None:
    """Diagnostics receives the node's telemetry again: drop its suspicion, which must not count when the session ends later."""
    node = turn.nodes.get(finding.node)
    if node is not None and node.suspicion is not None and finding.contradicts == node.suspicion.id:
        turn.put_node(node.name, suspicion=None)


def confirm_lost(turn: Turn, finding: Finding) -> None:
    """Both witnesses agree. A third can contradict them: the job's other nodes, whose steps need the ranks of this one."""
    if turn.at < (due := _reconnect_due(turn, turn.nodes[finding.node])):
        if turn.nodes[finding.node].suspicion != finding:
            why = f"{finding.node} has {due - turn.at:.1f} s to reconnect to the supervisor, which ended its session"
            turn.judge(finding, f"not decided yet: {why}")
            turn.put_node(finding.node, suspicion=finding)
        turn.set_timer(WitnessTimeout(finding.node), due)
        return
    if contradiction := _signs_of_life(turn, finding):
        if turn.nodes[finding.node].suspicion != finding:
            turn.judge(finding, f"contradicted: {contradiction}")
            turn.put_node(finding.node, suspicion=finding)
        turn.set_timer(WitnessTimeout(finding.node), turn.at + turn.config.witness_s)
        return
    nodes.declare_lost(turn, finding.node, finding.summary)
    left, job = turn.nodes[finding.node].asked_to_end, nodes.job_of(turn, finding.node)
    if left and (job is None or isinstance(job.doing, Suspended)):
        turn.judge(finding, f"{finding.node} has left: its agent was asked to end")
    elif job is not None:
        if not left:
            returns.lost(turn, finding.node, finding)
        record_fault(turn, finding)
    else:
        turn.judge(finding, f"{finding.node} is lost; no job has ranks there")


def _reconnect_due(turn: Turn, node: Node) -> float:
    """When the node should have a session again, if it is alive. Immediately if its session broke in this term: that is
    evidence. A session that ended before, or that the supervisor ended, is no evidence until agents had time to reconnect.
    """
    return max(node.back_by, turn.led_at + turn.config.session_s if node.gone_at < turn.led_at else 0.0)


def _signs_of_life(turn: Turn, finding: Finding) -> str:
    """Why the node must be alive although both witnesses lost it; empty if nothing indicates it.

    A step needs every rank. A step that was finished well after the first witness lost the node needed the node's ranks. While
    steps continue, the ranks exist; only the paths to them are broken. A node that dies is lost to both witnesses at once.
    """
    job = nodes.job_of(turn, finding.node)
    if job is None or job.running is None or job.running.number != job.number or job.change is not None:
        return ""
    late_s = turn.config.step_late_s
    going_on = turn.at - job.progress.seen_at <= max(late_s, 2 * job.progress.step_s)
    out_of_sight_at = min(finding.since, turn.nodes[finding.node].gone_at)
    # A step is reported at most `late_s` after its end, and its last part may not have needed the node.
    if going_on and job.progress.seen_at - out_of_sight_at > late_s + max(1.0, job.progress.step_s):
        return (
            f"step {job.progress.seen_step} was finished after contact with {finding.node} was lost, and steps continue"
        )
    return ""


def _fatal(turn: Turn, finding: Finding) -> None:
    node = turn.nodes.get(finding.node)
    if node is None or finding.since < node.repaired_at:
        turn.judge(finding, "ignored: the node is not known here, or was repaired since")
        return
    if returns.is_dealt_with(node, finding):
        turn.judge(finding, f"ignored: {node.name} has come back from it since")
        return
    already, is_first = bool(node.unschedulable_reason), returns.is_first_of_fault(node)
    returns.condemn(turn, node.name, finding)
    if nodes.job_of(turn, node.name) is not None:
        record_fault(turn, finding)
    else:
        if is_first:
            quarantine.count_idle(turn, finding)
        turn.judge(finding, f"{node.name} {'was' if already else 'is put'} out of service; no job has ranks there")


def _reset_demanded(turn: Turn, finding: Finding) -> None:
    """A GPU must be reset before a rank uses it again. Later decisions take that into account."""
    node = turn.nodes.get(finding.node)
    if node is None or resets.is_history(node, finding):
        turn.judge(finding, "ignored: the node is not known here, or its GPUs were reset or repaired since")
        return
    if returns.is_dealt_with(node, finding) and node.reset_due is None:
        turn.judge(finding, f"ignored: {node.name} has come back from it since")
        return
    resets.demand(turn, node, finding.gpu, finding.summary)
    job = nodes.job_of(turn, node.name)
    if job is None:
        if node.reset_due is None and returns.is_first_of_fault(node):
            quarantine.count_idle(turn, finding)
        turn.judge(finding, f"{node.name} gets no ranks before the reset; no job has ranks there")
        return
    if node.name in nodes_of_change(job):
        change.give_up(turn, job.name, finding.summary)
    record_fault(turn, finding)
    for incident in turn.open_incidents(job.name):  # also those that are decided already
        given_up = incident.action is not None and isinstance(turn.jobs[job.name].doing, Replanning)
        if given_up and finding.id in incident.findings:
            decisions.ask_policy_again(turn, incident)


def record_fault(turn: Turn, finding: Finding) -> None:
    """Record a fault of a job: extend the incident that it belongs to, or open one."""
    job = _job_concerned(turn, finding)
    if job is None or job.generation is None or job.phase.finished or job.phase is JobPhase.STOPPING:
        turn.judge(finding, "ignored: no running job is concerned")
        return
    if saved.is_corruption(finding):
        saved.limit_restore_to_verified(turn, job, finding)
    root = _open_root(turn, job, finding)
    if root is not None:
        _extend(turn, job, root, finding)
    elif _is_node_fault(finding) or finding.generation == job.number:
        _open(turn, job, finding)
    else:
        turn.judge(finding, f"ignored: generation {finding.generation} of {job.name} is history")


def _is_node_fault(finding: Finding) -> bool:
    if not finding.node:
        return False
    return finding.kind is FindingKind.NODE_LOST or finding.severity is Severity.FATAL or resets.is_demanded_by(finding)


def _job_concerned(turn: Turn, finding: Finding) -> Job | None:
    if _is_node_fault(finding) or not finding.job:
        return nodes.job_of(turn, finding.node)
    return turn.jobs.get(finding.job)


def _open_root(turn: Turn, job: Job, finding: Finding) -> Incident | None:
    """The open incident that this finding belongs to."""
    for incident in turn.open_incidents(job.name):
        if incident.planned:
            continue
        if finding.supersedes in incident.findings:
            return incident
        if _is_node_fault(finding):
            same_node = incident.node == finding.node
            at_once = abs(finding.since - incident.fault_at) <= turn.config.merge_s and not _is_node_kind(incident)
            if same_node or (at_once and incident.state is not IncidentState.STARTING):
                return incident
        elif incident.generation == (finding.generation or job.number) and _same_generation(job, incident):
            return incident
    return None


def _is_node_kind(incident: Incident) -> bool:
    must_reset = incident.severity == Severity.ERROR and incident.wants_reset
    return incident.kind == FindingKind.NODE_LOST or incident.severity == Severity.FATAL or must_reset


def _same_generation(job: Job, incident: Incident) -> bool:
    """Whether the generation of `incident` is still the newest, or is being replaced because of it."""
    return incident.generation == job.number or (job.change is not None and incident.id in job.change.incidents)


def _open(turn: Turn, job: Job, finding: Finding) -> None:
    fault_at, dated = _dated(turn, job, finding)
    incident = open_incident(turn, job, finding, fault_at=fault_at, dated=dated)
    next_rung = recipes.struck(turn, job, finding)
    planned.drop(turn, job.name, f"overtaken by {incident.id}")
    if finding.kind in _WORKER_FAULTS:
        progress.count_fault(turn, job.name, finding.generation, finding.attribution)
    quarantine.count(turn, incident)
    if next_rung:
        return  # the walk of another incident continues, and covers this one
    if turn.jobs[job.name].change is not None and finding.node in nodes_of_change(turn.jobs[job.name]):
        change.give_up(turn, job.name, finding.summary)
    decisions.ask_policy(turn, incident)


def _dated(turn: Turn, job: Job, finding: Finding) -> tuple[float, dict[str, str]]:
    """When the fault began, and an addition to the evidence. A fault of the running generation cannot have begun before its
    start: an earlier date is the error of a clock."""
    ours = job.running is not None and finding.generation == job.running.number == job.number
    if not ours or _is_node_fault(finding) or finding.since >= job.membership.running_at:
        return finding.since, {}
    early_s = job.membership.running_at - finding.since
    source = finding.node or "its source"
    return job.membership.running_at, {
        DATED: f"{ESTIMATE}the start of the generation; {source} dated it {early_s:.0f} s before that"
    }


def nodes_of_change(job: Job) -> tuple[str, ...]:
    return job.generation.nodes if job.change and job.generation else ()


def _extend(turn: Turn, job: Job, incident: Incident, finding: Finding) -> None:
    """Add a finding. A cascading failure is only recorded. For a better root, the decision is made again."""
    names_culprit = incident.kind == FindingKind.RANKS_MISSING and finding.kind in _WORKER_FAULTS
    better = (
        names_culprit
        or finding.supersedes in incident.findings
        or (_is_node_fault(finding) and not _is_node_kind(incident))
        or finding.kind is FindingKind.REPEATED_EXCEPTION
    )
    limit = turn.config.findings_per_incident_max
    if not better:
        turn.put_incident(evolve(incident, findings=(*incident.findings, finding.id)[:limit]))
        turn.judge(finding, f"part of {incident.id}, which began with another finding", incident.id)
        return
    quarantine.forget(turn, incident)
    turn.judge(finding, f"the root of {incident.id}, in place of what was found first", incident.id)
    incident = evolve(
        incident,
        kind=finding.kind,
        cause=finding.summary,
        findings=(finding.id, *incident.findings)[:limit],
        node=finding.node if names_culprit else finding.node or incident.node,
        rank=finding.rank,
        gpu=finding.gpu,
        severity=finding.severity,
        evidence={**incident.evidence, **finding.evidence, **_origin(incident)},
        attribution=incident.attribution.refined(finding.attribution),
        recommended_actions=finding.recommended_actions or incident.recommended_actions,
        fault_at=min(incident.fault_at, finding.since),
    )
    again = (incident.action is not None and not names_culprit) and (
        finding.kind is FindingKind.REPEATED_EXCEPTION or finding.node in nodes_of_change(job) or job.change is None
    )
    if again:
        incident = recipes.end(turn, incident, RungEnd.OVERTAKEN, f"another cause was found: {finding.summary}")
        incident = evolve(incident, state=IncidentState.OPEN, action=None, decided_at=None)
        if finding.node in nodes_of_change(job):
            change.give_up(turn, job.name, finding.summary)
    turn.put_incident(incident)
    quarantine.count(turn, incident)
    if again:
        decisions.ask_policy(turn, incident)


def _origin(incident: Incident) -> dict[str, str]:
    """The evidence that identifies the start of its trace; it is kept when a better root is found."""
    return {key: incident.evidence[key] for key in (tracing.TRACEPARENT, tracing.SIGNAL) if key in incident.evidence}


def node_came_back(turn: Turn, node: str) -> None:
    """The same incarnation has reconnected with its workers running. Close its node-lost incident if it is undecided.

    An incident with more findings stays open: the run has another problem, with or without this node.
    """
    for incident in (turn.incidents[each] for each in turn.found(By.STRUCK, node)):
        alone = len(incident.findings) == 1
        if incident.kind == FindingKind.NODE_LOST and incident.action is None and alone:
            quarantine.forget(turn, incident)
            returns.contradicted(turn, node)
            turn.close_incident(
                incident.id, IncidentState.RESOLVED, f"{node} is back with its workers: nothing was lost"
            )
