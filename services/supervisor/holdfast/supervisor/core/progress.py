"""Does a job get anywhere? What its generations have reached, by any witness, against where they started. Pure.

A generation has *progressed* when a step that every rank finished, or a checkpoint that every rank saved, lies beyond the step
that it restored. The witnesses are the stream of steps, the agents' reports of first steps, and the inventories: diagnostics
may be away for hours, and then only the last two speak. Where an earlier generation had been does not matter: after a rollback
below it the steps have to be done again, and doing them is progress.

Three counters follow, and a job is ended by any of them, in the policy:

* `fruitless`: worker faults in a row of generations that did not progress.
* `stuck`: worker faults since the job last came further than ever since the step it restores. It grows when the same few steps
  are done again and again. It begins anew with every start from another step, so it cannot grow while checkpoints advance.
* `outages`: failures of a file system or a service (or, before a step, of the communication) since the job last came further.
  They pass by themselves, so they count in neither of the others, and are tried again with a growing pause.
"""

from __future__ import annotations

from holdfast.domain.generations import Generation
from holdfast.policy import COMMUNICATION, OUTAGES
from holdfast.supervisor.core.state import Job
from holdfast.supervisor.core.turn import Turn


def seen(turn: Turn, name: str, step: int) -> Job:
    """Some rank of the running generation has finished, or saved, `step`: its ranks take part in steps."""
    job = turn.jobs[name]
    return turn.put_job(name, seen_step=step, seen_at=turn.at) if step > job.seen_step else job


def reached(turn: Turn, name: str, step: int) -> Job:
    """Every rank of the running generation has finished, or saved, `step`."""
    job = seen(turn, name, step)
    if job.running is None or step <= job.running.restore.step:
        return job
    changes: dict[str, object] = {"progressed": True, "fruitless": 0} if not job.progressed else {}
    if step > job.furthest:
        changes |= {"furthest": step, "stuck": 0, "outages": 0}
    return turn.put_job(name, **changes) if changes else job


def started(job: Job, generation: Generation) -> dict[str, object]:
    """The fields of `job` that change with the start of `generation`."""
    before, step = job.running, generation.restore.step
    changes: dict[str, object] = {"progressed": False}
    if before is None or step != before.restore.step:
        changes |= {"furthest": step, "stuck": 0, "outages": 0}
    if before is not None and step > before.restore.step:
        changes["fruitless"] = 0  # a checkpoint of the generation before was found complete after its end
    return changes


def count_fault(turn: Turn, name: str, error_class: str = "") -> None:
    """The running generation was ended by a worker's fault."""
    job = turn.jobs[name]
    ran_s = turn.at - job.running_at
    if job.blind and ran_s >= turn.config.blind_progress_s:
        turn.put_job(name, fruitless=0, stuck=0, outages=0)
    elif error_class in OUTAGES and not (error_class == COMMUNICATION and job.progressed):
        turn.put_job(name, outages=job.outages + 1)
    else:
        turn.put_job(name, fruitless=0 if job.progressed else job.fruitless + 1, stuck=job.stuck + 1)
