"""A job from submission to its end, apart from its generation changes."""

from __future__ import annotations

import math

from holdfast.domain.errors import HoldfastError
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import StoredStep
from holdfast.domain.incidents import IncidentState
from holdfast.domain.orders import RanksFinished
from holdfast.supervisor import timers
from holdfast.supervisor.core import progress
from holdfast.supervisor.core.changes import change, final_upload, handover, planned, suspension
from holdfast.supervisor.core.fleet import nodes
from holdfast.supervisor.core.model import lifecycle
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Checkpoints, Job, JobProgress, Numbering
from holdfast.supervisor.core.model.lifecycle import (
    Cause,
    Completed,
    Failed,
    Pending,
    Running,
    Saving,
    Stopped,
    Stopping,
)
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import quarantine
from holdfast.supervisor.core.rules.election import Line, Segment
from holdfast.supervisor.core.rules.step_times import recorded
from holdfast.supervisor.core.saves import earlier, ordered_saves, pacing, reports, saved
from holdfast.supervisor.protocol import (
    Answer,
    CheckpointRequested,
    GenerationChanged,
    GenerationStage,
    JobAccepted,
    JobPhase,
    JobStopRequested,
    JobSubmitted,
    ResizeRequested,
    StartFrom,
    StepsCompleted,
)

# Timers that a finished job no longer needs.
_WHILE_UNFINISHED = (
    timers.DegradedStart,
    timers.PlannedChangeDue,
    timers.WarningDue,
    timers.LoanDue,
    timers.KeptOver,
    timers.SaveTimeout,
    timers.StopTimeout,
    timers.RetryDue,
    timers.DeferralOver,
    timers.CheckpointReportDue,
    timers.RetentionDue,
    timers.RanksDue,
    timers.StepDue,
)


def submit(turn: Turn, event: JobSubmitted) -> None:
    name = event.spec.name
    old = turn.jobs.get(name)
    if old is not None and not old.phase.finished:
        turn.note(name, f"submission refused: a job of this name is {old.phase}")
        return
    try:
        resumed = earlier.choose(turn, event) if event.start is StartFrom.CHECKPOINT else event.resumed
    except HoldfastError as error:
        turn.note(name, f"submission refused: {error}")
        return
    # The attempt number identifies a lineage of checkpoints. It starts from the time. Files of an earlier run of this name can
    # therefore never be taken for this run's, even if all other state was lost. Generation numbers continue, because agents
    # refuse numbers that they have seen.
    number = old.number if old else 0
    held = earlier.newest_attempt(turn.nodes.values(), name)
    last_attempt = max(old.numbering.attempt_base + number if old else 0, resumed.attempt if resumed else 0, held)
    base = max(int(turn.at), last_attempt) - number
    job = Job(
        spec=event.spec,
        token=old.token if old else event.token,  # it gives access to the shards that nodes hold under this name
        submitted_at=turn.at,
        reason="submitted",
        target_dp=event.spec.mesh.dp,
        numbering=Numbering(base, base + number + 1),
        doing=Pending(),
        generation=evolve(old.generation, placements=()) if old and old.generation else None,
        checkpoints=Checkpoints((Segment(resumed.attempt, resumed.step),) if resumed else (), resumed=resumed),
        launcher=event.launcher,
        owner=event.owner,
    )
    if event.start is StartFrom.CHECKPOINT and resumed is not None:
        job = _continued(job, old, resumed, event)
    if old is not None:
        lifecycle.check(name, old.doing, Cause.SUBMIT, job.doing)
    turn.publish(JobAccepted(turn.at, name, event.spec))
    turn.add_job(job)
    if turn.count(By.RANKED):
        turn.touch_all()  # the job of highest priority, and the possible lenders, may have changed
    if not change.first_start(turn, name, degraded=False):
        turn.set_timer(timers.DegradedStart(name), turn.at + turn.config.degraded_start_s)


def _continued(job: Job, old: Job | None, resumed: StoredStep, event: JobSubmitted) -> Job:
    """`job`, at the saved step `resumed`. The lineage of that step becomes its own."""
    line = earlier.lineage(old, resumed)
    return evolve(
        job,
        reason=f"submitted to continue from step {resumed.step}",
        progress=JobProgress(step=resumed.step, best_step=resumed.step),
        checkpoints=evolve(
            job.checkpoints,
            lineage=line,
            stored=earlier.stored(old, event, Line(line)),
            sharded=resumed.sharded or (old.checkpoints.sharded if old is not None else None),
            ever_saved=True,
        ),
    )


def on_steps(turn: Turn, event: StepsCompleted) -> None:
    job = turn.jobs.get(event.job)
    if job is None:
        return
    if job.phase.finished:
        _last_steps(turn, job, event)
        return
    changes: dict[str, object] = {}
    if event.step > job.progress.best_step:
        changes |= {"best_step": event.step, "restarts_without_progress": 0}
    if job.running is not None and event.generation == job.running.number and event.step > job.progress.step:
        changes |= {"step": event.step} | _loss(event)
        if event.step_s > 0:
            changes |= {"step_s": event.step_s, "pace_s": max(event.step_s, event.pace_s)}
    if changes:
        job = turn.put_progress(job.name, **changes)
    if job.running is not None and event.generation == job.running.number:
        if event.step_s > 0:
            step_times = recorded(job.step_times, job.running.number, turn.at, event.step_s)
            job = turn.put_job(job.name, step_times=step_times) if step_times is not job.step_times else job
        saved.judge_loss(turn, job, event.step, event.loss)
        job = progress.reached(turn, job.name, event.step)
        pacing.measure(turn, job.name, event)
    _newest_before_fault(turn, event)
    _resolve_contradicted(turn, job, event)
    if isinstance(job.doing, Saving) and job.checkpoints.step >= job.doing.at_step:
        stop_now(turn, job.name, job.doing.reason, suspends=job.doing.suspends)


def _last_steps(turn: Turn, job: Job, event: StepsCompleted) -> None:
    """Record steps of a finished job. They arrive just after its workers have ended, and remain in its record."""
    if job.running is not None and event.generation == job.running.number and event.step > job.progress.step:
        turn.put_progress(job.name, step=event.step, best_step=max(job.progress.best_step, event.step), **_loss(event))


def _loss(event: StepsCompleted) -> dict[str, object]:
    return {} if event.loss is None else {"loss": event.loss}


def _newest_before_fault(turn: Turn, event: StepsCompleted) -> None:
    """Update `last_step` of open incidents: steps are reported a little after the fault that followed them."""
    for incident in turn.open_incidents(event.job):
        if incident.generation == event.generation and event.step > (incident.last_step or 0) and not incident.planned:
            turn.put_incident(evolve(incident, last_step=event.step))


def _resolve_contradicted(turn: Turn, job: Job, event: StepsCompleted) -> None:
    """Resolve doubtful incidents: a step that every rank finished after a reported loss or hang disproves the report."""
    if job.running is None or event.generation != job.running.number:
        return
    finished_after = turn.at - event.age_s - turn.config.step_late_s  # by this clock, the step ended after this time
    for name in turn.members(job.running, By.SUSPECTED):
        suspicion = turn.nodes[name].suspicion
        if suspicion is not None and finished_after > suspicion.at:
            turn.put_node(name, suspicion=None)
            turn.cancel_timer(timers.WitnessTimeout(name))
    for incident in turn.open_incidents(job.name):
        doubtful = incident.kind in (FindingKind.NODE_LOST, FindingKind.HANG) and incident.action is None
        doubtful = doubtful and len(incident.findings) == 1  # if there were more findings since, the policy decides
        if doubtful and incident.generation == event.generation and finished_after > incident.detected_at:
            if incident.node in turn.nodes and incident.kind == FindingKind.NODE_LOST:
                turn.put_node(incident.node, lost=False)
                nodes.refresh(turn, incident.node, "its ranks are stepping")
            quarantine.forget(turn, incident)
            turn.close_incident(
                incident.id, IncidentState.RESOLVED, f"every rank finished step {event.step} since: nothing was lost"
            )


def on_ranks_finished(turn: Turn, report: RanksFinished) -> None:
    """Ranks of a node have ended with exit code 0; binding.py has checked that they are the node's. The job is over when all
    ranks of the running generation have ended so."""
    job = turn.jobs.get(report.job)
    if job is None or job.running is None or job.phase.finished or report.generation != job.running.number:
        return
    running = job.running
    finished = job.membership.finished.with_(report.ranks)
    job = turn.put_membership(job.name, finished=finished)
    if len(finished) == running.mesh.world_size and job.number == running.number:
        if isinstance(job.doing, Stopping) or (isinstance(job.doing, Saving) and not job.doing.suspends):
            _stopped(turn, job.name, job.doing.reason)
        else:
            _end(turn, job.name, Cause.COMPLETE, f"{_all_ranks(len(finished))} ended with exit code 0")
    elif job.number == running.number:
        handover.on_ranks_finished(turn, job)


def request_checkpoint(turn: Turn, event: CheckpointRequested) -> None:
    job = turn.jobs.get(event.job)
    if job is None or job.phase is not JobPhase.RUNNING:
        why_not = f"no checkpoint: the job is {job.phase if job else 'not there'}"
        turn.note(event.job, why_not)
        if event.operation:
            turn.commands.append(Answer(event.operation, False, why_not, event))
        return
    at_step = ordered_saves.save_soon(turn, job, to_object_store=True)
    turn.note(event.job, f"saving at step {at_step}: an operator asked for it")
    patience_s = event.grace_s or ordered_saves.patience_s(turn, job, at_step) + reports.travel_s(turn, job)
    if event.operation:
        reports.expect(turn, event.job, event.operation, at_step, turn.at + patience_s)


def request_resize(turn: Turn, event: ResizeRequested) -> None:
    job = turn.jobs.get(event.job)
    if job is None or job.phase.finished:
        turn.note(event.job, f"not resized: the job is {job.phase if job else 'not there'}")
    elif not job.spec.min_dp <= event.dp <= job.spec.max_dp:
        turn.note(event.job, f"not resized to dp {event.dp}: it accepts {job.spec.min_dp} … {job.spec.max_dp} replicas")
    else:
        planned.drop(turn, job.name, f"overtaken by a resize to dp {event.dp}")
        turn.put_job(event.job, target_dp=event.dp, planned_not_before=0.0)
        turn.note(event.job, f"the target is dp {event.dp}: {event.reason}")


# ---------------------------------------------------------------- the end


def request_stop(turn: Turn, event: JobStopRequested) -> None:
    job = turn.jobs.get(event.job)
    if job is None and (held := change.newest_held(turn, event.job)):
        change.stop_removed_nodes(turn, event.job, held)  # workers of a run that this state has never seen
    if job is not None and isinstance(job.doing, Saving | Stopping) and job.doing.suspends:
        turn.update(job.name, suspends=False, reason=event.reason)  # it was to be suspended; now it is stopped
        turn.explain(job.name, event.reason)
        return
    if job is not None and isinstance(job.doing, Saving) and not event.save:
        _stop_unsaved(turn, job.name, job.doing, event.reason)
        return
    if job is None or job.phase.finished or job.phase is JobPhase.STOPPING:
        turn.note(event.job, f"not stopped: the job is {job.phase if job else 'not there'}")
        return
    planned.drop(turn, job.name, "the job stops")
    for incident in turn.open_incidents(job.name):  # the policy decides nothing about a job that an operator ends
        turn.close_incident(incident.id, IncidentState.RESOLVED, f"the job stops: {event.reason}")
    can_save = isinstance(job.doing, Running) and not job.progress.reports_no_steps and not job.membership.finished
    if event.save and can_save and not _lacks_ranks(turn, job):
        at_step = ordered_saves.save_soon(turn, job, to_object_store=True, leaving=f"stop: {event.reason}")
        reason = f"{event.reason}; saving at step {at_step} first"
        turn.move(job.name, Cause.SAVE, Saving(event.reason, at_step), reason)
        ordered_saves.limit_wait(turn, job, at_step)
        return
    if event.save and can_save:
        turn.note(job.name, "stops without a last save: a rank of the job has ended")
    stop_now(turn, job.name, event.reason)


def suspend(turn: Turn, name: str, ends_at: float) -> None:
    """All nodes of a running job end at `ends_at`, and no others can take its ranks. Save if there is time, then stop it."""
    job = turn.jobs[name]
    outcome = "all nodes of the job leave: it is suspended"
    planned.drop(turn, name, outcome)
    for incident in turn.open_incidents(name):
        turn.close_incident(incident.id, IncidentState.RESOLVED, outcome)
    why = "all of its nodes were asked to end"
    left_s = ends_at - turn.at
    until = ends_at - min(turn.config.suspend_margin_s, left_s / 4)
    if job.progress.reports_no_steps or job.membership.finished or until <= turn.at or _lacks_ranks(turn, job):
        stop_now(turn, name, why, suspends=True)
        return
    at_step = ordered_saves.save_soon(turn, job, to_object_store=True, leaving=f"suspend: {why}")
    turn.move(name, Cause.SAVE, Saving(why, at_step, suspends=True), f"{why}; saving at step {at_step} first")
    turn.set_timer(timers.StopTimeout(name), until)


def on_node_gone(turn: Turn, name: str) -> None:
    """A node's session ended. If no node of the job has a session any more, no rank can save: stop waiting for it."""
    job = turn.jobs[name]
    if not isinstance(job.doing, Saving) or not job.doing.suspends or job.generation is None:
        return
    if not any(turn.nodes[node].connected for node in job.generation.nodes if node in turn.nodes):
        stop_now(turn, name, job.doing.reason, suspends=True)


def on_ranks_missing(turn: Turn, name: str) -> None:
    """A node's workers have changed. If a rank has ended, the save that a stop waits for cannot come: go on at once, or, if the
    ranks may have saved already, when the inventories that report it should have arrived."""
    job = turn.jobs[name]
    if not isinstance(job.doing, Saving) or not _lacks_ranks(turn, job):
        return
    if job.progress.newest_step + 1 < job.doing.at_step:
        _stop_unsaved(turn, name, job.doing, "a rank of the job has ended")
    elif (due := turn.at + turn.config.inventory_s) < turn.timers.get(timers.StopTimeout(name), math.inf):
        turn.set_timer(timers.StopTimeout(name), due)


def _lacks_ranks(turn: Turn, job: Job) -> bool:
    """Whether a rank of the running generation is known to have ended, so that no checkpoint can be complete."""
    return any(turn.nodes[name].connected for name in job.membership.absent if name in turn.nodes)


def _stop_unsaved(turn: Turn, name: str, saving: Saving, why: str) -> None:
    turn.note(name, f"stops without the checkpoint at step {saving.at_step}: {why}")
    stop_now(turn, name, saving.reason, suspends=saving.suspends)


def on_saved(turn: Turn, name: str) -> None:
    """The newest complete checkpoint has changed. Stop the job if it was the one that the stop waits for."""
    doing = turn.jobs[name].doing
    if isinstance(doing, Saving) and turn.jobs[name].checkpoints.step >= doing.at_step:
        reach = reports.reach(turn, turn.jobs[name], doing.at_step)
        turn.note(name, f"step {doing.at_step} is saved before the stop: {reach}")
        stop_now(turn, name, doing.reason, suspends=doing.suspends)


def stop_now(turn: Turn, name: str, reason: str, *, suspends: bool = False) -> None:
    """Stop the workers. The job is stopped or suspended when every connected node has confirmed it, or at the timeout."""
    job = turn.jobs[name]
    change.withdraw(turn, job)
    stops = change.stop_removed_nodes(turn, name, job.number, grace_s=turn.config.stop_grace_s)
    turn.move(name, Cause.STOP, Stopping(reason, stops, suspends), reason)
    if not stops:
        _stopped(turn, name, reason)
        return
    turn.set_timer(timers.StopTimeout(name), turn.at + turn.config.stop_grace_s + job.spec.limits.prepare_timeout_s)


def on_stop_timer(turn: Turn, name: str) -> None:
    job = turn.jobs.get(name)
    match job.doing if job is not None else None:
        case Saving() as saving:
            _stop_unsaved(turn, name, saving, "it did not come in time")
        case Stopping(reason, stops):
            late = ", ".join(sorted(set(stops.values())))
            _stopped(turn, name, f"{reason}; {late} did not answer")
        case _:
            pass


def on_stop_answered(turn: Turn, command_id: str, name: str) -> None:
    """A Stop order was answered, or its node has disconnected."""
    job = turn.jobs.get(name)
    if job is None or not isinstance(job.doing, Stopping) or command_id not in job.doing.stops:
        return
    stops = {k: v for k, v in job.doing.stops.items() if k != command_id}
    turn.update(name, stops=stops)
    if not stops:
        _stopped(turn, name, job.doing.reason)


def _stopped(turn: Turn, name: str, reason: str) -> None:
    """No connected node has workers of the job any more."""
    doing = turn.jobs[name].doing
    if isinstance(doing, Stopping) and doing.suspends:
        turn.cancel_timer(timers.StopTimeout(name))
        suspension.begin(turn, name, reason.replace("; ", ", "))
    else:
        _end(turn, name, Cause.STOPPED, reason)


def fail(turn: Turn, name: str, reason: str, *, permanent: bool = False) -> None:
    """End the job by a decision. `permanent`: another attempt would fail in the same way."""
    _end(turn, name, Cause.FAIL, reason, permanent=permanent)


def _end(turn: Turn, name: str, cause: Cause, reason: str, *, permanent: bool = False) -> None:
    """End the job. Nodes without a session get their Stop order when they reconnect. Saved checkpoints are kept."""
    job = turn.jobs[name]
    for kind in _WHILE_UNFINISHED:
        turn.cancel_timer(kind(name))
    change.withdraw(turn, job)
    upload = final_upload.begin(turn, job) if cause is Cause.COMPLETE else None
    over = Completed(upload) if cause is Cause.COMPLETE else Failed(permanent) if cause is Cause.FAIL else Stopped()
    if upload is None:
        change.stop_removed_nodes(turn, name, job.number, ended=True)
    if job.running is not None:
        turn.publish(GenerationChanged(turn.at, name, GenerationStage.ENDED, job.running, reason))
    closing = IncidentState.FAILED if cause is Cause.FAIL else IncidentState.RESOLVED
    for incident in turn.open_incidents(name):
        turn.close_incident(incident.id, closing, f"the job is {over.phase}: {reason}")
    members = job.generation.nodes if job.generation else ()
    turn.move(name, cause, over, reason)
    reports.review(turn, name)
    final_upload.review(turn, name)
    for node in members:
        if node in turn.nodes:
            nodes.refresh(turn, node, f"{name} is {over.phase}")
    _forget_old(turn)


def _forget_old(turn: Turn) -> None:
    finished = turn.in_order(turn.found(By.FINISHED))
    for job in finished[: max(0, len(finished) - turn.config.finished_jobs_max)]:
        for send in turn.orders(job=job.name):
            turn.forget_order(send)
        turn.drop_job(job.name)


def _all_ranks(count: int) -> str:
    return "the only rank" if count == 1 else f"all {count} ranks"
