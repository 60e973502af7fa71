"""After a crash, try one restart in place. If the job does not run again within two minutes, a spare takes over, or fewer
replicas continue."""

from holdfast.policy import Action, FindingKind, Incident, JobView, default, hot_swap, restart, scale_down, wait

TRY_S = 120.0
CRASHES = (FindingKind.WORKER_CRASH, FindingKind.HANG, FindingKind.RANKS_MISSING)


def decide(incident: Incident, job: JobView) -> Action:
    node = incident.node
    first = default(incident, job)
    # The default policy stops a job that makes no progress, and waits while a file system is unavailable.
    if incident.kind not in CRASHES or node not in job.nodes or first.kind in ("stop", "wait"):
        return first
    return (
        restart(f"one try in place of {TRY_S:.0f} s")
        .within(TRY_S)
        .otherwise(hot_swap(f"{node} did not come back", node))
        .otherwise(scale_down(f"{node} did not come back, and no spare did", node))
        .otherwise(wait("no node is left to continue on"))
    )
