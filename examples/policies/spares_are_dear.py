"""A spare costs as much as any other node: use one only for certain faults, and restart in place as long as that helps."""

from holdfast.policy import Action, FindingKind, Incident, JobView, check, default, gpu_reset, ignore, notify, restart

DAY_S = 86_400.0
WORTH_IT = 20.0  # swap a slow node only if that saves twenty times what the swap costs
CRASHES_MAX = 4  # on one node in a day, before a spare is taken
CRASHES = (FindingKind.WORKER_CRASH, FindingKind.HANG)


def decide(incident: Incident, job: JobView) -> Action:
    if incident.wants_reset_later and incident.node in job.resettable:
        return gpu_reset(f"after a save and in place, which takes no spare: {incident.cause}", incident.node)
    if incident.warning:
        if incident.cost_share is None:
            return ignore(f"no measured cost: {incident.cause}")
        if incident.cost_share * job.remaining_s < WORTH_IT * job.change_s:
            return notify(f"not worth a spare: {incident.cause}")
        return default(incident, job)
    answer = default(incident, job)
    if incident.kind in CRASHES and answer.nodes and not job.unusable:
        before = job.before_on(incident, DAY_S, *CRASHES)
        again = restart(f"crash {len(before) + 1} of {incident.node} today; a spare is taken at {CRASHES_MAX}")
        if len(before) + 1 < CRASHES_MAX and not check(again, incident, job):
            return again
    return answer
