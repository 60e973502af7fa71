"""Jobs that wait for GPUs of their nodes to be reset.

    change.begin ──Stop to all──► RESETTING ──every reset done──► PREPARING on the same nodes
                                      └──a reset failed, is late, its node is lost──► the next rung, or the policy is asked

resets.py handles the nodes; this module handles the job. `job_needs` calls it after every event that concerns one of the job's
nodes, so nothing has to be remembered between a reset and its consequence.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.incidents import ActionKind, Incident, IncidentState, RungEnd
from holdfast.domain.orders import OrderDone
from holdfast.supervisor.core.changes import change
from holdfast.supervisor.core.fleet import breaker, nodes, resets
from holdfast.supervisor.core.handling import decisions
from holdfast.supervisor.core.incidents import recipes
from holdfast.supervisor.core.incidents.views import plan_for
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Cause, Replanning, Resetting
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.planner import Unplannable
from holdfast.supervisor.timers import ResetTimeout

FAILURE = "gpu_reset"  # key in an incident's evidence: why the decided reset failed


def on_answer(turn: Turn, node: str, done: OrderDone) -> None:
    """Record the duration of the reset in the job, for the incident's record."""
    job = nodes.job_of(turn, node)
    if job is not None and isinstance(job.doing, Resetting):
        seconds = dict(job.doing.phases_s)
        for name, taken in done.phases_s:
            seconds[name] = max(taken, seconds.get(name, 0.0))
        turn.update(job.name, phases_s=seconds)


def go_on(turn: Turn, job: Job) -> None:
    """Plan the job's next generation when its resets are done; ask the policy again if one of them is impossible."""
    doing = job.doing
    assert isinstance(doing, Resetting)
    assert job.generation is not None
    if late := set(turn.members(job.generation, By.RESET_DUE)) - set(doing.nodes):  # demanded after the decision
        doing = evolve(doing, nodes=tuple(sorted({*doing.nodes, *late})))
        turn.put_job(job.name, doing=doing)
    if obstacles := [f"{node}: {why}" for node in doing.nodes if (why := _obstacle(turn, node))]:
        _give_up(turn, job, doing, "; ".join(obstacles))
        return
    if any(turn.nodes[node].reset_due is not None for node in doing.nodes):
        return
    incident = turn.incidents.get(doing.incident)
    if incident is None or incident.action is None:  # closed, or undecided again
        _give_up(turn, job, doing, "it is not wanted any more")
        return
    outcome = plan_for(turn, job, incident.action, incident)
    if isinstance(outcome, Unplannable):
        _give_up(turn, job, doing, outcome.reason)
    else:
        change.carry_out(turn, job, outcome, incident.action.reason)


def _obstacle(turn: Turn, name: str) -> str:
    node = turn.nodes.get(name)
    if node is None:
        return "the node is not known any more"
    return resets.obstacle(node) if node.reset_due is not None else ""


def on_timer(turn: Turn, name: str, number: int) -> None:
    """The time limit of the resets is over."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or not isinstance(job.doing, Resetting):
        return
    if breaker.is_open(turn):  # no reset is ordered, and no change begins, whatever the nodes could do
        turn.set_timer(ResetTimeout(name, number), turn.at + turn.config.reset_s)
        return
    late = [node for node in job.doing.nodes if node in turn.nodes and turn.nodes[node].reset_due is not None]
    if not late:
        return  # done: `go_on` plans the next generation
    for node in late:
        # Without a session, its agent may do the reset later; the node gets no ranks until then.
        if turn.nodes[node].connected and not resets.obstacle(turn.nodes[node]):
            resets.withdraw(turn, node)
            resets.fail(turn, node, f"it was not done within {turn.config.reset_s:g} s")
    obstacles = (f"{node}: {_obstacle(turn, node) or f'not done within {turn.config.reset_s:g} s'}" for node in late)
    _give_up(turn, turn.jobs[name], job.doing, "; ".join(obstacles))


def _give_up(turn: Turn, job: Job, doing: Resetting, why: str) -> None:
    """Take the next rung of the recipe. Without one, ask again about every incident that the reset should resolve."""
    change.withdraw(turn, job)
    turn.move(job.name, Cause.GIVE_UP, Replanning(), f"gpu_reset did not come about: {why}")
    decided = turn.incidents.get(doing.incident)
    if decided is not None and decided.rung is not None and _rests_on(decided):
        decided = turn.put_incident(evolve(decided, evidence={**decided.evidence, FAILURE: why}))
        recipes.end(turn, decided, RungEnd.FAILED, why)
        decisions.walk_on(turn)
        return
    resting = [incident for incident in turn.open_incidents(job.name) if _rests_on(incident)]
    resting.sort(key=lambda incident: incident.id != doing.incident)  # the first answer covers the others
    asked = [_undecided(turn, incident, why) for incident in resting]
    for incident in asked:
        decisions.ask_policy(turn, incident)


def _undecided(turn: Turn, incident: Incident, why: str) -> Incident:
    evidence = {**incident.evidence, FAILURE: why}
    return turn.put_incident(
        evolve(incident, state=IncidentState.OPEN, action=None, decided_at=None, evidence=evidence, decided_by="")
    )


def _rests_on(incident: Incident) -> bool:
    return incident.action is not None and incident.action.kind is ActionKind.GPU_RESET and not incident.planned
