"""An example policy: what to do about each incident. Validate it with `holdfast policy check examples/policy.py`."""

from holdfast.policy import Action, FindingKind, Incident, JobView, default, hot_swap, stop

WINDOW_S = 1800.0


def decide(incident: Incident, job: JobView) -> Action:
    if incident.kind == FindingKind.WORKER_EXCEPTION and "out of memory" in incident.cause.lower():
        return stop("out of memory comes again at the same batch size: a restart would not help")

    # Three faults of any kind in half an hour: this node costs more than it is worth.
    if incident.node in job.nodes and len(job.recent_on(incident.node, WINDOW_S)) >= 2 and job.spares:
        return hot_swap(f"third fault of {incident.node} within {WINDOW_S / 60:.0f} minutes", incident.node)

    return default(incident, job)
