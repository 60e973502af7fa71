"""Reconciliation: after every event, compare what the jobs need with the available nodes.

Declarative on purpose: it compares the desired state with the actual one, so no request can be lost. A waiting job is retried
when there are other nodes than before, a cordoned node with ranks is swapped, a job with too few replicas grows, and an
abandoned change is begun again.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.domain.evolve import evolve
from holdfast.domain.incidents import (
    CORDONED,
    LOAN,
    MAINTENANCE,
    PLANNED_KINDS,
    REPAIR,
    RESIZE,
    Incident,
)
from holdfast.supervisor.core.changes import change, loans, planned, suspension
from holdfast.supervisor.core.fleet import breaker, resets, returns
from holdfast.supervisor.core.handling import decisions, jobs, notices, resetting
from holdfast.supervisor.core.incidents import standing_warnings
from holdfast.supervisor.core.incidents.opening import open_incident, planned_incident
from holdfast.supervisor.core.incidents.views import options, reachable
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import (
    Deferred,
    Pending,
    Replanning,
    Resetting,
    Running,
    Suspended,
    Waiting,
)
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import quarantine, reboots, replacements
from holdfast.supervisor.core.rules.planner import Plan
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.timers import DeferralOver, RetryDue

_OPERATOR = "operator"
_PASSES_MAX = 3  # per event: a node that one job releases can be assigned to another in the next pass


def reconcile(turn: Turn) -> None:
    """Reconcile every job that the event may affect, and then those that this affects in turn."""
    closed = not breaker.is_open(turn)
    _review_nodes(turn, closed)
    decisions.walk_on(turn)
    if closed and turn.count(By.UNDECIDED) != len(turn.questions):  # questions are asked only about undecided incidents
        asked = set(turn.questions)
        for incident in turn.found(By.UNDECIDED):
            if incident not in asked:
                turn.ask(turn.incidents[incident])
    for _ in range(_PASSES_MAX):
        if not (names := turn.touched()):
            break
        for name in names:
            if name in turn.jobs:
                _reconcile_job(turn, turn.jobs[name], closed)
                if closed:
                    loans.review(turn, turn.jobs[name])
        decisions.walk_on(turn)
        _review_nodes(turn, closed)


def _review_nodes(turn: Turn, closed: bool) -> None:
    for name in turn.removed():
        returns.review(turn, name)
        reboots.review(turn, name)
        replacements.review(turn, name)
    if closed and turn.count(By.RESET_DUE):
        resets.review(turn)


def _reconcile_job(turn: Turn, job: Job, closed: bool) -> None:
    match job.doing:
        case Pending() if RetryDue(job.name) not in turn.timers:
            quarantine.release_for(turn, job)
            change.first_start(turn, job.name, degraded=_may_start_degraded(turn, job))
        case Waiting() if suspension.all_leave(turn, job) and not options(turn, job):
            suspension.begin(turn, job.name, "all of its nodes were asked to end")
        case Suspended() as doing if closed:
            quarantine.release_for(turn, job)
            if not _policy_is_asked(turn, job) and suspension.may_go_on(turn, job, doing):
                _continue_suspended(turn, job.name)
        case Waiting() | Deferred() if closed:
            quarantine.release_for(turn, job)
            _retry_when_possible(turn, job)
        case Replanning() if closed:
            if all(incident.action is not None for incident in turn.open_incidents(job.name)):
                change.resume(turn, job.name, "the previous change was abandoned")
        case Resetting() if closed:
            resetting.go_on(turn, job)
        case Running() if job.planned is None and closed:
            _plan_change(turn, job)
        case _:
            pass


def _may_start_degraded(turn: Turn, job: Job) -> bool:
    """After a time. If other jobs were asked for replicas, only when all of them have answered."""
    if loans.are_asked(turn, job):
        return False
    return bool(job.kept) or turn.at >= job.submitted_at + turn.config.degraded_start_s


def start_degraded(turn: Turn, name: str) -> None:
    """End the wait for the full mesh; `reconcile` starts the job."""
    if name in turn.jobs and isinstance(turn.jobs[name].doing, Pending):
        turn.note(name, f"has waited {turn.config.degraded_start_s:g} s for its full mesh: fewer replicas will do")


def _retry_when_possible(turn: Turn, job: Job) -> None:
    """Retry a waiting job: a deferred one once enough is known, the others once there are other nodes than before."""
    if isinstance(doing := job.doing, Deferred):
        stale = saved.stale(turn, job)
        # `known` is set if enough was known before, and other nodes than those of the job could not restore it. Then only newer
        # inventories can change the decision.
        again = turn.at >= doing.until or (
            saved.inventories_complete(turn, job, stale) and saved.known_now(turn, job) != doing.known
        )
        if not again and stale:
            _wait_no_longer_than_needed(turn, job, doing, stale)
    else:
        # An excluded node is free again as soon as it has stopped. It must not count as another option: otherwise a change that
        # cannot succeed would be tried many times a second, until the breaker opens.
        again = RetryDue(job.name) not in turn.timers and _has_other_options(turn, job)
    if again:
        retry(turn, job.name)


def _wait_no_longer_than_needed(turn: Turn, job: Job, doing: Deferred, stale: Sequence[str]) -> None:
    """A node that the job waits for may have connected since, and its newest inventory is waited for less long then."""
    until = max(turn.nodes[node].stale_until for node in stale)
    if until < doing.until:
        turn.put_job(job.name, doing=evolve(doing, until=until))
        turn.set_timer(DeferralOver(job.name), until)


def _has_other_options(turn: Turn, job: Job) -> bool:
    """Whether other nodes are available than when the job began to wait. Compared only if the uses of nodes have changed."""
    awaited = job.awaited_nodes
    if awaited is None or awaited.uses == turn.uses:
        return False
    if options(turn, job) != awaited.candidates:
        return True
    compared = evolve(awaited, uses=turn.uses)
    turn.put_job(job.name, doing=Running(compared) if isinstance(job.doing, Running) else Waiting(compared))
    return False


def retry(turn: Turn, name: str) -> None:
    """Make the decision about a waiting job again."""
    job = turn.jobs.get(name)
    if job is None or job.held_since is None:
        return
    if isinstance(job.doing, Suspended):
        _retry_suspended(turn, job, job.doing)
        return
    if breaker.is_open(turn):
        # retried later, because the job gets no event when the breaker closes
        turn.set_timer(RetryDue(name), turn.at + change.RETRY_RUN_S)
        return
    if job.running is None and job.progress.restarts_without_progress >= job.spec.limits.restarts_without_progress_max:
        jobs.fail(turn, name, f"could not be started {job.progress.restarts_without_progress} times: {job.reason}")
        return
    if _policy_is_asked(turn, job):
        return
    faults = [incident for incident in turn.open_incidents(name) if not incident.planned]
    if isinstance(job.doing, Deferred) and any(decisions.take_up(turn, incident) for incident in faults):
        return
    if faults:
        decisions.ask_policy_again(turn, faults[0])
    elif isinstance(job.doing, Waiting | Deferred):
        change.resume(turn, name, "the change is possible now")


def _retry_suspended(turn: Turn, job: Job, doing: Suspended) -> None:
    """Nodes returned a while ago, but not all of them, or not those that hold the step that the job was suspended at."""
    if not doing.returning_at or _policy_is_asked(turn, job):
        return
    why = "the circuit breaker is open" if breaker.is_open(turn) else suspension.wait_on(turn, job, doing)
    if why:
        suspension.stays(turn, job.name, why)
    else:
        _continue_suspended(turn, job.name)


def _policy_is_asked(turn: Turn, job: Job) -> bool:
    """Whether the policy's answer about a fault of the job is pending. The job continues with that answer."""
    return any(not each.planned and each.action is None for each in turn.open_incidents(job.name))


def _continue_suspended(turn: Turn, name: str) -> None:
    """End the suspension. No policy answer about a fault of the job is pending."""
    job = turn.jobs[name]
    assert isinstance(job.doing, Suspended)
    turn.cancel_timer(RetryDue(name))
    turn.note(
        name, f"continues after {turn.at - job.doing.at:.0f} s of suspension, which began at step {job.doing.step}"
    )
    faults = [incident for incident in turn.open_incidents(name) if not incident.planned]
    if faults:
        decisions.ask_policy_again(turn, faults[0])
    else:
        change.resume(turn, name, "nodes are there again")


def _plan_change(turn: Turn, job: Job) -> None:
    """Open, keep or withdraw the planned change that a healthy run needs most."""
    open_now = turn.open_incidents(job.name)
    if (
        any(not incident.planned for incident in open_now)
        or job.membership.finished
        or turn.at < job.planned_not_before
    ):
        return
    wanted = _wanted(turn, job)
    warning = standing_warnings.wanted(turn, job) if wanted is None else None
    if warning is not None:
        wanted = warning.kind, warning.node, warning.summary
    if wanted is None:
        planned.drop(turn, job.name, "not wanted any more")
        return
    kind, node, cause = wanted
    current = next((incident for incident in open_now if incident.kind == kind and incident.node == node), None)
    if current is None:
        planned.drop(turn, job.name, f"overtaken: {cause}")
        if warning is None:
            _open(turn, job, kind, node, cause)
        else:
            _ask(turn, open_incident(turn, job, warning, fault_at=warning.since))
    elif current.action is not None and _has_other_options(turn, job):
        turn.put_job(job.name, doing=Running())
        _ask(turn, current)


def _wanted(turn: Turn, job: Job) -> tuple[str, str, str] | None:
    """(kind, node, cause) of the planned change that the job needs most; None if it needs none."""
    generation = job.generation
    assert generation is not None
    for name in turn.members(generation, By.CONDEMNED):
        if why := turn.nodes[name].unschedulable_reason:
            return CORDONED, name, f"{name} must leave: {why}"
    if (leaving := notices.wanted(turn, job)) is not None:
        return MAINTENANCE, *leaving
    if asked := loans.wanted(turn, job):
        return LOAN, "", asked
    dp = generation.mesh.dp
    if job.target_dp == dp or (job.progress.reports_no_steps and job.target_dp > dp):
        return None  # a script that reports no steps cannot be interrupted cheaply: it grows with the next restart
    if job.target_dp < dp:
        return RESIZE, "", f"the target is dp {job.target_dp}, and the job runs with dp {dp}"
    outcome = reachable(turn, job, job.target_dp, job.spec.min_dp)
    if not isinstance(outcome, Plan) or outcome.mesh.dp <= dp or loans.are_asked(turn, job):
        return None  # it grows once, when all lent nodes are free
    kind = REPAIR if job.target_dp == job.spec.mesh.dp else RESIZE
    return kind, "", f"{dp} of {job.target_dp} replicas run, and there are nodes for {outcome.mesh.dp}"


def _open(turn: Turn, job: Job, kind: str, node: str, cause: str) -> None:
    assert kind in PLANNED_KINDS
    evidence = notices.evidence_of(turn, node) if kind == MAINTENANCE else None
    incident = planned_incident(turn, job, kind, cause, node=node, evidence=evidence)
    if kind == MAINTENANCE:
        notices.save(turn, job.name, node)
    if kind in (REPAIR, RESIZE):
        loans.keep_for_growth(turn, job)
    _ask(turn, turn.put_incident(incident))


def _ask(turn: Turn, incident: Incident) -> None:
    """The policy decides about loans, repairs, maintenance and warnings. An operator's request needs no decision."""
    if incident.kind in (LOAN, REPAIR, MAINTENANCE) or incident.warning:
        decisions.ask_policy_again(turn, incident) if incident.action else turn.ask(incident)
    else:
        decisions.decide_by_default(turn, incident, _OPERATOR)
