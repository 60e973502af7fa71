"""Suspended jobs: all nodes of a job leave, as at the end of an allocation. How the job stops, and how it continues.

    every node is asked to end ──► the job saves ──► workers stop ──► Suspended at that step ──► nodes connect ──► it continues
                                     └── no save in time, no library, the nodes disconnected: at the newest saved step

`notices` receives the notices and asks the policy, and `jobs` saves and stops. This module has the data of a suspended job, and
decides when it continues.

A suspended job waits for all of its nodes, and for those that hold its step. The nodes of a new allocation do not all connect
at once, and the first of them could run fewer replicas from an older step, or from step 0. The wait is limited: the machines
that had the step may never return.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.supervisor.core.changes import change
from holdfast.supervisor.core.incidents.views import options, reachable
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import AwaitedNodes, Cause, Suspended
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.planner import Plan
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.timers import RetryDue


def all_leave(turn: Turn, job: Job) -> bool:
    """Whether every node of the job's newest generation was asked to end, or has disconnected when others were asked."""
    members = [turn.nodes.get(name) for name in (job.generation.nodes if job.generation else ())]
    gone = all(node is None or node.asked_to_end or not node.connected for node in members)
    return gone and any(node is not None and node.asked_to_end for node in members)


def begin(turn: Turn, name: str, reason: str) -> None:
    """Suspend the job: its workers have ended, or it was waiting anyway."""
    job = turn.jobs[name]
    point = saved.newest_anywhere(turn, job)
    turn.cancel_timer(RetryDue(name))
    awaited = AwaitedNodes(turn.at, ())
    suspended = Suspended(awaited, turn.at, point.step, point.attempt)
    turn.move(name, Cause.SUSPEND, suspended, f"{reason}; {_goes_on(job, point.step)}")


def _goes_on(job: Job, step: int) -> str:
    if step:
        return f"it goes on from step {step} when nodes are there again"
    if job.progress.reports_no_steps:
        return "its script reports no steps: it is started again when nodes are there"
    return "no step of it is saved: it starts again from step 0 when nodes are there"


def learn(turn: Turn, name: str) -> None:
    """A node, or the object store, has reported more of the job than was known."""
    job = turn.jobs[name]
    if isinstance(job.doing, Suspended):
        point = saved.newest_anywhere(turn, job)
        if (point.attempt, point.step) > (job.doing.attempt, job.doing.step):
            turn.update(name, step=point.step, attempt=point.attempt)
            _explain(turn, name, _goes_on(job, point.step))


def _explain(turn: Turn, name: str, how: str) -> None:
    turn.explain(name, f"{turn.jobs[name].reason.partition('; ')[0]}; {how}")


def stays(turn: Turn, name: str, why: str) -> None:
    """The job stays suspended, and is checked again after a while."""
    _explain(turn, name, f"it stays suspended: {why}")
    turn.set_timer(RetryDue(name), turn.at + turn.config.degraded_start_s)


def may_go_on(turn: Turn, job: Job, doing: Suspended) -> bool:
    """Whether the nodes at hand have the step to continue from. Sets the timer that limits the wait."""
    here = options(turn, job)
    since = (doing.returning_at or turn.at) if here else 0.0
    if (here, since) != (doing.awaited.candidates, doing.returning_at):
        job = turn.update(job.name, awaited=evolve(doing.awaited, candidates=here), returning_at=since)
    if not here:
        turn.cancel_timer(RetryDue(job.name))
        return False
    if RetryDue(job.name) not in turn.timers:
        turn.set_timer(RetryDue(job.name), max(turn.at, since) + turn.config.degraded_start_s)
    return _has_step(turn, job, doing)


def _has_step(turn: Turn, job: Job, doing: Suspended) -> bool:
    """Whether all replicas can continue from the step at which the job was suspended."""
    plan = reachable(turn, job, job.target_dp, job.target_dp)
    if not isinstance(plan, Plan) or change.not_yet(turn, job, plan) is not None:
        return False
    step = saved.elect_for(turn, job, plan.mesh, plan.placements).restore.step
    return step >= doing.step or _all_have_reported(turn, job)


def _all_have_reported(turn: Turn, job: Job) -> bool:
    """Whether all nodes that it ran on are connected and have reported their shards. Shards that they lack are lost, such as
    those in the memory of a machine that has rebooted."""
    members = [turn.nodes.get(name) for name in (job.generation.nodes if job.generation else ())]
    return all(node is not None and node.connected and node.inventoried for node in members)


def wait_on(turn: Turn, job: Job, doing: Suspended) -> str:
    """Why to wait longer although the time for all nodes to connect is over; empty if there is no reason."""
    plan = reachable(turn, job, job.target_dp, job.spec.min_dp)
    if not isinstance(plan, Plan):
        return plan.reason
    restore = saved.elect_for(turn, job, plan.mesh, plan.placements).restore
    if (
        restore.step >= doing.step
        or _all_have_reported(turn, job)
        or turn.at >= doing.returning_at + turn.config.suspended_holders_s
    ):
        return ""
    return f"the nodes at hand cannot restore step {doing.step}: {restore.reason}"
