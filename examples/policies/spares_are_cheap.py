"""Spare nodes are idle in any case: use one at the first suspicion, and let an operator examine the suspect node."""

from holdfast.policy import Action, FindingKind, Incident, JobView, default, hot_swap

DOUBTFUL = (FindingKind.WORKER_CRASH, FindingKind.HANG)


def decide(incident: Incident, job: JobView) -> Action:
    node = incident.node
    if node not in job.nodes or not job.spares:
        return default(incident, job)
    if incident.warning and incident.cost_share is not None:
        lost_s = incident.cost_share * job.remaining_s
        if lost_s > job.change_s:
            return hot_swap(f"{node} costs {lost_s:.0f} s until the end of the job, a swap {job.change_s:.0f} s", node)
    if incident.kind in DOUBTFUL and not incident.warning and not job.unusable:
        return hot_swap(f"{node} may be at fault, and a spare is free", node)
    return default(incident, job)
