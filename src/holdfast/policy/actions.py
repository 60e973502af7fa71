"""The actions that a policy can return, and the checks whether an action is possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import MAINTENANCE, Action, ActionKind, Incident
from holdfast.policy.job import JobView

RETRY_MAX_S = 86_400.0  # maximum time before the policy is asked again

# Faults that end the run: doing nothing would leave the job without workers.
STRUCK = frozenset(
    {
        FindingKind.WORKER_CRASH,
        FindingKind.WORKER_EXCEPTION,
        FindingKind.REPEATED_EXCEPTION,
        FindingKind.NODE_LOST,
        FindingKind.HANG,
        FindingKind.RANKS_MISSING,
    }
)


def restart(reason: str) -> Action:
    """New processes on the same nodes, from the newest complete checkpoint."""
    return Action(ActionKind.RESTART, reason)


def hot_swap(reason: str, *nodes: str) -> Action:
    """Spares take over the ranks of `nodes` (default: of the incident's node). Unusable nodes are always replaced."""
    return Action(ActionKind.HOT_SWAP, reason, nodes=nodes)


def scale_down(reason: str, *nodes: str, dp: int | None = None) -> Action:
    """Remove the replicas of `nodes`; their healthy nodes become spares. `dp`: number of replicas to keep."""
    return Action(ActionKind.SCALE_DOWN, reason, nodes=nodes, dp=dp)


def scale_up(reason: str, dp: int | None = None) -> Action:
    """Add replicas, up to `dp` (default: as many as the job wants and the nodes allow)."""
    return Action(ActionKind.SCALE_UP, reason, dp=dp)


def cordon(reason: str, *nodes: str) -> Action:
    """Take `nodes` out of service for every job, and replace them in this one: by spares, otherwise by scaling down."""
    return Action(ActionKind.CORDON, reason, nodes=nodes)


def checkpoint_now(reason: str) -> Action:
    """Save at the next step and continue. Only for a run that is still healthy."""
    return Action(ActionKind.CHECKPOINT_NOW, reason)


def wait(reason: str, *, retry_s: float = 0.0) -> Action:
    """Do nothing until a node becomes available, or for `retry_s` if it is not 0; then the policy is asked again."""
    return Action(ActionKind.WAIT, reason, retry_s=retry_s)


def stop(reason: str) -> Action:
    """End the job as failed."""
    return Action(ActionKind.STOP, reason)


def notify(reason: str) -> Action:
    """Notify the operators and change nothing. Only for a run that is still healthy."""
    return Action(ActionKind.NOTIFY, reason)


def leaving(action: Action, incident: Incident, job: JobView) -> tuple[str, ...]:
    """Return the job's nodes that `action` removes: those it names (default: the incident's) and the unusable ones."""
    named = action.nodes or ((incident.node,) if incident.node else ())
    return tuple(node for node in job.nodes if node in named or node in job.unusable)


def check(action: Action, incident: Incident, job: JobView) -> str:
    """Return why `action` cannot be carried out now, in one sentence; empty if it can."""
    if not action.reason:
        return f"{action.kind} has no reason; pass a reason to every action"
    if incident.kind == MAINTENANCE and (why_not := _check_leaving(action, incident)):
        return why_not
    match action.kind:
        case ActionKind.RESTART:
            return (
                f"restart needs every node of the job, but {_list(job.unusable)} cannot be used" if job.unusable else ""
            )
        case ActionKind.HOT_SWAP:
            return _check_swap(leaving(action, incident, job), job)
        case ActionKind.SCALE_DOWN:
            return _check_scale_down(action.dp, leaving(action, incident, job), job)
        case ActionKind.SCALE_UP:
            return _check_scale_up(action.dp, job)
        case ActionKind.CORDON:
            return "" if action.nodes else "cordon names no node"
        case ActionKind.GPU_RESET:
            return "gpu_reset is not available: agents cannot reset a GPU yet"
        case ActionKind.CHECKPOINT_NOW | ActionKind.NOTIFY:
            return (
                f"{action.kind} is only for a running job, but {incident.kind} has ended the run"
                if _struck(incident)
                else ""
            )
        case ActionKind.WAIT:
            return (
                ""
                if 0.0 <= action.retry_s <= RETRY_MAX_S
                else f"wait: retry_s is {action.retry_s:g}, but must be between 0 and {RETRY_MAX_S:g}"
            )
        case ActionKind.STOP:
            return ""
    assert_never(action.kind)


def _check_leaving(action: Action, incident: Incident) -> str:
    """Reject changes that keep the node, because the policy would be asked again and again."""
    stays = f"{action.kind} keeps {incident.node}, whose maintenance is announced; remove the node, or return wait"
    match action.kind:
        case ActionKind.RESTART | ActionKind.SCALE_UP:
            return stays
        case ActionKind.HOT_SWAP | ActionKind.SCALE_DOWN | ActionKind.CORDON:
            named = action.nodes or ((incident.node,) if action.dp is None else ())
            return "" if incident.node in named else stays
        case _:
            return ""


def _spares(count: int) -> str:
    return "1 spare node" if count == 1 else f"{count} spare nodes"


def _check_swap(out: tuple[str, ...], job: JobView) -> str:
    if not out:
        return f"hot_swap names no node of {job.name}"
    if len(out) > len(job.spares):
        return f"hot_swap of {_list(out)} needs {_spares(len(out))}; free: {len(job.spares)}"
    return ""


def _check_scale_down(dp: int | None, out: tuple[str, ...], job: JobView) -> str:
    if dp is None:
        if not out:
            return f"scale_down names neither a number of replicas nor a node of {job.name}"
        return f"{job.name} already runs its minimum number of replicas ({job.min_dp})" if job.dp <= job.min_dp else ""
    if not job.min_dp <= dp < job.dp:
        return f"scale_down to dp {dp}: {job.name} runs dp {job.dp} and accepts no fewer than {job.min_dp}"
    return ""


def _check_scale_up(dp: int | None, job: JobView) -> str:
    if dp is not None and not job.dp < dp <= job.max_dp:
        return f"scale_up to dp {dp}: {job.name} runs dp {job.dp} and accepts at most {job.max_dp}"
    if job.reachable_dp < (dp or job.dp + 1):
        return f"scale_up to dp {dp or job.dp + 1}: the available nodes can run {job.reachable_dp} replicas"
    return ""


def _struck(incident: Incident) -> bool:
    return incident.kind in STRUCK


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(nodes)
