"""Planned changes: scale up, resize, hot swap of a cordoned node. The run is healthy, so they must cost as little as possible.

A planned change has all ranks save at the same step a little ahead (ordered_saves.py). It begins when the inventories show
that checkpoint as complete. A few steps are repeated, never more than the checkpoint interval.

A new node fetches its shards after the workers have stopped. To fetch them while the run continues would gain nothing: every
step changes the whole state, so the steps of that time would have to be repeated from the fetched checkpoint.
"""

from __future__ import annotations

from holdfast.domain.incidents import Action, Incident, IncidentState, RungEnd
from holdfast.policy import ACTIONS
from holdfast.supervisor.core.changes import change, loans
from holdfast.supervisor.core.fleet import nodes, resets
from holdfast.supervisor.core.incidents import recipes, standing_warnings
from holdfast.supervisor.core.incidents.views import options, plan_for
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import AwaitedNodes, Planned, Running
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import quarantine
from holdfast.supervisor.core.rules.planner import Plan, Unplannable
from holdfast.supervisor.core.saves import ordered_saves, saved
from holdfast.supervisor.timers import PlannedChangeDue, SaveTimeout


def schedule(turn: Turn, incident: Incident, action: Action, tries: int = 1) -> None:
    """Carry out `action` as soon as a new checkpoint is complete, or immediately if the job cannot save. The script is notified
    before that save, also if everything up to the newest known step has just been saved."""
    job = turn.jobs[incident.job]
    if job.progress.reports_no_steps:
        _go(turn, job, Planned(incident.id, action, job.progress.step, tries))
    else:
        _save_first(turn, job, incident.id, action, tries)


def _save_first(turn: Turn, job: Job, incident: str, action: Action, tries: int) -> None:
    at_step = ordered_saves.save_soon(turn, job, leaving=f"{action.kind}: {action.reason}")
    _put(turn, job.name, Planned(incident, action, at_step, tries))
    turn.set_timer(SaveTimeout(job.name), turn.at + ordered_saves.patience_s(turn, job, at_step))


def on_saved(turn: Turn, name: str) -> None:
    """The newest complete checkpoint has changed."""
    job = turn.jobs[name]
    if job.planned is not None and job.checkpoints.step >= job.planned.at_step:
        _go(turn, job, job.planned)


def on_save_timeout(turn: Turn, name: str) -> None:
    """No checkpoint arrived. Begin from the newest one if it is recent enough; else ask again; else leave the run alone."""
    job = turn.jobs.get(name)
    if job is None or job.planned is None:
        return
    plan, rework = job.planned, job.progress.newest_step - job.checkpoints.step
    incident = turn.incidents[plan.incident]
    if job.checkpoints.step > 0 and rework <= job.interval_steps:
        _go(turn, job, plan)
    elif plan.tries < turn.config.save_tries_max:
        schedule(turn, incident, plan.action, plan.tries + 1)
    else:
        _fail(
            turn,
            incident,
            f"postponed: no checkpoint came, and {rework} steps would be done again",
        )


def _go(turn: Turn, job: Job, plan: Planned) -> None:
    turn.cancel_timer(SaveTimeout(job.name))
    job = _put(turn, job.name, None)
    incident = turn.incidents[plan.incident]
    if nodes.job_of(turn, incident.node) is None and incident.node:
        drop(turn, job.name, f"{incident.node} has left already")
        return
    if incident.loan is not None and (why_not := loans.not_wanted(turn, incident)):
        loans.take_back(turn, job.name)
        drop(turn, job.name, why_not)
        return
    outcome = plan_for(turn, job, plan.action, incident)
    if isinstance(outcome, Unplannable):  # for example, a spare is lost now: the healthy run stays as it is
        _fail(turn, incident, f"not possible any more: {outcome.reason}")
        return
    if wait_for := change.not_yet(turn, job, outcome):  # the healthy run trains while it waits
        reason, until = wait_for
        turn.note(job.name, f"{plan.action.kind} is put off: {reason}")
        _put(turn, job.name, plan)
        turn.set_timer(SaveTimeout(job.name), until)
        return
    if _costs_too_much(turn, job, outcome):
        if plan.tries < turn.config.save_tries_max:
            _save_first(turn, job, incident.id, plan.action, plan.tries + 1)
        else:
            _fail(turn, incident, f"postponed: no recent step can be restored with {outcome.mesh}")
        return
    turn.put_job(job.name, changed_at=turn.at)
    spec = ACTIONS[plan.action.kind]
    if incident.warning and spec.removes:
        quarantine.count(turn, incident)
    if incident.wants_reset_later and (spec.removes or spec.resets):  # this is the checkpoint that the reset waited for
        resets.demand(turn, turn.nodes[incident.node], incident.gpu, incident.cause)
    before = job.generation.nodes if job.generation else ()
    if spec.resets:
        change.begin(turn, job.name, plan.action, incident)
    else:
        change.carry_out(turn, turn.jobs[job.name], outcome, plan.action.reason)
    if incident.loan is not None:
        loans.given(turn, incident, before)


def _costs_too_much(turn: Turn, job: Job, plan: Plan) -> bool:
    """Whether more than an interval of steps would be repeated: another mesh may need lost shards of the newest checkpoint."""
    restores = saved.elect_for(turn, job, plan.mesh, plan.placements).restore.step
    return not job.progress.reports_no_steps and job.progress.newest_step - restores > job.interval_steps


def _put(turn: Turn, name: str, planned: Planned | AwaitedNodes | None) -> Job:
    assert isinstance(turn.jobs[name].doing, Running)
    return turn.put_job(name, doing=Running(planned))


def wait(turn: Turn, name: str) -> None:
    """Nothing can be done now. The policy is asked again when the available nodes change."""
    loans.release(turn, name)
    _put(turn, name, AwaitedNodes(turn.at, options(turn, turn.jobs[name])))


def postpone(turn: Turn, name: str) -> None:
    until = turn.at + turn.config.planned_pause_s
    turn.put_job(name, planned_not_before=until)
    loans.release(turn, name)
    turn.set_timer(PlannedChangeDue(name), until)


def _fail(turn: Turn, incident: Incident, outcome: str) -> None:
    """The change cannot be made now: take the next rung of the recipe, or leave the run alone for a while."""
    withdraw(turn, incident.job)
    if incident.rung is not None and incident.action is not None and incident.action.fallbacks:
        recipes.end(turn, incident, RungEnd.FAILED, outcome)
    else:
        give_up(turn, incident.job, outcome)


def give_up(turn: Turn, name: str, outcome: str) -> None:
    """Drop the planned change, and leave the run alone for a while."""
    drop(turn, name, outcome)
    postpone(turn, name)


def withdraw(turn: Turn, name: str) -> None:
    """Withdraw the planned change before it begins."""
    turn.cancel_timer(SaveTimeout(name))
    if (change := turn.jobs[name].planned) is not None:
        ordered_saves.drop_leaving(turn, _put(turn, name, None), change.at_step)


def drop(turn: Turn, name: str, outcome: str) -> None:
    """Abandon the planned change: something else has precedence, or it is no longer wanted."""
    withdraw(turn, name)
    for incident in turn.open_incidents(name):
        if incident.planned:
            turn.close_incident(incident.id, IncidentState.RESOLVED, outcome)
        if incident.warning:
            standing_warnings.put_off(turn, incident)
