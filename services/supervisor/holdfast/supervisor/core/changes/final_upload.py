"""Final upload: the last checkpoint of a completed job goes to its object store before its nodes learn that the job is over.

    completed ──upload of the newest checkpoint ordered──► leaving ──complete in the store, or timeout──► over

Its nodes are free for other jobs meanwhile: the replicators upload in the background. A job without a store, or whose last step
is stored already, is over at once. Its files stay on the nodes, like those of a stopped or failed job.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.orders import CheckpointNow
from holdfast.supervisor.core.changes.change import stop_removed_nodes, withdraw
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Completed, FinalUpload
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.saves import reports
from holdfast.supervisor.timers import FinalUploadTimeout


def begin(turn: Turn, job: Job) -> FinalUpload | None:
    """The upload that a completed job waits for; None if there is nothing to upload."""
    if not job.spec.checkpoint.store or not job.checkpoints.ever_saved or _stored(job, job.checkpoints.step):
        return None
    until = turn.at + reports.travel_s(turn, job)
    turn.set_timer(FinalUploadTimeout(job.name), until)
    return FinalUpload(until)


def review(turn: Turn, name: str) -> None:
    """After an inventory: order the upload of the last checkpoint once it is known, and end it once it is stored."""
    job = turn.jobs[name]
    upload = job.final_upload
    if upload is None or upload.finished:
        return
    step = job.checkpoints.step
    if _stored(job, step):
        _over(turn, job, f"step {step} is in the object store")
    elif step > upload.step:
        upload = evolve(upload, step=step, status=f"step {step} is going to the object store")
        turn.put_job(name, doing=Completed(upload))
        assert job.running is not None
        for node in job.running.nodes:
            turn.send(node, CheckpointNow(name, job.running.number, step, to_object_store=True))


def on_timer(turn: Turn, name: str) -> None:
    """Abandon the final upload when its timer fires."""
    job = turn.jobs.get(name)
    if job is not None and job.final_upload is not None and not job.final_upload.finished:
        _over(turn, job, f"step {job.checkpoints.step} did not reach the object store in time")


def _stored(job: Job, step: int) -> bool:
    """Whether this step of the running attempt, or a later one, is complete in the object store."""
    attempt = job.running.attempt if job.running is not None else 0
    return any(each.attempt == attempt and each.step >= step and not each.damage for each in job.checkpoints.stored)


def _over(turn: Turn, job: Job, status: str) -> None:
    assert job.final_upload is not None
    turn.cancel_timer(FinalUploadTimeout(job.name))
    turn.put_job(job.name, doing=Completed(evolve(job.final_upload, status=status, finished=True)))
    turn.note(job.name, f"completed: {status}")
    withdraw(turn, job)
    stop_removed_nodes(turn, job.name, job.number, ended=True)
