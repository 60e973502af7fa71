"""Incidents get a decision: the job's policy is asked, its answer is checked, and what it chose is begun.

An answer that cannot be carried out is replaced by that of the default policy. An action with fallbacks is a recipe, whose
rungs are tried one after the other. An action that is under way covers the other incidents of its job.
"""

from __future__ import annotations

from typing import assert_never

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Blamed, FindingKind
from holdfast.domain.incidents import LOAN, MAINTENANCE, Action, Incident, IncidentState, RungEnd
from holdfast.policy import ACTIONS, OUTAGES, RUNGS_MAX, Effect, check, default, flaw
from holdfast.supervisor.core.changes import change, loans, planned
from holdfast.supervisor.core.fleet import breaker, nodes
from holdfast.supervisor.core.handling import jobs, notices
from holdfast.supervisor.core.incidents import recipes, standing_warnings
from holdfast.supervisor.core.incidents.views import job_view
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.planner import Unplannable
from holdfast.supervisor.core.saves import ordered_saves, pacing
from holdfast.supervisor.protocol import JobPhase, PolicyAnswered

_DEFAULT = "default policy"


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
            turn.put_incident(evolve(other, state=IncidentState.OPEN, action=None, decided_at=None, decided_by=""))
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
        evolve(incident, state=IncidentState.OPEN, action=None, decided_at=None, decided_by="", recipes_exhausted=count)
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
    outcome = recipes.planned_already(turn, incident)
    if outcome is None:
        problem = recipes.why_not(turn, action, incident)
    else:
        problem = outcome.reason if isinstance(outcome, Unplannable) else ""
    if problem:
        recipes.end(turn, incident, RungEnd.FAILED, problem)
        walk_on(turn)
    elif outcome is None:
        change.begin(turn, incident.job, action, incident)
    else:
        change.carry_out(turn, turn.jobs[incident.job], outcome, action.reason, planned_before=True)
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
        evolve(incident, state=IncidentState.DECIDED, action=action, decided_by=decided_by, decided_at=turn.at)
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
        else:
            turn.note(node, f"not cordoned, as a policy asks ({action.reason}): no such node has ever connected")


def _continue(turn: Turn, name: str, action: Action) -> None:
    spec = ACTIONS[action.kind]
    if not spec.silent:
        turn.note(name, action.reason)
    if spec.paces:
        pacing.decided(turn, name, action)
    if spec.saves:
        ordered_saves.save_soon(turn, turn.jobs[name], to_object_store=True)


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
                    decided_at=turn.at,
                )
            )


def _covering(action: Action) -> Action:
    """The action as recorded for incidents that it covers: without the recipe, which belongs to the incident it answers."""
    return evolve(action, before=(), fallbacks=(), within_s=0.0)
