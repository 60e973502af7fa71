"""For fleets whose nodes change every hour: never wait for a node, scale down at once, and scale up only if that pays."""

from holdfast.policy import Action, FindingKind, Incident, JobView, check, default, scale_down, wait

PAYS = 10.0  # scale up if the remaining time of the job is at least this multiple of the cost of the change


def decide(incident: Incident, job: JobView) -> Action:
    if incident.kind == "repair" and job.remaining_s < PAYS * job.change_s:
        return wait(f"{job.remaining_s:.0f} s are left: too few to grow for")
    if incident.kind in (FindingKind.NODE_LOST, "maintenance") and not job.spares and incident.node in job.nodes:
        smaller = scale_down(f"{incident.node} is taken back, and nobody knows when another comes", incident.node)
        if not check(smaller, incident, job):
            return smaller
    return default(incident, job)
