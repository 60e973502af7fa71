"""What a policy script imports. A script defines one function, pure and quick (its deadline is one second):

    from holdfast.policy import Action, Incident, JobView, default, stop

    def decide(incident: Incident, job: JobView) -> Action:
        if incident.kind == "worker_exception" and "CUDA out of memory" in incident.cause:
            return stop("out of memory will recur at the same batch: a restart would not help")
        return default(incident, job)

An answer may be a recipe, walked until a rung succeeds: `restart("…").within(300).otherwise(hot_swap("…"))`.

`check` returns why an action cannot be carried out. In that case, and if a policy raises or times out, the default policy
decides."""

from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.domain.nodes import Notice
from holdfast.policy.actions import (
    ACTIONS,
    RUNGS_MAX,
    ActionSpec,
    Aim,
    Effect,
    after_steps,
    check,
    check_rung,
    checkpoint_now,
    cordon,
    flaw,
    gpu_reset,
    hot_swap,
    ignore,
    leaving,
    notify,
    reset_targets,
    restart,
    scale_down,
    scale_up,
    set_interval,
    stop,
    wait,
)
from holdfast.policy.default import COMMUNICATION, MAINTENANCE_LEAD_S, OUTAGES, default
from holdfast.policy.job import JobView, PendingReset

__all__ = [
    "ACTIONS",
    "COMMUNICATION",
    "MAINTENANCE_LEAD_S",
    "OUTAGES",
    "RUNGS_MAX",
    "Action",
    "ActionKind",
    "ActionSpec",
    "Aim",
    "Effect",
    "FindingKind",
    "Incident",
    "JobView",
    "Notice",
    "PendingReset",
    "Severity",
    "after_steps",
    "check",
    "check_rung",
    "checkpoint_now",
    "cordon",
    "default",
    "flaw",
    "gpu_reset",
    "hot_swap",
    "ignore",
    "leaving",
    "notify",
    "reset_targets",
    "restart",
    "scale_down",
    "scale_up",
    "set_interval",
    "stop",
    "wait",
]
