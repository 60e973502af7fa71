"""Findings open or extend incidents, and incidents get a decision.

A finding about a worker belongs to a generation. If the generation is an older one, the finding is ignored. If an incident of
the same generation is open, the finding is a cascading failure of it. A finding about a node does not depend on a generation:
it concerns the job that has ranks on the node now.
"""

from __future__ import annotations

from typing import assert_never

from holdfast.domain import tracing
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import DATED, ESTIMATE, Blamed, Finding, FindingKind, Severity
from holdfast.domain.incidents import LOAN, MAINTENANCE, Action, Incident, IncidentState, RungEnd
from holdfast.policy import ACTIONS, OUTAGES, RUNGS_MAX, Effect, check, default, flaw
from holdfast.supervisor.core import (
    binding,
    breaker,
    change,
    jobs,
    loans,
    nodes,
    notices,
    pacing,
    planned,
    progress,
    quarantine,
    recipes,
    resets,
    returns,
    saved,
    standing_warnings,
)
from holdfast.supervisor.core.index import By
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.lifecycle import Replanning, Suspended
from holdfast.supervisor.core.opening import open_incident
from holdfast.supervisor.core.state import Node
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.core.views import job_view
from holdfast.supervisor.protocol import JobPhase, PolicyAnswered
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
_DEFAULT = "default policy"
_SAME_CONCLUSION_S = 1.0  # ages are measured; those of one finding that is delivered twice differ by less

# ---------------------------------------------------------------- findings


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
        and (finding.repeat > 0 or finding.at <= incident.t_detected + _SAME_CONCLUSION_S)
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
    left, job = turn.nodes[finding.node].told_to_end, nodes.job_of(turn, finding.node)
    if left and (job is None or isinstance(job.doing, Suspended)):
        turn.judge(finding, f"{finding.node} has left: its agent was told to end")
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
            ask_policy_again(turn, incident)


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
            at_once = abs(finding.since - incident.t_fault) <= turn.config.merge_s and not _is_node_kind(incident)
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
    t_fault, dated = _dated(turn, job, finding)
    incident = open_incident(turn, job, finding, t_fault=t_fault, dated=dated)
    next_rung = recipes.struck(turn, job, finding)
    planned.drop(turn, job.name, f"overtaken by {incident.id}")
    if finding.kind in _WORKER_FAULTS:
        progress.count_fault(turn, job.name, finding.generation, finding.attribution.error_class)
    quarantine.count(turn, incident)
    if next_rung:
        return  # the walk of another incident continues, and covers this one
    if turn.jobs[job.name].change is not None and finding.node in nodes_of_change(turn.jobs[job.name]):
        change.give_up(turn, job.name, finding.summary)
    ask_policy(turn, incident)


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
        ladder=finding.ladder or incident.ladder,
        t_fault=min(incident.t_fault, finding.since),
    )
    again = (incident.action is not None and not names_culprit) and (
        finding.kind is FindingKind.REPEATED_EXCEPTION or finding.node in nodes_of_change(job) or job.change is None
    )
    if again:
        incident = recipes.end(turn, incident, RungEnd.OVERTAKEN, f"another cause was found: {finding.summary}")
        incident = evolve(incident, state=IncidentState.OPEN, action=None, t_decided=None)
        if finding.node in nodes_of_change(job):
            change.give_up(turn, job.name, finding.summary)
    turn.put_incident(incident)
    quarantine.count(turn, incident)
    if again:
        ask_policy(turn, incident)


def _origin(incident: Incident) -> dict[str, str]:
    """The evidence that identifies the start of its trace; it is kept when a better root is found."""
    return {key: incident.evidence[key] for key in (tracing.TRACEPARENT, tracing.SIGNAL) if key in incident.evidence}


# ---------------------------------------------------------------- decisions


def ask_policy(turn: Turn, incident: Incident) -> None:
    """Ask the policy. While the breaker is open, the incident waits for it to close."""
    if breaker.is_open(turn):
        breaker.defer_incident(turn, incident)
    else:
        turn.ask(incident)


def ask_policy_again(turn: Turn, incident: Incident) -> None:
    """The decision cannot be carried out, or is no longer needed: ask the policy again."""
    incident = recipes.end(turn, incident, RungEnd.OVERTAKEN, "the policy was asked again")
    incident = turn.put_incident(evolve(incident, state=IncidentState.OPEN, action=None))
    ask_policy(turn, incident)


def on_answer(turn: Turn, event: PolicyAnswered) -> None:
    if event.incident not in turn.questions:
        return  # answered already, or withdrawn
    incident = turn.incidents[event.incident]
    turn.withdraw(incident.id)
    if incident.recipes_exhausted >= recipes.EXHAUSTED_MAX:
        _decide_by_default(turn, incident, _exhausted_reason(incident.recipes_exhausted))
        return
    action, decided_by = event.action, event.decided_by
    problem = flaw(action)
    chosen = None
    if not problem:
        incident, chosen = recipes.choose(turn, incident, action.rungs)
    if chosen is not None:
        decide(turn, incident, chosen, decided_by)
        return
    seen = job_view(turn, turn.jobs[incident.job])
    problem = problem or check(action, incident, seen) or _unplannable(turn, action, incident)
    why = f"{_DEFAULT}, because {event.decided_by} answered {event.action.kind}: {problem}"
    _decide_by_default(turn, incident, why)


def _unplannable(turn: Turn, action: Action, incident: Incident) -> str:
    """Why no rung of the action can be carried out, although the situation would allow it."""
    return "; ".join(dict.fromkeys(recipes.why_not(turn, rung, incident) for rung in action.rungs))


def decide_by_default(turn: Turn, incident: Incident, why: str) -> None:
    """Let the default policy decide: for an operator's request, or if the job's policy does not answer."""
    turn.withdraw(incident.id)
    _decide_by_default(turn, incident, why)


def _decide_by_default(turn: Turn, incident: Incident, why: str) -> None:
    action = default(incident, job_view(turn, turn.jobs[incident.job]))
    rungs = action.rungs if incident.recipes_exhausted < recipes.EXHAUSTED_MAX else action.rungs[:1]
    incident, chosen = recipes.choose(turn, incident, rungs, trusted=True)
    assert chosen is not None
    decide(turn, incident, chosen, why)


def walk_on(turn: Turn) -> None:
    """Take the next rung of every incident whose rung has failed or timed out. Does nothing while the breaker is open."""
    for _ in range(RUNGS_MAX):
        if not turn.count(By.RUNG_OVER) or breaker.is_open(turn):
            return
        for each in turn.found(By.RUNG_OVER):
            if each in turn.incidents and not breaker.is_open(turn):
                _next_rung(turn, turn.incidents[each])


def _next_rung(turn: Turn, incident: Incident) -> None:
    job, before = turn.jobs[incident.job], incident.action
    assert before is not None
    for other in turn.open_incidents(job.name):  # the next rung covers the incidents that this one covered
        if other.id != incident.id and other.action == _covering(before):
            turn.put_incident(evolve(other, state=IncidentState.OPEN, action=None, t_decided=None, decided_by=""))
    ended, why = incident.walk[-1].end, incident.walk[-1].why
    incident, chosen = recipes.choose(turn, incident, before.fallbacks, anew=False)
    if chosen is not None:
        chosen = evolve(chosen, reason=f"{chosen.reason} ({before.kind} {ended}: {why})")
        if incident.planned:
            planned.withdraw(turn, job.name)
        decide(turn, incident, chosen, incident.decided_by)
    elif incident.planned:
        turn.put_incident(incident)
        planned.give_up(turn, job.name, f"no rung of the recipe is left: {why}")
    else:
        _exhausted(turn, incident, why)


def _exhausted(turn: Turn, incident: Incident, why: str) -> None:
    """No rung is left. The policy is asked again and sees what was tried; after `EXHAUSTED_MAX` recipes the default decides."""
    count = incident.recipes_exhausted + 1
    incident = turn.put_incident(
        evolve(incident, state=IncidentState.OPEN, action=None, t_decided=None, decided_by="", recipes_exhausted=count)
    )
    if turn.jobs[incident.job].change is not None:
        change.give_up(turn, incident.job, f"no rung of the recipe is left: {why}")
    if count < recipes.EXHAUSTED_MAX:
        ask_policy(turn, incident)
    else:
        decide_by_default(turn, incident, _exhausted_reason(count))


def _exhausted_reason(recipes_exhausted: int) -> str:
    return f"{_DEFAULT}, because no rung was left of {recipes_exhausted} recipes"


def take_up(turn: Turn, incident: Incident) -> bool:
    """Begin the rung that a waiting job waits for. Returns False if there is none; the caller then asks the policy."""
    action = incident.action
    if incident.rung is None or action is None or ACTIONS[action.kind].effect is not Effect.CHANGE:
        return False
    if problem := recipes.why_not(turn, action, incident):
        recipes.end(turn, incident, RungEnd.FAILED, problem)
        walk_on(turn)
    else:
        change.begin(turn, incident.job, action, incident)
    return True


def decide(turn: Turn, incident: Incident, action: Action, decided_by: str) -> None:
    """Record the decision and carry it out. The same change covers the other open faults of the job."""
    if breaker.is_open(turn) and not incident.planned:
        ask_policy(turn, incident)
        return
    name, spec = incident.job, ACTIONS[action.kind]
    at_once = spec.effect in (Effect.CONTINUE, Effect.END) or (
        spec.effect is Effect.WAIT and (incident.kind in (LOAN, MAINTENANCE) or incident.warning)
    )
    if at_once:
        incident = incident.rung_ended(turn.at, RungEnd.DONE, action.reason)
    incident = turn.put_incident(
        evolve(incident, state=IncidentState.DECIDED, action=action, decided_by=decided_by, t_decided=turn.at)
    )
    recipes.begun(turn, incident)
    if not incident.planned and spec.effect is not Effect.CONTINUE:
        recipes.overtake(turn, name, incident)
    for step in action.before:
        _step_before(turn, name, step)
    match spec.effect:
        case Effect.END:
            jobs.fail(turn, name, action.reason, permanent=_would_recur(incident))
        case Effect.WAIT if (
            incident.kind == MAINTENANCE and (ends_at := notices.end_of_all(turn, incident)) is not None
        ):
            jobs.suspend(turn, name, ends_at)
        case Effect.CONTINUE | Effect.WAIT if incident.kind == MAINTENANCE:
            notices.stay(turn, incident, action)
        case Effect.CONTINUE | Effect.WAIT if incident.loan is not None:
            _continue(turn, name, action)
            loans.refused(turn, incident, action)
        case Effect.CONTINUE | Effect.WAIT if incident.warning:
            _continue(turn, name, action)
            standing_warnings.answered(turn, incident, action)
        case Effect.CONTINUE:
            _continue(turn, name, action)
            turn.close_incident(incident.id, IncidentState.RESOLVED, action.reason)
            if incident.planned:
                planned.postpone(turn, name)
        case Effect.WAIT if incident.planned:
            planned.wait(turn, name)
        case Effect.WAIT:
            _cover(turn, incident, action, decided_by)
            ended = turn.jobs[name].change
            # Nodes that could not prepare are free again as soon as they have stopped, and no event announces that.
            retry = ended is not None and bool(ended.excluded)
            change.hold(turn, name, action.reason, retry=retry, retry_s=action.retry_s)
        case Effect.CHANGE:
            _condemn(turn, action)
            if incident.planned and turn.jobs[name].phase is JobPhase.RUNNING:
                planned.schedule(turn, incident, action)
            else:
                _cover(turn, incident, action, decided_by)
                change.begin(turn, name, action, incident)
        case _:
            assert_never(spec.effect)


def _would_recur(incident: Incident) -> bool:
    """Whether another run of the job would fail in the same way: an error of the script, and not a passing outage."""
    cause = incident.attribution
    of_script = incident.kind == FindingKind.REPEATED_EXCEPTION or cause.blame is Blamed.USER
    return of_script and cause.error_class not in OUTAGES


def _step_before(turn: Turn, name: str, step: Action) -> None:
    """Carry out a step that starts no ranks. The action of its rung follows immediately."""
    if ACTIONS[step.kind].effect is Effect.CONTINUE:
        _continue(turn, name, step)
    else:
        _condemn(turn, step)


def _condemn(turn: Turn, action: Action) -> None:
    for node in action.nodes if ACTIONS[action.kind].condemns else ():
        if node in turn.nodes:
            nodes.mark_unschedulable(turn, node, action.reason)


def _continue(turn: Turn, name: str, action: Action) -> None:
    spec = ACTIONS[action.kind]
    if not spec.silent:
        turn.note(name, action.reason)
    if spec.paces:
        pacing.decided(turn, name, action)
    if spec.saves:
        planned.save_soon(turn, turn.jobs[name], to_object_store=True)


def _cover(turn: Turn, incident: Incident, action: Action, decided_by: str) -> None:
    """Mark the job's other faults as decided: the plan that is made now takes them into account."""
    for other in turn.open_incidents(incident.job):
        if other.action is None and other.id != incident.id and other.kind != FindingKind.REPEATED_EXCEPTION:
            turn.withdraw(other.id)
            turn.put_incident(
                evolve(
                    other,
                    state=IncidentState.DECIDED,
                    action=_covering(action),
                    decided_by=f"{decided_by}, together with {incident.id}",
                    t_decided=turn.at,
                )
            )


def _covering(action: Action) -> Action:
    """The action as recorded for incidents that it covers: without the recipe, which belongs to the incident it answers."""
    return evolve(action, before=(), fallbacks=(), within_s=0.0)


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
