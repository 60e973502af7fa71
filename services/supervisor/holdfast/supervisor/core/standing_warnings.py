"""Warnings are questions to the policy of a running job: a slow rank or slow communication, whose cost its detector measures,
a GPU that should be reset at the job's next boundary, and whatever else lasts or comes back (a port, a disk, a gradient).

    warning ──► stands ──► the policy, one warning of a job at a time ──► planned change │ continue ──► stands, answered
                  │ withdrawn, not repeated for `warning_holds_s`, or its node has left: forgotten        │
                  └◄── asked again: after `retry_s`, when a spare becomes free, or when it costs much more ◄┘

What a port, a disk or a counter costs is measured by the job's step times before and since (step_times.py), where they tell it.

The run is healthy, so nothing is urgent. A condition must last for the job's `warnings.settles_s`, as a second report so much
later shows: what comes once is recorded, and a port that fails now and then is a question. One whose cost is measured may lead
to a swap, so there only reports of one occurrence count, which have one id. A GPU that waits for a reset does so until it is
reset, whether that is said again or not. A warning is asked about once while it lasts, however often it is reported, and a job
is changed for warnings at most once per `warnings.gap_s`. Kinds of findings that end a run are never asked about as warnings: a
policy might answer by the kind alone, and stop what is healthy. `upkeep` asks.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.incidents import Action, Incident, IncidentState
from holdfast.policy.actions import RUN_ENDING
from holdfast.supervisor.core import nodes, resets, step_times
from holdfast.supervisor.core.job import Job, StandingWarning
from holdfast.supervisor.core.spares import spares_for
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import JobPhase
from holdfast.supervisor.timers import WarningDue

WARNINGS_MAX = 16  # of one job; the one that was heard longest ago is forgotten
# Kinds whose cost their detectors do not know, and which slow a job down by what they do to one node.
COSTED_BY_STEPS = (FindingKind.DEGRADATION, FindingKind.NETWORK_FAULT, FindingKind.STORAGE_FAULT)
COST_KEY = "cost_share_by_steps"  # of the evidence: what the step times say
MUCH_MORE = 1.5  # a warning that costs this many times what was decided about is asked about again


def on_finding(turn: Turn, finding: Finding) -> None:
    """Remember a warning about a job that runs; `upkeep` asks the policy after this event."""
    job = turn.jobs.get(finding.job) if finding.job else nodes.job_of(turn, finding.node)
    if (
        finding.kind in RUN_ENDING
        or job is None
        or job.phase is not JobPhase.RUNNING
        or not _has_ranks(job, finding.node)
    ):
        turn.judge(finding, f"recorded: {_why_not_asked(finding, job)}")
        return
    if resets.is_wanted_by(finding):
        if resets.is_history(turn.nodes[finding.node], finding):
            turn.judge(finding, "ignored: the GPUs of the node were reset or repaired since")
            return
    elif finding.generation not in (0, job.number):
        turn.judge(finding, f"recorded: generation {finding.generation} of {job.name} is history")
        return
    key, holding = _condition(finding), _still(turn, job)
    known = holding.get(key)  # one that is forgotten begins anew: it was over, and has not lasted since
    if known is None:
        standing = StandingWarning(finding, turn.at, turn.at, since=finding.since)
    elif known.finding.id == finding.id or finding.cost_share is None:
        standing = evolve(known, finding=finding, heard_at=turn.at)
    else:
        standing = evolve(known, finding=finding, first_at=turn.at, heard_at=turn.at, since=finding.since)
    if _is_costed_by_steps(finding):
        others = [each for name, each in holding.items() if name != key]
        standing = evolve(standing, finding=_costed(job, standing, others))
    newest = sorted({**holding, key: standing}.items(), key=lambda item: (-item[1].heard_at, item[0]))
    turn.put_job(job.name, warnings=dict(sorted(newest[:WARNINGS_MAX])))
    if standing.answered and not _asks_again(turn, job, standing):
        turn.judge(finding, "recorded: the policy has been asked about it, and it still holds")
    elif _settles(job, standing):
        turn.judge(finding, "recorded: the policy is asked about it if it lasts")
    else:
        turn.judge(finding, "recorded: the policy is asked about it")
    turn.touch(job.name)


def _why_not_asked(finding: Finding, job: Job | None) -> str:
    if job is not None or not finding.node:
        return f"a finding of severity {finding.severity} calls for no action here"
    why = f"no job has ranks on {finding.node}, so no policy is asked"
    withheld = finding.kind is FindingKind.PREFLIGHT  # which spares.py and returns.py see to
    return f"{why}; it gets none until it passes its tests" if withheld else why


def on_withdrawn(turn: Turn, finding: Finding) -> list[str]:
    """A condition is over, as `finding` says of the one that it contradicts. Returns the jobs that were to be changed for
    it."""
    concerned = []
    for job in [job for job in turn.jobs.values() if job.warnings]:
        left = {key: each for key, each in job.warnings.items() if each.finding.id != finding.contradicts}
        if len(left) < len(job.warnings):
            turn.put_job(job.name, warnings=left)
            turn.touch(job.name)
            if job.planned is not None and finding.contradicts in turn.incidents[job.planned.incident].findings:
                concerned.append(job.name)
    return concerned


def put_off(turn: Turn, incident: Incident) -> None:
    """The change that was decided for it could not be made: not to be tried again at once."""
    _remember(turn, incident, ask_at=turn.at + turn.jobs[incident.job].spec.warnings.gap_s, had_spare=True)


def wanted(turn: Turn, job: Job) -> Finding | None:
    """The warning that the policy should be asked about now, the most expensive first. Sets the timer for the next one."""
    if not job.warnings:
        return None
    assert job.generation is not None
    free_at = job.changed_at + job.spec.warnings.gap_s if job.changed_at else 0.0
    due: list[Finding] = []
    later: list[float] = []
    for each in _still(turn, job).values():
        if each.answered and not _asks_again(turn, job, each):
            later += [each.ask_at] if each.ask_at > turn.at else []
        elif _settles(job, each):
            continue  # until it is reported again
        elif free_at > turn.at:
            later.append(free_at)
        else:
            due.append(each.finding)
    if due:
        return max(due, key=lambda finding: (finding.cost_share or 0.0, -finding.since, finding.id))
    if later and turn.timers.get(WarningDue(job.name)) != min(later):
        turn.set_timer(WarningDue(job.name), min(later))
    return None


def answered(turn: Turn, incident: Incident, action: Action) -> None:
    """The policy leaves the run as it is."""
    again_at = turn.at + action.retry_s if action.retry_s > 0 else 0.0
    _remember(turn, incident, ask_at=again_at, had_spare=bool(spares_for(turn, turn.jobs[incident.job])))
    turn.close_incident(incident.id, IncidentState.RESOLVED, action.reason)


def _remember(turn: Turn, incident: Incident, *, ask_at: float, had_spare: bool) -> None:
    """The warning of `incident` has its answer, for now."""
    about = {"answered": True, "ask_at": ask_at, "cost_share": incident.cost_share, "had_spare": had_spare}
    warnings = {
        key: evolve(each, **about) if each.finding.id in incident.findings else each
        for key, each in turn.jobs[incident.job].warnings.items()
    }
    turn.put_job(incident.job, warnings=warnings)


def _condition(finding: Finding) -> str:
    """The same for every report of one condition, whatever generation and step it is of."""
    return f"{finding.kind}:{finding.node}:{finding.gpu if finding.gpu is not None else finding.rank}"


def _still(turn: Turn, job: Job) -> dict[str, StandingWarning]:
    """Those that hold: said again lately, about the job or a node that still has ranks of it."""
    return {
        key: each
        for key, each in job.warnings.items()
        if _holds(turn, job, each) and _has_ranks(job, each.finding.node)
    }


def _holds(turn: Turn, job: Job, standing: StandingWarning) -> bool:
    """A GPU waits for its reset whichever generation uses it; how slow a rank is, is known of one generation."""
    finding = standing.finding
    if resets.is_wanted_by(finding):
        return finding.node in turn.nodes and not resets.is_history(turn.nodes[finding.node], finding)
    return finding.generation in (0, job.number) and turn.at - standing.heard_at < turn.config.warning_holds_s


def _is_costed_by_steps(finding: Finding) -> bool:
    is_unknown = finding.kind in COSTED_BY_STEPS and finding.cost_share is None
    return is_unknown and bool(finding.node) and not resets.is_wanted_by(finding)


def _costed(job: Job, standing: StandingWarning, others: list[StandingWarning]) -> Finding:
    """The finding with what the condition costs, as far as the job's step times tell it."""
    finding = standing.finding
    measured = step_times.cost(job.step_times, *_onset(standing))
    if measured.share is not None and (rivals := _rivals(standing, others)):
        measured = step_times.Cost(
            None, f"{measured.why}, but so does what was found of {', '.join(rivals)} at that time"
        )
    return evolve(
        finding,
        cost_share=measured.share,
        confidence=finding.confidence if measured.share is None else min(finding.confidence, step_times.SURE_MAX),
        evidence={**finding.evidence, COST_KEY: measured.why},
    )


def _onset(standing: StandingWarning) -> tuple[float, float]:
    """When the condition began, and when it was first reported."""
    return standing.since or standing.first_at, standing.first_at


def _rivals(standing: StandingWarning, others: list[StandingWarning]) -> list[str]:
    """Other nodes with a warning that began at the same time: which one slows the job down, nobody knows."""
    began_at, reported_at = _onset(standing)
    early, late = began_at - step_times.LAG_S - step_times.BUCKET_S, reported_at + step_times.BUCKET_S
    nodes = {
        each.finding.node for each in others if early <= each.first_at and _onset(each)[0] - step_times.LAG_S <= late
    }
    return sorted(nodes - {"", standing.finding.node})


def _has_ranks(job: Job, node: str) -> bool:
    """Whether a condition of `node` is one of this job; "" = of the job as a whole."""
    return not node or (job.generation is not None and job.generation.slot_of(node) is not None)


def _settles(job: Job, standing: StandingWarning) -> bool:
    """Whether it may still pass by itself: it is reported again while it lasts."""
    if resets.is_wanted_by(standing.finding):
        return False
    return standing.heard_at - standing.first_at < job.spec.warnings.settles_s


def _asks_again(turn: Turn, job: Job, standing: StandingWarning) -> bool:
    if 0.0 < standing.ask_at <= turn.at:
        return True
    cost, before = standing.finding.cost_share, standing.cost_share or 0.0
    grown = cost is not None and cost >= MUCH_MORE * before
    may_be_worth_a_swap = cost is not None or resets.is_wanted_by(standing.finding)
    return grown or (may_be_worth_a_swap and not standing.had_spare and bool(spares_for(turn, job)))
