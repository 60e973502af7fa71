"""Warnings are questions to the policy of a running job: a slow rank or slow communication, whose cost its detector measures,
a GPU that should be reset at the job's next checkpoint, and other lasting or recurring conditions (a port, a disk, a gradient).

    warning ──► stands ──► the policy, one warning of a job at a time ──► planned change │ continue ──► stands, answered
                  │ withdrawn, not repeated for `warning_holds_s`, or its node has left: dropped          │
                  └◄── asked again: after `retry_s`, when a spare becomes free, or when it costs much more ◄┘

The cost of a port, a disk or a counter is measured by the job's step times before and after, if they show one (step_times.py).

The run is healthy, so nothing is urgent. A condition must last for the job's `warnings.settles_s`, as shown by a second report
that much later: a single report is only recorded, and a port that fails now and then leads to a question. A script that has
stopped stepping is a question at once: its detector has waited for minutes. A condition whose
cost is measured may lead to a swap, so only reports of one occurrence count for it; these have one id. A GPU that waits for a
reset does so until it is reset, whether the finding is repeated or not. The policy is asked once about a warning while it
lasts, however often it is reported, and a job is changed for warnings at most once per `warnings.gap_s`. Kinds of findings
that end a run are never asked about as warnings: a policy might decide by the kind alone, and stop a healthy run. `job_needs`
asks.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.incidents import Action, Incident, IncidentState
from holdfast.policy.actions import RUN_ENDING
from holdfast.supervisor.core.fleet import nodes, resets
from holdfast.supervisor.core.fleet.spares import spares_for
from holdfast.supervisor.core.model.job import Job, StandingWarning
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules import step_times
from holdfast.supervisor.protocol import JobPhase
from holdfast.supervisor.timers import WarningDue

WARNINGS_MAX = 16  # of one job; the one reported longest ago is dropped
# Kinds whose cost their detectors do not know, and which slow a job down by their effect on one node.
COSTED_BY_STEPS = (FindingKind.DEGRADATION, FindingKind.NETWORK_FAULT, FindingKind.STORAGE_FAULT)
# Kinds whose detectors report them only after minutes: a second report would ask no other question, and the job may be dead.
HAVE_WAITED = (FindingKind.NO_PROGRESS,)
COST_KEY = "cost_share_by_steps"  # key of the evidence: what the step times show
MUCH_MORE = 1.5  # the policy is asked again if a warning costs this many times what it did at the decision


def on_finding(turn: Turn, finding: Finding) -> None:
    """Store a warning about a running job; `job_needs` asks the policy after this event."""
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
    key, holding = _condition(finding), _current(turn, job)
    known = holding.get(key)  # a dropped warning begins anew: its condition was over in between
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
    withheld = finding.kind is FindingKind.PREFLIGHT  # spares.py and returns.py ensure that
    return f"{why}; it gets none until it passes its tests" if withheld else why


def on_withdrawn(turn: Turn, finding: Finding) -> list[str]:
    """`finding` reports the end of the condition that it contradicts. Returns the jobs that were to be changed because of
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
    """The decided change could not be made: it is not tried again for `gap_s`."""
    _remember(turn, incident, ask_at=turn.at + turn.jobs[incident.job].spec.warnings.gap_s, had_spare=True)


def wanted(turn: Turn, job: Job) -> Finding | None:
    """The warning that the policy should be asked about now, the most expensive first. Sets the timer for the next one."""
    if not job.warnings:
        return None
    assert job.generation is not None
    free_at = job.changed_at + job.spec.warnings.gap_s if job.changed_at else 0.0
    due: list[Finding] = []
    later: list[float] = []
    for each in _current(turn, job).values():
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
    """The policy decided to leave the run as it is."""
    again_at = turn.at + action.retry_s if action.retry_s > 0 else 0.0
    _remember(turn, incident, ask_at=again_at, had_spare=bool(spares_for(turn, turn.jobs[incident.job])))
    turn.close_incident(incident.id, IncidentState.RESOLVED, action.reason)


def _remember(turn: Turn, incident: Incident, *, ask_at: float, had_spare: bool) -> None:
    """Mark the warning of `incident` as answered."""
    about = {"answered": True, "ask_at": ask_at, "cost_share": incident.cost_share, "had_spare": had_spare}
    warnings = {
        key: evolve(each, **about) if each.finding.id in incident.findings else each
        for key, each in turn.jobs[incident.job].warnings.items()
    }
    turn.put_job(incident.job, warnings=warnings)


def _condition(finding: Finding) -> str:
    """A key that is the same for every report of one condition, whatever its generation and step. A spike of the loss does not
    replace a doubt about the state."""
    place = finding.gpu if finding.gpu is not None else finding.rank
    return f"{finding.kind}:{finding.node}:{place}{'' if finding.verified_step is None else ':doubt'}"


def _current(turn: Turn, job: Job) -> dict[str, StandingWarning]:
    """Warnings that still apply: reported recently, about the job or about a node that still has ranks of it."""
    return {
        key: each
        for key, each in job.warnings.items()
        if _holds(turn, job, each) and _has_ranks(job, each.finding.node)
    }


def _holds(turn: Turn, job: Job, standing: StandingWarning) -> bool:
    """Whether it applies. A GPU waits for its reset in any generation; the slowness of a rank is known of one generation."""
    finding = standing.finding
    if resets.is_wanted_by(finding):
        return finding.node in turn.nodes and not resets.is_history(turn.nodes[finding.node], finding)
    return finding.generation in (0, job.number) and turn.at - standing.heard_at < turn.config.warning_holds_s


def _is_costed_by_steps(finding: Finding) -> bool:
    is_unknown = finding.kind in COSTED_BY_STEPS and finding.cost_share is None
    return is_unknown and bool(finding.node) and not resets.is_wanted_by(finding)


def _costed(job: Job, standing: StandingWarning, others: list[StandingWarning]) -> Finding:
    """The finding with the cost of its condition, as far as the job's step times show it."""
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
    """Other nodes with a warning that began at the same time, so that it is unknown which one slows the job down."""
    began_at, reported_at = _onset(standing)
    early, late = began_at - step_times.LAG_S - step_times.BUCKET_S, reported_at + step_times.BUCKET_S
    nodes = {
        each.finding.node for each in others if early <= each.first_at and _onset(each)[0] - step_times.LAG_S <= late
    }
    return sorted(nodes - {"", standing.finding.node})


def _has_ranks(job: Job, node: str) -> bool:
    """Whether a condition of `node` concerns this job; "" = the job as a whole."""
    return not node or (job.generation is not None and job.generation.slot_of(node) is not None)


def _settles(job: Job, standing: StandingWarning) -> bool:
    """Whether the condition may still pass by itself. It is reported again while it lasts."""
    if resets.is_wanted_by(standing.finding) or standing.finding.kind in HAVE_WAITED:
        return False
    return standing.heard_at - standing.first_at < job.spec.warnings.settles_s


def _asks_again(turn: Turn, job: Job, standing: StandingWarning) -> bool:
    if 0.0 < standing.ask_at <= turn.at:
        return True
    cost, before = standing.finding.cost_share, standing.cost_share or 0.0
    grown = cost is not None and cost >= MUCH_MORE * before
    may_be_worth_a_swap = cost is not None or resets.is_wanted_by(standing.finding)
    return grown or (may_be_worth_a_swap and not standing.had_spare and bool(spares_for(turn, job)))
