"""A policy: as the default one, but a job waits for a node rather than going on with fewer replicas."""

from __future__ import annotations

from holdfast.policy import Action, ActionKind, Incident, JobView, default, wait


def decide(incident: Incident, job: JobView) -> Action:
    action = default(incident, job)
    if action.kind is ActionKind.SCALE_DOWN:
        return wait(f"this job keeps its size: waiting for a node ({action.reason})")
    return action
