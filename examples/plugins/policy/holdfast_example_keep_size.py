"""A policy: like the default policy, but a job waits for a node instead of continuing with fewer replicas."""

from __future__ import annotations

from holdfast.policy import Action, ActionKind, Incident, JobView, default, wait


def decide(incident: Incident, job: JobView) -> Action:
    action = default(incident, job)
    if action.kind is ActionKind.SCALE_DOWN:
        return wait(f"this job keeps its size: waiting for a node ({action.reason})")
    return action
