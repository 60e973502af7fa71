"""The default policy, as a table:

the same exception again                                    stop
no step after N restarts, the same steps after 3 × N        stop
crash, exception, hang                                      restart; hot_swap at the second on one node, with a spare
node lost, GPU dead, node unusable for any reason           hot_swap; without a spare scale_down; below min_dp wait
wrong results without an error (silent corruption)         hot_swap, else scale_down, else wait; restart if no node is named
node back in service while the job runs degraded            scale_up
maintenance announced for a node                            hot_swap; without a spare scale_down when it is near, else it stays
"""

from __future__ import annotations

from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.incidents import CORDONED, MAINTENANCE, REPAIR, RESIZE, Action, Incident
from holdfast.policy.actions import hot_swap, notify, restart, scale_down, scale_up, stop, wait
from holdfast.policy.job import JobView

SUSPECT_WINDOW_S = 600.0  # two worker faults on one node within it point at the node

# A generation that steps is worth more tries than one that does not: so many times the job's restarts_without_progress_max, as
# long as the faults come before the next checkpoint.
ADVANCE_PATIENCE = 3

# Without a spare, a replica leaves this long before the maintenance of its node: enough to save, to change, and to copy what
# was saved. Until then a spare may come.
MAINTENANCE_LEAD_S = 60.0

_WORKER_FAULTS = (FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.HANG)


def default(incident: Incident, job: JobView) -> Action:
    """What Holdfast does when nobody says otherwise."""
    match incident.kind:
        case FindingKind.REPEATED_EXCEPTION:
            return stop(incident.cause)
        case FindingKind.WORKER_CRASH | FindingKind.WORKER_EXCEPTION | FindingKind.HANG | FindingKind.RANKS_MISSING:
            return _worker_fault(incident, job)
        case FindingKind.NODE_LOST:
            return _node_fault(incident, job)
        case FindingKind.GPU_ERROR if incident.severity == Severity.FATAL or job.unusable:
            return _node_fault(incident, job)
        case FindingKind.GPU_ERROR:
            return _worker_fault(incident, job)
        case FindingKind.SILENT_CORRUPTION if incident.node:
            return _replace((incident.node,), f"{incident.node} computes wrongly", job)
        case FindingKind.SILENT_CORRUPTION:
            return restart("the state cannot be trusted: back to the last step that was verified")
        case k if k == CORDONED:
            return _replace((incident.node,), f"{incident.node} is to leave", job)
        case k if k == REPAIR:
            return _resize(job)
        case k if k == RESIZE:
            return _resize(job)
        case k if k == MAINTENANCE:
            return _leave(job)
        case _:
            return notify(f"{incident.kind} calls for no action: {incident.cause}")


def _worker_fault(incident: Incident, job: JobView) -> Action:
    if job.restarts_without_progress >= job.restarts_without_progress_max:
        return stop(
            f"{job.restarts_without_progress} generations in a row finished no new step; the last one ended with: "
            f"{incident.cause}"
        )
    if job.restarts_without_advance >= ADVANCE_PATIENCE * job.restarts_without_progress_max:
        return stop(
            f"{job.restarts_without_advance} generations in a row came no further than step {job.furthest_step}; "
            f"the last one ended with: {incident.cause}"
        )
    if job.unusable:
        return _replace(job.unusable, f"{', '.join(job.unusable)} cannot be used", job)
    before = job.recent_on(incident.node, SUSPECT_WINDOW_S, *_WORKER_FAULTS) if incident.node else ()
    if before and job.spares:
        return hot_swap(
            f"{incident.node} has had {len(before) + 1} worker faults in {SUSPECT_WINDOW_S / 60:.0f} minutes: "
            "the node is suspect and a spare is free",
            incident.node,
        )
    return restart("the nodes are healthy: new processes on the same nodes")


def _node_fault(incident: Incident, job: JobView) -> Action:
    if job.unusable:
        return _replace(job.unusable, f"{', '.join(job.unusable)} cannot be used", job)
    if incident.node and incident.node not in job.nodes:
        return restart(f"{incident.node} has left already: new processes on the nodes that stay")
    return restart(f"{incident.node or 'the node'} is back in service, without its workers")


def _replace(out: tuple[str, ...], why: str, job: JobView) -> Action:
    if len(out) <= len(job.spares):
        free = "a spare node is free" if len(job.spares) == 1 else f"{len(job.spares)} spare nodes are free"
        return hot_swap(f"{why}, and {free}", *out)
    if job.min_dp <= job.reachable_dp < job.dp:
        return scale_down(
            f"{why} and no spare is free: {job.reachable_dp} of {job.dp} replicas go on", *out, dp=job.reachable_dp
        )
    if job.reachable_dp >= job.dp:
        return restart(f"{why}, but the nodes left over are enough for all {job.dp} replicas")
    return wait(
        f"{why}, no spare is free, and the other nodes cannot run the {job.min_dp} replicas that the job needs at least"
    )


def _leave(job: JobView) -> Action:
    """A machine goes at a known time: planned, at a checkpoint, no step is done again; afterwards it would be a recovery."""
    leaving = sorted(job.notices, key=lambda node: (job.notices[node].left_s(job.at), node))
    if not leaving:
        return notify("no maintenance is announced any more")
    names = ", ".join(leaving)
    left_s = job.notices[leaving[0]].left_s(job.at)
    when = f"in {left_s:.0f} s" if left_s > 0 else "at any moment"
    if job.spares:
        first = leaving[: len(job.spares)]
        return hot_swap(f"maintenance of {', '.join(first)} is announced ({when}), and a spare is free", *first)
    near = [node for node in leaving if job.notices[node].left_s(job.at) <= MAINTENANCE_LEAD_S + 1]
    replicas = job.replicas_without(*near)
    if near and replicas >= job.min_dp:
        return scale_down(
            f"maintenance of {', '.join(near)} starts {when}, and no spare is free: {replicas} of {job.dp} replicas go on",
            *near,
        )
    if near:
        return wait(
            f"no spare is free, and without {', '.join(near)} fewer than the {job.min_dp} replicas that the job needs would "
            "be left: saved, and goes on until the machine is taken"
        )
    return wait(f"maintenance of {names} starts {when}: no spare is free yet, and there is time")


def _resize(job: JobView) -> Action:
    if job.target_dp < job.dp:
        return scale_down(f"{job.target_dp} replicas are wanted, {job.dp} run", dp=job.target_dp)
    if job.reachable_dp > job.dp:
        return scale_up(
            f"{job.reachable_dp} of the {job.target_dp} replicas that are wanted can run again, {job.dp} do",
            dp=job.reachable_dp,
        )
    return wait(f"{job.target_dp} replicas are wanted, and today's nodes can run {job.reachable_dp}")
