"""The last checkpoint of a job that has completed goes to its object store before the nodes hear that the job is over.

    completed ──every rank's newest save asked for──► leaving ──complete in the store, or time is over──► over

Its nodes are free for other jobs meanwhile: the replicators carry on beside them. A job without a store, or whose last step is
there already, is over at once. Its files stay on the nodes, as those of a job that was stopped or has failed.
"""

from __future__ import annotations

from holdfast.domain.orders import CheckpointNow
from holdfast.supervisor.core import reports
from holdfast.supervisor.core.change import abandon, stop_leavers
from holdfast.supervisor.core.evolve import evolve
from holdfast.supervisor.core.state import Job, Leaving
from holdfast.supervisor.core.turn import Turn


def begin(turn: Turn, name: str) -> bool:
    """Whether there is something to wait for; if so the job has a moment, and its nodes hear which step is meant."""
    job = turn.jobs[name]
    if not job.spec.checkpoint.store or not job.ever_saved or _stored(job, job.checkpoint_step):
        return False
    until = turn.at + reports.travel_s(turn, job)
    turn.put_job(name, leaving=Leaving(until=until))
    turn.set_timer(f"leave:{name}", until)
    review(turn, name)
    return True


def review(turn: Turn, name: str) -> None:
    """A node has said what it holds: the last save may be known only now, or be where it should be."""
    job = turn.jobs[name]
    if job.leaving is None or job.leaving.over:
        return
    step = job.checkpoint_step
    if _stored(job, step):
        _over(turn, job, f"step {step} is in the object store")
    elif step > job.leaving.step:
        turn.put_job(name, leaving=evolve(job.leaving, step=step, news=f"step {step} is going to the object store"))
        assert job.running is not None
        for node in job.running.nodes:
            turn.send(node, CheckpointNow(name, job.running.number, step, far=True))


def on_timer(turn: Turn, name: str) -> None:
    """It has had its time."""
    job = turn.jobs.get(name)
    if job is not None and job.leaving is not None and not job.leaving.over:
        _over(turn, job, f"step {job.checkpoint_step} did not reach the object store in time")


def _stored(job: Job, step: int) -> bool:
    """Whether this step of the running attempt, or a later one, is whole in the store."""
    attempt = job.running.attempt if job.running is not None else 0
    return any(each.attempt == attempt and each.step >= step and not each.damage for each in job.stored)


def _over(turn: Turn, job: Job, news: str) -> None:
    assert job.leaving is not None
    turn.cancel_timer(f"leave:{job.name}")
    turn.put_job(job.name, leaving=evolve(job.leaving, news=news, over=True))
    turn.note(job.name, f"completed: {news}")
    abandon(turn, job.name)
    stop_leavers(turn, job.name, job.number, ended=True)
