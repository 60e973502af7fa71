"""Progress of a job: the steps that its generations have reached, by any witness, compared with where they started. Pure.

A generation has *progressed* if a step that every rank finished, or a checkpoint that every rank saved, lies beyond the step
that it restored. The witnesses are the stream of steps, the agents' reports of first steps, and the inventories: if
diagnostics is unavailable, only the last two remain. The position of an earlier generation does not matter: after a rollback
below it, steps have to be repeated, and that is progress. One rank that reports a new step is evidence for all: the step
needed every rank, and the reports of others may be lost. Where ranks do not wait for each other, this may be wrong; then
`restarts_without_advance`, which uses only steps that every rank has finished, ends the job.

Three counters follow from this. The policy ends a job by any of them:

* `restarts_without_progress`: worker faults in a row in generations that did not progress. A fault of prepared workers before
  the start does not count: the script has not run in them. Neither does one of class `LEARNED_START`: the next start differs.
* `restarts_without_advance`: worker faults since the job last passed its furthest step since the step that it restored. It
  grows if the same few steps are repeated again and again. It starts at 0 with every start from another step, so it cannot
  grow while checkpoints advance.
* `outages`: failures of a file system or a service (or, before a step, of the communication) since the job last passed its
  furthest step. They pass by themselves, so they count in neither of the others, and are retried with a growing pause.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Attribution
from holdfast.domain.generations import Generation
from holdfast.policy import COMMUNICATION, OUTAGES
from holdfast.supervisor.core.model.job import Job, JobProgress
from holdfast.supervisor.core.model.turn import Turn

# Until a job has stepped for the first time, nobody knows how long its start takes: it may index its data, or compile.
# nvidia-resiliency-ext waits as long by default (`initial_rank_heartbeat_timeout`).
FIRST_START_S = 3600.0
LATER_START_S = 600.0  # at least this long afterwards; a first start that takes longer is a warning
# a start may take this many times as long as the longest one so far: caches may be cold, and storage slow
START_FACTOR = 2.0

# The error class of a failure before the first step, in a start with learned modules. The next start has none.
LEARNED_START = "learned_start"

FIRST_MESSAGE_S = 300.0  # a script that is known to report steps may import and load data for so long before it says so

SECOND_WITNESS_S = 5.0  # after this long without a new step from diagnostics, the steps in agents' beats are folded
_BEAT_LAG_S = 0.6  # a step may be in a beat this long after its end: agents beat twice a second
_REPORT_LAG_S = 1.6  # the same for a report of diagnostics, which reports steps once a second


def lag_s(turn: Turn, job: Job) -> float:
    """How long ago the end of the newest known step may be, if the job continues to step.

    While diagnostics reports no steps, beats tell a newer one every `SECOND_WITNESS_S`. If they have told none for longer, the
    job has finished none.
    """
    silent_s = turn.at - job.progress.seen_at
    if 2 * job.progress.seconds_per_step < silent_s <= SECOND_WITNESS_S + _BEAT_LAG_S:
        return max(_REPORT_LAG_S, silent_s + _BEAT_LAG_S)
    return _REPORT_LAG_S


def seen(turn: Turn, name: str, step: int) -> Job:
    """Some rank of the running generation has finished or saved `step`, so its ranks take part in steps."""
    job = turn.jobs[name]
    if step <= job.progress.seen_step:
        return job
    # A script whose first step came late does report steps.
    stepped = job.running is not None and step > job.running.restore.step
    reports_no_steps = job.progress.reports_no_steps and not stepped
    return turn.put_progress(name, seen_step=step, seen_at=turn.at, reports_no_steps=reports_no_steps)


def start_patience_s(job: Job) -> float:
    """Time from START within which every rank has to finish a step, in seconds."""
    if stated := job.spec.limits.first_step_timeout_s:
        return stated
    if job.progress.longest_start_s is None:
        return FIRST_START_S
    return max(LATER_START_S, START_FACTOR * job.progress.longest_start_s)


def start_is_unknown(job: Job) -> bool:
    """Whether nobody knows how long a start of this job takes: it has never stepped, and its job file states no limit."""
    return job.progress.longest_start_s is None and not job.spec.limits.first_step_timeout_s


def first_message_s(job: Job) -> float:
    """How long ranks without a message may still be on their way to their first step, in seconds; 0.0 if no rank is known to
    have reported a step. Well within the patience with a start, so that no start is ended by it."""
    reports_steps = job.progress.seen_step > 0 or job.progress.longest_start_s is not None
    return min(FIRST_MESSAGE_S, start_patience_s(job) / 2) if reports_steps else 0.0


def start_took(turn: Turn, name: str, seconds: float) -> None:
    """Every rank has finished a step this long after START."""
    longest_s = turn.jobs[name].progress.longest_start_s
    if longest_s is None or seconds > longest_s:
        turn.put_progress(name, longest_start_s=seconds)


def has_stepped(job: Job) -> bool:
    """Whether any rank has reported a new step of the running generation, which needed all ranks. Before that, it cannot be
    concluded that steps have stopped."""
    return job.running is not None and job.progress.seen_step > job.running.restore.step


def reached(turn: Turn, name: str, step: int) -> Job:
    """Every rank of the running generation has finished or saved `step`."""
    job = seen(turn, name, step)
    if job.running is None or step <= job.running.restore.step:
        return job
    changes: dict[str, object] = (
        {"progressed": True, "restarts_without_progress": 0} if not job.progress.progressed else {}
    )
    if step > job.progress.furthest_step:
        changes |= {"furthest_step": step, "restarts_without_advance": 0, "outages": 0}
    return turn.put_progress(name, **changes) if changes else job


def started(turn: Turn, job: Job, generation: Generation) -> JobProgress:
    """The job's progress at the start of `generation`."""
    before, step = job.running, generation.restore.step
    changes: dict[str, object] = {"step": step, "reports_no_steps": False, "progressed": False}
    if before is None or step != before.restore.step:
        changes |= {"furthest_step": step, "restarts_without_advance": 0, "outages": 0}
    if before is not None and (_has_progressed(job) or step > before.restore.step):
        # In the second case a checkpoint of the previous generation was found complete after its end.
        changes["restarts_without_progress"] = 0
    return evolve(job.progress, **changes)


def count_fault(turn: Turn, name: str, generation: int, attribution: Attribution) -> None:
    """Count a worker fault that ended `generation`. A script that has made steps and reports none may have progressed by
    checkpoints of its own: only `restarts_without_advance` counts its fault."""
    job = turn.jobs[name]
    error_class = attribution.error_class
    has_progressed = _has_progressed(job) or (job.progress.reports_no_steps and attribution.observed_steps > 0)
    ran_s = turn.at - job.membership.running_at
    if job.progress.reports_no_steps and ran_s >= turn.config.blind_progress_s:
        turn.put_progress(name, restarts_without_progress=0, restarts_without_advance=0, outages=0)
    elif error_class in OUTAGES and not (error_class == COMMUNICATION and job.progress.progressed):
        turn.put_progress(name, outages=job.progress.outages + 1)
    else:
        known = job.progress
        is_prepared = job.running is not None and generation > job.running.number
        is_the_scripts = not is_prepared and error_class != LEARNED_START
        without_progress = known.restarts_without_progress + is_the_scripts
        turn.put_progress(
            name,
            restarts_without_progress=0 if has_progressed else without_progress,
            restarts_without_advance=known.restarts_without_advance + 1,
        )


def _has_progressed(job: Job) -> bool:
    return job.progress.progressed or has_stepped(job)
