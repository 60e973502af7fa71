"""An example policy. Check it with `holdfast policy check examples/policy.py`."""

from holdfast.policy import Action, FindingKind, Incident, JobView, default, hot_swap, stop

WINDOW_S = 1800.0


def decide(incident: Incident, job: JobView) -> Action:
    if incident.kind == FindingKind.WORKER_EXCEPTION and "out of memory" in incident.cause.lower():
        return stop("out of memory will recur at the same batch size: a restart would not help")

    # Three faults of any kind in half an hour: replace the node.
    if incident.node in job.nodes and len(job.recent_on(incident.node, WINDOW_S)) >= 2 and job.spares:
        return hot_swap(f"third fault of {incident.node} within {WINDOW_S / 60:.0f} minutes", incident.node)

    return default(incident, job)
