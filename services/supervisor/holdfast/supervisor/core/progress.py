"""Does a job get anywhere? What its generations have reached, by any witness, against where they started. Pure.

A generation has *progressed* when a step that every rank finished, or a checkpoint that every rank saved, lies beyond the step
that it restored. The witnesses are the stream of steps, the agents' reports of first steps, and the inventories: diagnostics
may be away for hours, and then only the last two speak. Where an earlier generation had been does not matter: after a rollback
below it the steps have to be done again, and doing them is progress.

Three counters follow, and a job is ended by any of them, in the policy:

* `restarts_without_progress`: worker faults in a row of generations that did not progress.
* `restarts_without_advance`: worker faults since the job last came further than ever since the step it restores. It grows when
  the same few steps are done again and again. It begins anew with every start from another step, so it cannot grow while
  checkpoints advance.
* `outages`: failures of a file system or a service (or, before a step, of the communication) since the job last came further.
  They pass by themselves, so they count in neither of the others, and are tried again with a growing pause.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Generation
from holdfast.policy import COMMUNICATION, OUTAGES
from holdfast.supervisor.core.job import Job, JobProgress
from holdfast.supervisor.core.turn import Turn


def seen(turn: Turn, name: str, step: int) -> Job:
    """Some rank of the running generation has finished, or saved, `step`: its ranks take part in steps."""
    job = turn.jobs[name]
    return turn.put_progress(name, seen_step=step, seen_at=turn.at) if step > job.progress.seen_step else job


def reached(turn: Turn, name: str, step: int) -> Job:
    """Every rank of the running generation has finished, or saved, `step`."""
    job = seen(turn, name, step)
    if job.running is None or step <= job.running.restore.step:
        return job
    changes: dict[str, object] = (
        {"progressed": True, "restarts_without_progress": 0} if not job.progress.progressed else {}
    )
    if step > job.progress.furthest_step:
        changes |= {"furthest_step": step, "restarts_without_advance": 0, "outages": 0}
    return turn.put_progress(name, **changes) if changes else job


def started(job: Job, generation: Generation) -> JobProgress:
    """The job's progress at the start of `generation`."""
    before, step = job.running, generation.restore.step
    changes: dict[str, object] = {"step": step, "reports_no_steps": False, "progressed": False}
    if before is None or step != before.restore.step:
        changes |= {"furthest_step": step, "restarts_without_advance": 0, "outages": 0}
    if before is not None and step > before.restore.step:
        changes["restarts_without_progress"] = (
            0  # the previous generation's checkpoint was found complete after its end
        )
    return evolve(job.progress, **changes)


def count_fault(turn: Turn, name: str, error_class: str = "") -> None:
    """The running generation was ended by a worker's fault."""
    job = turn.jobs[name]
    ran_s = turn.at - job.membership.running_at
    if job.progress.reports_no_steps and ran_s >= turn.config.blind_progress_s:
        turn.put_progress(name, restarts_without_progress=0, restarts_without_advance=0, outages=0)
    elif error_class in OUTAGES and not (error_class == COMMUNICATION and job.progress.progressed):
        turn.put_progress(name, outages=job.progress.outages + 1)
    else:
        known = job.progress
        turn.put_progress(
            name,
            restarts_without_progress=0 if known.progressed else known.restarts_without_progress + 1,
            restarts_without_advance=known.restarts_without_advance + 1,
        )
