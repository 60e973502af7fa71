"""Loans: a job of higher priority that lacks nodes asks jobs of lower priority for replicas.

    lacks nodes for `loan_settles_s` ──► which replicas of which job would help? ──► the lender's policy, one incident each
                                                                 │ refused: not asked again for `loan_gap_s`
       nodes are kept for it ◄── planned change of the lender ◄──┘ agreed: the lender saves, no step is repeated

The lender grows again as after any loss of nodes: when there are free nodes that it may take. A replica is not returned
explicitly, and the loan is recorded only for people.

Several rules prevent cycles. Only a job of strictly lower priority lends. A job is asked, and changed for a loan, at most once
per `loan_gap_s`. A job is asked only if its replicas would help, which is planned with the very nodes that it would give. Nodes
that were lent and not taken within `kept_s` are free again, and the borrower asks no job for `loan_unused_s`. While the breaker
is open, no job is asked, and no change for a loan begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.domain.incidents import LOAN, Action, Incident, IncidentState, LoanRequest
from holdfast.supervisor.core.fleet import breaker
from holdfast.supervisor.core.fleet.spares import as_spare
from holdfast.supervisor.core.incidents.opening import planned_incident
from holdfast.supervisor.core.incidents.views import reachable
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job, Lent
from holdfast.supervisor.core.model.lifecycle import Pending, Running, Suspended, Waiting
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.planner import Plan, Spare
from holdfast.supervisor.core.rules.wording import listed
from holdfast.supervisor.timers import KeptOver, LoanDue

# ---------------------------------------------------------------- borrowers and lenders


def review(turn: Turn, job: Job) -> None:
    """Ask for replicas if `job` lacks nodes and that would help. Repeated after `loan_look_s` while it lacks nodes."""
    if not turn.count(By.RANKED) or LoanDue(job.name) in turn.timers:
        return
    since = _lacks_since(turn, job)
    if since is None or not any(_is_below(other, job) for other in turn.jobs.values()):
        return
    settled_at = since + turn.config.loan_settles_s
    if turn.at < settled_at:
        turn.set_timer(LoanDue(job.name), settled_at)
        return
    turn.set_timer(LoanDue(job.name), turn.at + turn.config.loan_look_s)
    if turn.at < job.borrows_not_before or are_asked(turn, job):
        return
    chosen = _choose(turn, job)
    for offer in chosen:
        _ask(turn, job, offer)
    if chosen:
        names = listed([offer.lender.name for offer in chosen])
        turn.note(job.name, f"lacks nodes: {names} {'is' if len(chosen) == 1 else 'are'} asked for replicas")


def _lacks_since(turn: Turn, job: Job) -> float | None:
    """Since when more nodes would let it run, or run with more replicas; None if it does not lack nodes."""
    since = _could_take_since(turn, job)
    if since is None:
        return None
    least = {Pending: job.target_dp, Running: job.generation.mesh.dp + 1 if job.generation else 1}
    return since if _reaches(turn, job, []) < least.get(type(job.doing), 1) else None


def _could_take_since(turn: Turn, job: Job) -> float | None:
    """Since when it is in a state in which it takes free nodes; None if it is not."""
    match job.doing:
        case Pending():
            return job.submitted_at
        case Waiting(awaited=awaited) | Suspended(awaited=awaited) if not awaited.for_time:
            return awaited.since
        case Running(planned=None) if job.generation is not None and job.generation.mesh.dp < job.target_dp:
            is_busy = bool(turn.open_incidents(job.name)) or turn.at < job.planned_not_before
            can_save = not job.progress.reports_no_steps and not job.membership.finished
            return job.membership.running_at if can_save and not is_busy else None
        case _:
            return None


def _is_below(other: Job, job: Job) -> bool:
    return other.spec.priority < job.spec.priority and not other.phase.finished


def are_asked(turn: Turn, job: Job) -> bool:
    """Whether other jobs are asked for replicas for it, or are about to give some up."""
    return turn.count(By.RANKED) > 0 and any(_asked_for(turn, job))


def _asked_for(turn: Turn, job: Job) -> Iterable[Incident]:
    """Incidents of other jobs with an open question, or a planned change, for a loan to `job`."""
    for other in turn.jobs.values():
        if _is_below(other, job):
            for incident in turn.open_incidents(other.name):
                given = incident.state not in (IncidentState.OPEN, IncidentState.DECIDED)
                if incident.loan is not None and incident.loan.job == job.name and not given:
                    yield incident


# ---------------------------------------------------------------- what would help


@dataclass(frozen=True, slots=True)
class _Offer:
    """A possible loan: the lender would continue with `dp` replicas, without `spares`."""

    lender: Job
    dp: int
    spares: tuple[Spare, ...]


def _choose(turn: Turn, job: Job) -> list[_Offer]:
    """The smallest loans that let `job` run as many replicas as any loans could: from the lowest priority first, and from the
    youngest job among equals. Empty if no loan would help."""
    offers = [steps for other in _lenders(turn, job) if (steps := _offers(turn, other, job))]
    goal = _reaches(turn, job, [steps[-1] for steps in offers])
    if goal <= _reaches(turn, job, []):
        return []
    chosen: list[_Offer] = []
    for steps in offers:
        for offer in steps:
            if _reaches(turn, job, [*chosen, offer]) >= goal:
                return _without_needless(turn, job, [*chosen, offer], goal)
        chosen.append(steps[-1])
    return chosen


def _without_needless(turn: Turn, job: Job, chosen: list[_Offer], goal: int) -> list[_Offer]:
    for offer in list(chosen):
        rest = [each for each in chosen if each is not offer]
        if _reaches(turn, job, rest) >= goal:
            chosen = rest
    return chosen


def _lenders(turn: Turn, job: Job) -> list[Job]:
    lower = [each for each in turn.jobs.values() if _is_below(each, job) and _may_be_asked(turn, each)]
    return sorted(lower, key=lambda each: (each.spec.priority, -each.submitted_at, each.name))


def _may_be_asked(turn: Turn, lender: Job) -> bool:
    """Whether the job is healthy, unchanged for `loan_gap_s`, and can save before it is changed."""
    generation, gap_s = lender.generation, turn.config.loan_gap_s
    if generation is None or not isinstance(lender.doing, Running) or lender.doing.planned is not None:
        return False
    rested = turn.at >= max(lender.planned_not_before, lender.lends_not_before)
    if lender.changed_at:
        rested = rested and turn.at >= lender.changed_at + gap_s
    can_save = not lender.progress.reports_no_steps and not lender.membership.finished
    return rested and can_save and generation.mesh.dp > lender.spec.min_dp and not turn.open_incidents(lender.name)


def _offers(turn: Turn, lender: Job, job: Job) -> list[_Offer]:
    """The loans that `lender` could give `job`, fewest replicas first."""
    assert lender.generation is not None
    offers: list[_Offer] = []
    for dp in range(lender.generation.mesh.dp - 1, lender.spec.min_dp - 1, -1):
        outcome = reachable(turn, lender, dp, dp)
        if not isinstance(outcome, Plan):
            continue
        given = sorted(set(lender.generation.nodes) - set(outcome.nodes))
        able = tuple(spare for node in given if (spare := as_spare(turn, job, turn.nodes[node])) is not None)
        if len(able) > (len(offers[-1].spares) if offers else 0):
            offers.append(_Offer(lender, outcome.mesh.dp, able))
    return offers


def _reaches(turn: Turn, job: Job, offers: Iterable[_Offer]) -> int:
    """Replicas that `job` could run with the free nodes and these; 0 = too few."""
    return _reaches_with(turn, job, tuple(spare for offer in offers for spare in offer.spares))


def _reaches_with(turn: Turn, job: Job, more: tuple[Spare, ...]) -> int:
    outcome = reachable(turn, job, job.target_dp, job.spec.min_dp, more=more)
    return outcome.mesh.dp if isinstance(outcome, Plan) else 0


# ---------------------------------------------------------------- one loan


def _ask(turn: Turn, job: Job, offer: _Offer) -> None:
    lender = offer.lender
    assert lender.generation is not None
    given = tuple(spare.node for spare in offer.spares)
    cause = (
        f"{job.name}, of priority {job.spec.priority}, lacks nodes: {lender.name}, of priority {lender.spec.priority}, "
        f"could continue with {offer.dp} of {lender.generation.mesh.dp} replicas and give it {listed(given)}"
    )
    request = LoanRequest(job.name, job.spec.priority, offer.dp, given)
    incident = planned_incident(turn, lender, LOAN, cause, loan=request)
    turn.put_job(lender.name, lends_not_before=turn.at + turn.config.loan_gap_s)
    turn.ask(turn.put_incident(incident))


def wanted(turn: Turn, lender: Job) -> str:
    """The cause of the loan that the lender is asked for, while it is needed; empty otherwise."""
    asked = (incident for incident in turn.open_incidents(lender.name) if incident.loan is not None)
    return next((incident.cause for incident in asked if not not_wanted(turn, incident)), "")


def not_wanted(turn: Turn, incident: Incident) -> str:
    """Why the requested replicas would no longer help; empty if they would."""
    assert incident.loan is not None
    job, lender = turn.jobs.get(incident.loan.job), turn.jobs[incident.job]
    if breaker.is_open(turn):
        return f"the circuit breaker is open ({turn.breaker.reason})"
    if job is None or job.phase.finished or not _is_below(lender, job):
        return f"{incident.loan.job} does not run any more"
    if _could_take_since(turn, job) is None:
        return f"{job.name} does not wait for nodes any more"
    given = {node: turn.nodes[node] for each in _asked_for(turn, job) if each.loan for node in each.loan.nodes}
    spares = {name: spare for name, node in given.items() if (spare := as_spare(turn, job, node)) is not None}
    every = _reaches_with(turn, job, tuple(spares[name] for name in sorted(spares)))
    return "" if every > _reaches(turn, job, []) else f"it would not help {job.name} any more"


def refused(turn: Turn, incident: Incident, action: Action) -> None:
    """The lender's policy refused the loan."""
    again_at = turn.at + max(turn.config.loan_gap_s, action.retry_s)
    turn.put_job(incident.job, lends_not_before=again_at)
    turn.close_incident(incident.id, IncidentState.RESOLVED, f"no replica is given: {action.reason}")


def given(turn: Turn, incident: Incident, before: Iterable[str]) -> None:
    """The lender's change has begun: keep the nodes that it leaves for the borrower. `before`: its nodes before the change."""
    assert incident.loan is not None
    lender, loan = turn.jobs[incident.job], incident.loan
    if lender.generation is None or not (left := set(before) - set(lender.generation.nodes)):
        return
    turn.put_job(lender.name, lent=Lent(loan.job, turn.at, lender.generation.mesh.dp))
    _keep(turn, loan.job, left)


def take_back(turn: Turn, name: str) -> None:
    """The lender had agreed, but its replicas were not needed: it may be asked again soon."""
    turn.put_job(name, lends_not_before=turn.at + turn.config.planned_pause_s)


# ---------------------------------------------------------------- nodes that are kept


def _keep(turn: Turn, name: str, nodes: Iterable[str]) -> None:
    """Keep these free nodes for this job for `kept_s`: jobs of the same or a lower priority may not take them."""
    job, until = turn.jobs[name], turn.at + turn.config.kept_s
    kept = {node: due for node, due in job.kept.items() if due > turn.at} | dict.fromkeys(sorted(nodes), until)
    if kept != job.kept:
        turn.put_job(name, kept=kept)
        turn.set_timer(KeptOver(name), min(kept.values()))


def keep_for_growth(turn: Turn, job: Job) -> None:
    """The job grows at its next checkpoint: keep the nodes of its plan, so that no job of lower priority takes them first."""
    if not turn.count(By.RANKED):
        return
    outcome = reachable(turn, job, job.target_dp, job.spec.min_dp)
    if isinstance(outcome, Plan) and job.generation is not None:
        _keep(turn, job.name, set(outcome.nodes) - set(job.generation.nodes))


def release(turn: Turn, name: str) -> None:
    """The job does not take its kept nodes now."""
    if turn.jobs[name].kept:
        turn.put_job(name, kept={})


def on_kept_timer(turn: Turn, name: str) -> None:
    """Release nodes that were kept long enough, unless a change that takes them is under way."""
    job = turn.jobs.get(name)
    if job is None or job.phase.finished or not job.kept:
        return
    if job.planned is not None or job.change is not None or any(each.planned for each in turn.open_incidents(name)):
        until = turn.at + turn.config.kept_s
        turn.put_job(name, kept={node: max(due, until) for node, due in job.kept.items()})
        turn.set_timer(KeptOver(name), until)
        return
    left = {node: due for node, due in job.kept.items() if due > turn.at}
    unused = sorted(node for node in job.kept if node not in left and node in turn.group(By.FREE))
    turn.put_job(name, kept=left)
    if left:
        turn.set_timer(KeptOver(name), min(left.values()))
    if unused:
        turn.put_job(name, borrows_not_before=turn.at + turn.config.loan_unused_s)
        turn.note(name, f"did not take {listed(unused)} in {turn.config.kept_s:g} s: free for every job again")


def settle(turn: Turn, job: Job) -> None:
    """Clear the loan if all replicas of the job run again."""
    if job.lent is not None and job.generation is not None and job.generation.mesh.dp >= job.target_dp:
        turn.note(job.name, f"runs {job.generation.mesh.dp} replicas again, after a loan to {job.lent.to}")
        turn.put_job(job.name, lent=None)
