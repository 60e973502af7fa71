"""Recipes: sequences of rungs that answer an incident. The next rung follows if one is refused, fails or takes too long.

    policy ──► choose: the first rung that is possible ──► decide ──► the job changes ──► every rank steps: DONE
                 ▲   each one before it: REFUSED                          │
                 └─── job_needs, after the same event ◄── FAILED or LATE ─┘     no rung left: the policy is asked again

Theory of operation. The rest of a recipe is in the incident's action (its fallbacks), and the rungs that were tried are in the
incident's walk. The last rung of the walk is being carried out while it has no end. A walk is thus part of the incident's row:
every leader continues it, and it can only go forward, since tried rungs are no longer in the action. A job has one walk at a
time: any other decision about the job ends the walk.

Code that finds that a rung has failed only records it (`end`). `job_needs` finds such incidents after the event and takes the
next rung (`decisions.walk_on`). While the breaker is open no rung is taken: a rung that fails then is planned around, like the
change of an action without fallbacks.

A rung fails if its generation cannot be brought up as requested, or if a fault on the incident's node (or on no known node)
ends it before every rank has stepped. A fault on another node is another incident, about which the policy decides. The last
rung is planned around. A planned change can fail only while the run continues: once it has begun, the run is restored by
whatever means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Blamed, Finding, FindingKind
from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState, Rung, RungEnd
from holdfast.policy import ACTIONS, OUTAGES, Effect, check_rung
from holdfast.supervisor.core.fleet import breaker
from holdfast.supervisor.core.incidents.views import job_view, plan_for, reachable
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import CHANGING, Deferred, Starting
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.planner import Plan, Unplannable
from holdfast.supervisor.protocol import JobPhase
from holdfast.supervisor.timers import FirstStepsDue, RungTimeout

EXHAUSTED_MAX = 3  # recipes of one incident; after that the default policy decides, without fallbacks
_SAME_NODES = frozenset({ActionKind.RESTART, ActionKind.GPU_RESET})
_OF_THE_RUNG = frozenset(
    {FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.HANG, FindingKind.RANKS_MISSING}
)

# ---------------------------------------------------------------- the choice of a rung


def why_not(turn: Turn, action: Action, incident: Incident) -> str:
    """Why this rung cannot be carried out now; empty if it can."""
    job = turn.jobs[incident.job]
    if problem := check_rung(action, incident, job_view(turn, job)):
        return problem
    spec = ACTIONS[action.kind]
    if spec.effect is Effect.CONTINUE and job.phase is not JobPhase.RUNNING:
        return "rejected: the job is not running and this action would not start it"
    if spec.effect is Effect.CHANGE and not spec.condemns:
        outcome = plan_for(turn, job, action, incident)
        return outcome.reason if isinstance(outcome, Unplannable) else ""
    return ""


def choose(
    turn: Turn, incident: Incident, rungs: Sequence[Action], *, anew: bool = True, trusted: bool = False
) -> tuple[Incident, Action | None]:
    """The first possible rung, with those after it as its fallbacks; and the incident (not stored yet), whose walk contains
    the refused rungs and the chosen one. `anew`: the rungs are a whole recipe, not the rest of one. `trusted`: the first rung
    is not checked. An action without fallbacks leaves no walk."""
    if anew and len(rungs) == 1 and not (rungs[0].within_s or rungs[0].before or incident.walk):
        possible = trusted or not why_not(turn, rungs[0], incident)
        return incident, rungs[0] if possible else None
    last = incident.walk[-1] if incident.walk else None
    recipe = (last.recipe if last else 0) + anew
    first = 1 if anew or last is None else last.number + 1
    incident = _ended(turn, incident, RungEnd.OVERTAKEN, "the policy was asked again") if anew else incident
    for place, action in enumerate(rungs):
        rung = Rung(
            recipe,
            first + place,
            action.kind,
            action.steps,
            action.reason,
            turn.at,
            action.within_s,
            nodes=action.nodes,
        )
        problem = "" if trusted and place == 0 else why_not(turn, action, incident)
        if not problem:
            return incident.walked(rung), evolve(action, fallbacks=tuple(rungs[place + 1 :]))
        incident = incident.walked(evolve(rung, ended_at=turn.at, end=RungEnd.REFUSED, why=problem))
    return incident, None


# ---------------------------------------------------------------- how a rung ends


def begun(turn: Turn, incident: Incident) -> None:
    """The newest rung was decided: start its time limit."""
    rung = incident.rung
    if rung is not None and rung.within_s:
        turn.set_timer(RungTimeout(incident.job, incident.id), turn.at + rung.within_s)
    else:
        turn.cancel_timer(RungTimeout(incident.job, incident.id))


def end(turn: Turn, incident: Incident, how: RungEnd, why: str) -> Incident:
    """End the rung that is being carried out."""
    if incident.rung is None:
        return incident
    return turn.put_incident(_ended(turn, incident, how, why))


def _ended(turn: Turn, incident: Incident, how: RungEnd, why: str) -> Incident:
    turn.cancel_timer(RungTimeout(incident.job, incident.id))
    return incident.rung_ended(turn.at, how, why)


def overtake(turn: Turn, job: str, by: Incident) -> None:
    """The decision about `by` covers the other faults of the job: end their walks."""
    for other in turn.open_incidents(job):
        if other.id == by.id or other.planned or other.rung is None:
            continue
        other = end(turn, other, RungEnd.OVERTAKEN, f"overtaken by the decision about {by.id}: {by.cause}")
        if other.kind != FindingKind.REPEATED_EXCEPTION:
            turn.put_incident(evolve(other, state=IncidentState.OPEN, action=None, decided_at=None, decided_by=""))


def _of_change(turn: Turn, job: Job) -> Incident | None:
    """The incident whose rung the change in flight carries out, if another rung could follow it now."""
    if job.change is None or breaker.is_open(turn):
        return None
    for each in job.change.incidents:
        incident = turn.incidents.get(each)
        if incident is None or incident.rung is None or incident.planned:
            continue
        if incident.action is not None and incident.action.fallbacks:
            return incident
    return None


def plan_again(turn: Turn, job: Job, why: str, excluded: str) -> Plan | Unplannable | None:
    """The plan for the rung of the change in flight, without `excluded` (empty = on the same nodes). If there is none, the rung
    has failed, and the reason is returned. None if any plan will do, because no other rung could follow."""
    if job.generation is None or (incident := _of_change(turn, job)) is None:
        return None
    action = incident.action
    assert action is not None
    outcome = _of_same_size(turn, job, job.generation, incident)
    if isinstance(outcome, Unplannable):
        failure = f"{why}; {outcome.reason}"
    elif excluded and action.kind in _SAME_NODES and _concerns(incident, excluded):
        failure = why
    else:
        return outcome
    end(turn, incident, RungEnd.FAILED, failure)
    return Unplannable(failure)


def planned_already(turn: Turn, incident: Incident) -> Plan | Unplannable | None:
    """The plan for a deferred rung whose generation had been planned, but not started. None if there was no such generation,
    or if GPUs of its nodes have to be reset.

    The rung itself cannot be planned again: that generation is without the nodes or the replicas that the rung removes, so the
    rung would be refused for what it has done."""
    job, action = turn.jobs[incident.job], incident.action
    if job.generation is None or action is None or not (isinstance(job.doing, Deferred) and job.doing.planned_before):
        return None
    if ACTIONS[action.kind].resets and turn.members(job.generation, By.RESET_DUE):
        return None
    return _of_same_size(turn, job, job.generation, incident)


def _of_same_size(turn: Turn, job: Job, generation: Generation, incident: Incident) -> Plan | Unplannable:
    """The plan for as many replicas as `generation` has, without the nodes that the incident's rung removes."""
    action = incident.action
    removes = action is not None and ACTIONS[action.kind].removes
    out = frozenset(_concerned(incident)) if removes else frozenset[str]()
    return reachable(turn, job, generation.mesh.dp, generation.mesh.dp, out)


def follow(turn: Turn, name: str, before: Generation | None) -> None:
    """A generation is planned in place of `before`. Its rung may have replaced nodes that later rungs name. If the rung fails,
    the replacements must leave with them."""
    job = turn.jobs[name]
    generation, change = job.generation, job.change
    if before is None or generation is None or change is None or not change.incidents:
        return
    if (before.mesh, len(before.nodes)) != (generation.mesh, len(generation.nodes)):
        return
    replaced = {
        old: new
        for old, new in zip(before.nodes, generation.nodes, strict=True)
        if generation.slot_of(old) is None and before.slot_of(new) is None
    }
    for each in change.incidents if replaced else ():
        incident = turn.incidents[each]
        action = incident.action
        if incident.rung is None or action is None or not action.fallbacks:
            continue
        fallbacks = tuple(_naming(rung, replaced, incident) for rung in action.fallbacks)
        if fallbacks != action.fallbacks:
            turn.put_incident(evolve(incident, action=evolve(action, fallbacks=fallbacks)))


def _naming(action: Action, replaced: Mapping[str, str], incident: Incident) -> Action:
    """The rung, also naming the nodes that replaced those that it names."""
    if action.kind not in (ActionKind.HOT_SWAP, ActionKind.SCALE_DOWN) or (action.dp is not None and not action.nodes):
        return action
    named = action.nodes or ((incident.node,) if incident.node else ())
    more = tuple(replaced[node] for node in named if node in replaced and replaced[node] not in named)
    return evolve(action, nodes=(*named, *more)) if more else action


def struck(turn: Turn, job: Job, finding: Finding) -> bool:
    """Whether a fault of the generation that a rung brings up is the failure of this rung. An error of the script or of a
    service is not: the policy handles these."""
    if not isinstance(job.doing, CHANGING) or (incident := _of_change(turn, job)) is None:
        return False
    found = finding.attribution
    if finding.kind not in _OF_THE_RUNG or found.blame is Blamed.USER or found.error_class in OUTAGES:
        return False
    if finding.node and not _concerns(incident, finding.node):
        return False
    end(turn, incident, RungEnd.FAILED, finding.summary)
    return True


def _concerns(incident: Incident, node: str) -> bool:
    concerned = _concerned(incident)
    return not concerned or node in concerned


def _concerned(incident: Incident) -> tuple[str, ...]:
    """The nodes that the rung concerns."""
    named = incident.action.nodes if incident.action else ()
    return named or ((incident.node,) if incident.node else ())


def on_timer(turn: Turn, name: str, incident_id: str) -> None:
    """The limit of a rung is over: end it, unless every rank steps and only the report is missing."""
    incident, job = turn.incidents.get(incident_id), turn.jobs.get(name)
    if incident is None or job is None or incident.rung is None:
        return
    rung = incident.rung
    if incident.planned and job.phase is not JobPhase.RUNNING:
        return  # the change has begun
    if turn.breaker.open_until is not None:
        turn.set_timer(RungTimeout(name, incident_id), turn.breaker.open_until)
        return
    if isinstance(job.doing, Starting) and _steps(turn, job):
        return
    if any(other.action is None for other in turn.open_incidents(name)):
        return  # the answer about the other incident ends this walk
    if rung.action is ActionKind.WAIT:
        why = f"it waited {rung.within_s:g} s: {job.reason}"
    else:
        state = f"the job was {job.phase}: {job.reason}"
        why = f"not every rank had finished a step {rung.within_s:g} s after the decision; {state}"
    end(turn, incident, RungEnd.LATE, why)


def _steps(turn: Turn, job: Job) -> bool:
    """Whether others have reported a step that needed every rank."""
    assert job.generation is not None
    return FirstStepsDue(job.name, job.number) in turn.timers or (
        job.progress.seen_step > job.generation.restore.step + 1
    )
