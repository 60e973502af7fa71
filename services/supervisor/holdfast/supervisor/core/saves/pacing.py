"""The checkpoint interval of a running job: measures saves, chooses again every few saves, and announces the result."""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.incidents import Action
from holdfast.domain.job import CheckpointSpec
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Running, Starting
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.election import Origin
from holdfast.supervisor.core.rules.interval import SAVES_BETWEEN, SAVES_FIRST, Interval, Loss, choose, differs
from holdfast.supervisor.core.saves import ordered_saves
from holdfast.supervisor.protocol import StepsCompleted


def resolved(turn: Turn, name: str) -> CheckpointSpec:
    """The job's checkpoint settings with numbers in place of `auto`, for a generation that is about to be prepared."""
    job = turn.jobs[name]
    interval = job.checkpoints.interval
    if interval is None:
        interval = _choice(turn, job)
        turn.put_checkpoints(name, interval=interval)
        if not job.spec.checkpoint.interval_steps:
            turn.note(name, f"checkpoints {interval.reason}")
    return evolve(job.spec.checkpoint, interval_steps=interval.steps, store_interval_s=interval.store_s)


def measure(turn: Turn, name: str, event: StepsCompleted) -> None:
    """Fold the measured cost of saves into the job, and choose the interval again if it is due."""
    job = turn.jobs[name]
    if event.saves > 0:
        job = turn.put_checkpoints(name, measured=job.checkpoints.measured.saved(event.saves, event.stall_s))
    interval = job.checkpoints.interval
    if isinstance(job.doing, Running) and interval is not None and _due(job, interval):
        _review(turn, job, interval)


def recovered(turn: Turn, name: str, starting: Starting) -> None:
    """A fault or a planned change is over: record how long it took, and the class of the fault, judged by the copies that
    survived it."""
    job, change = turn.jobs[name], starting.change
    faults = [turn.incidents[each] for each in change.incidents if each in turn.incidents]
    fault_times = [incident.fault_at for incident in faults if not incident.planned]
    measured = job.checkpoints.measured
    if fault_times:
        seconds = max(0.0, starting.stepped_at - min(fault_times))
        turn.put_checkpoints(name, measured=measured.recovered(_loss(change.origin), seconds))
    elif faults:
        turn.put_checkpoints(name, measured=measured.changed(max(0.0, starting.stepped_at - change.began_at)))


def _loss(origin: Origin) -> Loss:
    match origin:
        case Origin.PEER:
            return Loss.NODE
        case Origin.STORE:
            return Loss.COPIES
        case Origin.NOWHERE | Origin.MEMORY | Origin.DISK:
            return Loss.LOCAL


def _choice(turn: Turn, job: Job) -> Interval:
    trained_s = max(0.0, turn.at - job.submitted_at)
    measured, step_s = job.checkpoints.measured, job.progress.step_s
    return choose(job.spec.checkpoint, measured, step_s=step_s, trained_s=trained_s, nodes=job.spec.nodes)


def decided(turn: Turn, name: str, action: Action) -> None:
    """Apply a policy's decision about the checkpoint interval, for this and later generations."""
    job = turn.jobs[name]
    before = job.checkpoints.interval
    choice = _choice(turn, job)
    if action.interval_steps:
        reason = f"every {action.interval_steps} steps, as the policy decided: {action.reason}"
        choice = evolve(choice, steps=action.interval_steps, reason=reason, decided=True)
    job = turn.put_checkpoints(name, interval=choice)
    if before is not None and isinstance(job.doing, Running | Starting) and choice.steps != before.steps:
        _announce(turn, job, choice, before)


def _due(job: Job, interval: Interval) -> bool:
    if interval.decided or (job.spec.checkpoint.interval_steps and job.spec.checkpoint.store_interval_s):
        return False
    if not interval.timed and job.progress.step_s > 0:
        return True
    return job.checkpoints.measured.saves >= interval.saves + (SAVES_BETWEEN if interval.saves else SAVES_FIRST)


def _review(turn: Turn, job: Job, before: Interval) -> None:
    choice = _choice(turn, job)
    if not differs(choice.steps, before.steps):
        # The interval of the object store reaches the nodes with the next PREPARE.
        reason = f"every {before.steps} steps, which is close enough to the best: {choice.reason}"
        turn.put_checkpoints(job.name, interval=evolve(choice, steps=before.steps, reason=reason))
        return
    job = turn.put_checkpoints(job.name, interval=choice)
    _announce(turn, job, choice, before)


def _announce(turn: Turn, job: Job, choice: Interval, before: Interval) -> None:
    from_step = ordered_saves.change_interval(turn, job, before.steps)
    turn.note(
        job.name,
        f"checkpoints from step {from_step} on {choice.reason}; it was every {before.steps} steps",
    )
