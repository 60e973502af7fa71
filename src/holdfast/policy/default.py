"""The default policy, as a table:

a wrong command line, code that cannot be loaded: at first  stop; with a spare as for the same exception again
the same exception again, on two nodes                      stop
the same exception again, on one node                       hot_swap; without a spare restart, then stop at the third time
a file system or a service fails                            restart after a pause that doubles; stop after 8 × N
no step after N restarts, or no advance after 3 × N         stop
crash, exception, hang                                      restart; hot_swap at the second on one node, with a spare
a hang that waits for a node which diagnostics has lost     hot_swap; without a spare restart
a GPU that must be reset before it is used again            gpu_reset otherwise hot_swap otherwise scale_down otherwise wait;
                                                            at the second time in a day with a spare, or if it is not
                                                            possible: as for a node that is lost
node lost, GPU dead, node unusable for any reason           hot_swap; without a spare scale_down; below min_dp wait
wrong results without an error (silent corruption)          hot_swap, else scale_down, else wait; restart if no node is named
node back in service while the job runs degraded            scale_up
maintenance announced for a node                            hot_swap; without a spare scale_down shortly before, or wait
a warning: a node that costs more than 3 swaps of it would  hot_swap at the next checkpoint, with a spare
a warning: a GPU should be reset, and the job may run on    at the next checkpoint hot_swap, its GPU is reset then; without a
                                                            spare gpu_reset; notify if no reset is possible there
any other warning                                           notify, once while it lasts
a job of higher priority lacks nodes                        scale_down, as it asks; the replicas return when nodes are free
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.domain.findings import Blamed, FindingKind, Severity
from holdfast.domain.incidents import CORDONED, LOAN, MAINTENANCE, REPAIR, RESIZE, Action, ActionKind, Incident
from holdfast.policy.actions import gpu_reset, hot_swap, ignore, notify, restart, scale_down, scale_up, stop, wait
from holdfast.policy.job import JobView, PendingReset

SUSPECT_WINDOW_S = 600.0  # two worker faults on one node within this time make the node suspect

# Multiple of the job's restarts_without_progress_max for generations that finish steps but no new ones, because faults come
# before the next checkpoint.
ADVANCE_PATIENCE = 3

_ALLOWS_MORE = (
    "limits.restarts_without_progress_max in the job file allows more; steps that the script reports show its progress "
    "(holdfast init)."
)

# Without a spare, a replica is removed this long before the maintenance of its node: enough to save, to copy the checkpoint and
# to change. Until then a spare may become free.
MAINTENANCE_LEAD_S = 60.0

# Transient failures: the `error_class` of a finding's attribution.
COMMUNICATION = "communication"  # of the ranks, without a rank or node that failed first
OUTAGES = frozenset({"storage", "service", COMMUNICATION})
OUTAGE_PAUSE_S = 5.0  # after the second failure in a row; doubled by every further one …
OUTAGE_PAUSE_MAX_S = 600.0  # … up to this: 24 tries take three hours
OUTAGE_PATIENCE = 8  # multiple of the job's restarts_without_progress_max

USAGE = "usage"  # `error_class`: a wrong command line, or code that cannot be loaded

SWAP_MARGIN = 3.0  # a node is swapped for a warning if that saves this many times what the swap costs

# confidence of a warning for which a run is changed to reset a GPU: the driver's report, not a second opinion
RESET_SURE = 0.9

RESET_AGAIN_S = 86_400.0  # a GPU that needs a second reset within this time is not trusted if a spare is free

ONE_NODE_TRIES_MAX = 3  # the same exception on one node without a spare: as many attempts as with a restart and a swap

_WORKER_FAULTS = (FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.HANG)


def default(incident: Incident, job: JobView) -> Action:
    """Return the action for an incident if the job has no policy of its own."""
    if incident.warning:
        return _warning(incident, job)
    match incident.kind:
        case FindingKind.REPEATED_EXCEPTION:
            return _repeated(incident, job)
        case FindingKind.WORKER_CRASH | FindingKind.WORKER_EXCEPTION | FindingKind.HANG | FindingKind.RANKS_MISSING:
            return _worker_fault(incident, job)
        case FindingKind.NODE_LOST:
            return _node_fault(incident, job)
        case FindingKind.GPU_ERROR if incident.severity == Severity.FATAL or job.unusable or incident.wants_reset:
            return _node_fault(incident, job)
        case FindingKind.GPU_ERROR:
            return _worker_fault(incident, job)
        case FindingKind.SILENT_CORRUPTION:
            return _corruption(incident, job)
        case FindingKind.NUMERICAL:
            return notify(
                f"{incident.cause} The run goes on; until it stays finite, no later step than the last finite one is restored"
            )
        case k if k == CORDONED:
            return _replace((incident.node,), f"{incident.node} is cordoned", job)
        case k if k == REPAIR:
            return _resize(job)
        case k if k == RESIZE:
            return _resize(job)
        case k if k == LOAN:
            return _lend(incident, job)
        case k if k == MAINTENANCE:
            return _leave(job)
        case _:
            return notify(f"{incident.kind} requires no action: {incident.cause}")


def _warning(incident: Incident, job: JobView) -> Action:
    """Swap a node that costs more than the swap, with a margin for uncertainty; otherwise notify the operators once."""
    share, node = incident.cost_share, incident.node
    if incident.wants_reset_later:
        return _reset_later(incident, job)
    if share is None or node not in job.nodes:
        return notify(incident.cause)
    lost_s = share * incident.confidence * job.remaining_s
    what = f"{incident.cause} Over the {_duration(job.remaining_s)} that the job may still run it costs {_duration(lost_s)}"
    if lost_s <= SWAP_MARGIN * job.change_s:
        return notify(f"{what}, too little for a swap, which costs {_duration(job.change_s)}")
    if incident.rank is not None and (others := _slow_elsewhere(incident, job)):
        return notify(f"{what}, but rank {incident.rank} was slow on {others}, too: it may have more work")
    if not job.reports_steps:
        return notify(
            f"{what}, more than a swap, but a swap interrupts this script without a save: it reports no steps"
        )
    if not set(job.spares) - _swapped_for_warnings(job):
        why = "the free spares were swapped out for being slow themselves" if job.spares else "no spare is free"
        return notify(f"{what}, more than a swap, but {why}")
    return hot_swap(f"{what}, and a swap {_duration(job.change_s)}; a spare is free", node)


def _slow_elsewhere(incident: Incident, job: JobView) -> str:
    """Nodes that were swapped because the same rank was slow there. If it is slow on their replacement as well, its work
    explains that better than a second slow node, and further swaps would only use up the spares."""
    swapped = {
        each.node
        for each in job.recent
        if each.kind == incident.kind and each.rank == incident.rank and each.action is not None and each.action.nodes
    }
    return ", ".join(sorted(swapped - {incident.node}))


def _swapped_for_warnings(job: JobView) -> set[str]:
    return {
        node
        for each in job.recent
        if each.warning and not each.wants_reset_later and each.action is not None
        for node in each.action.nodes
    }


def _reset_later(incident: Incident, job: JobView) -> Action:
    """Reset at the next checkpoint. A spare that takes over costs the job less than waiting for the reset does."""
    node, what = incident.node, incident.cause
    if node not in job.nodes or incident.confidence < RESET_SURE:
        return notify(what)
    if job.remaining_s <= SWAP_MARGIN * job.change_s:
        return wait(
            f"{what} The reset can wait: the job may end in {_duration(job.remaining_s)}, and a change costs "
            f"{_duration(job.change_s)}",
            retry_s=SWAP_MARGIN * job.change_s,
        )
    if node not in job.resettable:
        return notify(f"{what} A reset is due at the job's next boundary, but the agent of {node} cannot reset GPUs")
    in_place = gpu_reset(f"{what} A reset is due, no spare is free, and the run may stop after a save", node)
    if not set(job.spares) - _swapped_for_warnings(job):
        return in_place
    return hot_swap(
        f"{what} A reset is due; a spare takes over after a save, and {node} is reset then", node
    ).otherwise(in_place)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _repeated(incident: Incident, job: JobView) -> Action:
    """Stop for an error of the script only if two nodes have shown it; with a spare, try another node first."""
    repeated, node = incident.attribution, incident.node
    if repeated.nodes != 1:
        return stop(incident.cause)
    if why := _no_progress(incident, job):
        return stop(why)
    if job.unusable:
        return _unusable(incident, job)
    if job.spares and node in job.nodes:
        return hot_swap(
            f"only {node} has shown this exception so far ({incident.cause}); trying a spare before attributing it to the "
            "script",
            node,
        )
    if 0 < repeated.tries < ONE_NODE_TRIES_MAX:
        return restart(f"{incident.cause} Only {node} has shown it, and no spare is free: trying once more on {node}")
    return stop(f"{incident.cause} No spare was free for an attempt on another node.")


def _no_progress(incident: Incident, job: JobView) -> str:
    """Return why a job without progress should stop; empty if it should not."""
    if job.restarts_without_progress >= job.restarts_without_progress_max:
        if job.restarts_without_progress <= 1:
            return f"The generation finished no new step, and no restart is allowed without one: {incident.cause}"
        if not job.reports_steps:
            return (
                f"{job.restarts_without_progress} generations in a row failed within minutes of their start, and no optimizer "
                f"step was observed in them. {_ALLOWS_MORE} The last one ended with: {incident.cause}"
            )
        return (
            f"{job.restarts_without_progress} generations in a row finished no new step; the last one ended with: "
            f"{incident.cause}"
        )
    if job.restarts_without_advance >= ADVANCE_PATIENCE * job.restarts_without_progress_max:
        if not job.reports_steps:
            return (
                f"{job.restarts_without_advance} generations in a row failed within minutes of their start. Their optimizer "
                "steps were observed, but not reported by the script: whether its own checkpoints advance is not known. "
                f"{_ALLOWS_MORE} The last one ended with: {incident.cause}"
            )
        return (
            f"{job.restarts_without_advance} generations in a row did not pass step {job.furthest_step}; "
            f"the last one ended with: {incident.cause}"
        )
    return ""


def _worker_fault(incident: Incident, job: JobView) -> Action:
    if _cannot_begin(incident, job):
        return stop(f"{incident.cause} Correct the command line or the script: a restart does not help.")
    outage = job.outages > 0 and incident.attribution.error_class in OUTAGES
    if outage and job.outages >= OUTAGE_PATIENCE * job.restarts_without_progress_max:
        return stop(f"{job.outages} attempts in a row without progress; the last one ended with: {incident.cause}")
    if not outage and (why := _no_progress(incident, job)):
        return stop(why)
    if job.unusable:
        return _unusable(incident, job)
    if incident.kind == FindingKind.HANG and incident.wants_replacement and incident.node in job.nodes and job.spares:
        return hot_swap(
            f"the other ranks wait for a rank on {incident.node}, which diagnostics has lost, too: new processes there would "
            "meet the same network, and a spare is free",
            incident.node,
        )
    # A missing rank is no evidence against its node: it may have ended by the failure of another, whose finding was lost.
    before = job.before_on(incident, SUSPECT_WINDOW_S, *_WORKER_FAULTS) if incident.kind in _WORKER_FAULTS else ()
    suspect = bool(before) and incident.node in job.nodes
    if suspect and job.spares and (not outage or job.outages == 2):  # further swaps do not help against an outage
        return hot_swap(
            f"{incident.node} has had {len(before) + 1} worker faults in {SUSPECT_WINDOW_S / 60:.0f} minutes: "
            "the node is suspect and a spare is free",
            incident.node,
        )
    if outage and (left_s := _pause_s(job.outages) - (job.at - incident.detected_at)) > 0.01:
        return wait(
            f"{incident.cause} This failure may be transient: attempt {job.outages + 1} begins in {left_s:.0f} s",
            retry_s=left_s,
        )
    return restart(f"{_state_of_nodes(incident, job)}: new processes on the same nodes")


def _cannot_begin(incident: Incident, job: JobView) -> bool:
    """Whether the first start of the job has shown that no start can succeed. With a spare, another node is tried, because
    files may be missing or damaged on this one. A job that has finished a step, or was restarted before, is restarted."""
    found = incident.attribution
    is_first = job.furthest_step == 0 and job.step == 0 and not any(not each.planned for each in job.recent)
    return is_first and found.error_class == USAGE and found.blame is Blamed.USER and not job.spares


def _pause_s(outages: int) -> float:
    """Return the pause before the next attempt: 0 after the first failure, then growing."""
    return min(OUTAGE_PAUSE_MAX_S, OUTAGE_PAUSE_S * 2.0 ** min(outages - 2, 16)) if outages > 1 else 0.0


def _state_of_nodes(incident: Incident, job: JobView) -> str:
    """Return the reason for a restart on the same nodes, according to the evidence."""
    node = incident.node or "the node"
    because = incident.evidence.get("because", "") or incident.cause
    match incident.attribution.blame:
        case Blamed.HARDWARE if job.spares:
            return (
                f"the failure is attributed to the hardware of {node} ({because}); at the next fault a spare takes over"
            )
        case Blamed.HARDWARE:
            return f"the failure is attributed to the hardware of {node} ({because}), and no spare is free"
        case Blamed.USER:
            return f"the failure is attributed to the script ({because}), but it has occurred only once"
    if incident.kind == FindingKind.GPU_ERROR:
        return f"the driver's report about {node} requires new processes first"
    return "the failure is not attributed to a node"


def _corruption(incident: Incident, job: JobView) -> Action:
    """Replace the node that computes wrong results, together with the nodes that cannot be used."""
    node = incident.node
    if node in job.nodes:
        return _replace(tuple(dict.fromkeys((node, *job.unusable))), f"{node} computes wrong results", job)
    if job.unusable:
        return _unusable(incident, job)
    removed = f"; {node}, which computes wrong results, has already been removed" if node else ""
    return restart(f"the state may be corrupt: restoring the last verified checkpoint{removed}")


def _node_fault(incident: Incident, job: JobView) -> Action:
    if job.unusable:
        return _unusable(incident, job)
    if incident.node and incident.node not in job.nodes:
        return restart(f"{incident.node} has already been removed: new processes on the remaining nodes")
    if incident.kind == FindingKind.GPU_ERROR and incident.wants_reset:
        return restart(f"the GPUs of {incident.node} have been reset: new processes on the same nodes")
    return restart(f"{incident.node or 'the node'} is back in service, without its workers")


def _unusable(incident: Incident, job: JobView) -> Action:
    """Reset the GPUs if that is all that keeps nodes of the job from use; replace the nodes otherwise."""
    out = job.unusable
    pending = {node: job.resets[node] for node in out if node in job.resets}
    why = "; ".join(_why_unusable(node, job) for node in out)
    if len(pending) < len(out) or any(reset.obstacle for reset in pending.values()):
        return _replace(out, why, job)
    again = {each.node for each in job.recent if _was_reset(each, job)} & set(out)
    if again and len(out) <= len(job.spares):
        return _replace(out, f"{why}, and {', '.join(sorted(again))} was reset within the last day already", job)
    return _reset(out, pending, why, job)


def _reset(out: tuple[str, ...], pending: Mapping[str, PendingReset], why: str, job: JobView) -> Action:
    """The reset, and the actions that follow if it fails: the nodes are out of service then."""
    failed = (
        f"{'; '.join(f'{reset} of {node}' for node, reset in pending.items())} could not be put back to use by a reset"
    )
    recipe = gpu_reset(f"{why}; then new processes on the same nodes").otherwise(
        hot_swap(f"{failed}, and spares are free", *out)
    )
    if job.min_dp <= job.reachable_dp < job.dp:
        recipe = recipe.otherwise(
            scale_down(
                f"{failed} and no spare is free: {job.reachable_dp} of {job.dp} replicas continue",
                *out,
                dp=job.reachable_dp,
            )
        )
    return recipe.otherwise(
        scale_down(f"{failed} and no spare is free: the replicas without these nodes continue", *out)
    ).otherwise(wait(f"{failed}, no spare is free, and the other nodes cannot run the minimum of replicas"))


def _why_unusable(node: str, job: JobView) -> str:
    if node not in job.resets:
        return f"{node} cannot be used"
    pending = job.resets[node]
    needs = f"{pending} of {node} must be reset before it is used again"
    return f"{needs}, which is not possible ({pending.obstacle})" if pending.obstacle else needs


def _was_reset(incident: Incident, job: JobView) -> bool:
    action = incident.action
    return action is not None and action.kind is ActionKind.GPU_RESET and job.at - incident.fault_at <= RESET_AGAIN_S


def _replace(out: tuple[str, ...], why: str, job: JobView) -> Action:
    if len(out) <= len(job.spares):
        free = "a spare node is free" if len(job.spares) == 1 else f"{len(job.spares)} spare nodes are free"
        return hot_swap(f"{why}, and {free}", *out)
    if job.min_dp <= job.reachable_dp < job.dp:
        return scale_down(
            f"{why} and no spare is free: {job.reachable_dp} of {job.dp} replicas continue", *out, dp=job.reachable_dp
        )
    if job.reachable_dp >= job.dp:
        return restart(f"{why}, but the remaining nodes suffice for all {job.dp} replicas")
    return wait(
        f"{why}, no spare is free, and the other nodes cannot run the minimum of {job.min_dp} {_replicas(job.min_dp)}"
    )


def _leave(job: JobView) -> Action:
    """Handle announced maintenance with a planned change at a checkpoint, which repeats no steps."""
    leaving = sorted(job.notices, key=lambda node: (job.notices[node].left_s(job.at), node))
    if not leaving:
        return notify("the maintenance notice was withdrawn")
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
            f"maintenance of {', '.join(near)} starts {when}, and no spare is free: {replicas} of {job.dp} replicas continue",
            *near,
        )
    if near:
        return wait(
            f"no spare is free, and without {', '.join(near)} fewer than the minimum of {job.min_dp} "
            f"{_replicas(job.min_dp)} would be "
            "left: the job saves and continues until the machine is taken away"
        )
    return wait(f"maintenance of {names} starts {when}: no spare is free yet; waiting for one")


def _lend(incident: Incident, job: JobView) -> Action:
    """Give the replicas that a job of higher priority asks for. They return when there are nodes for them."""
    loan = incident.loan
    if loan is None or not job.min_dp <= loan.dp < job.dp:
        return ignore(f"{job.name} has no replica to give: it runs {job.dp}, and needs {job.min_dp}")
    return scale_down(
        f"{loan.job}, of priority {loan.priority}, lacks nodes: {loan.dp} of {job.dp} {_replicas(job.dp)} continue until nodes "
        "are free again",
        dp=loan.dp,
    )


def _replicas(count: int) -> str:
    return "replica" if count == 1 else "replicas"


def _resize(job: JobView) -> Action:
    if job.target_dp < job.dp:
        return scale_down(
            f"the target is {job.target_dp} {_replicas(job.target_dp)}, and {job.dp} run", dp=job.target_dp
        )
    if job.reachable_dp > job.dp:
        return scale_up(
            f"{job.reachable_dp} of {job.target_dp} {_replicas(job.target_dp)} can run now, and {job.dp} run",
            dp=job.reachable_dp,
        )
    return wait(
        f"the target is {job.target_dp} {_replicas(job.target_dp)}, but the available nodes can run {job.reachable_dp}"
    )
