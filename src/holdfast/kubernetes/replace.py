"""Moves an agent from an unschedulable machine to another one: its pod is deleted, its Job creates another pod, and the
scheduler places that on another machine.

    unschedulable ──► the machine is marked, so that no pod is placed on it ──► the agent's pod is deleted ──► another pod

The mark comes first for two reasons. The scheduler would otherwise place the new pod on the machine of the deleted one. And a
leader that ends between the two actions has deleted nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import structlog

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.kubernetes.api import MERGE_PATCH, Access, Api, Resource
from holdfast.kubernetes.bridge import AGENTS
from holdfast.kubernetes.machines import CONDEMNED, NODE, POD, Object, Pod, pod

REASON_CHARS_MAX = 200
# https://cloud.google.com/ai-hypercomputer/docs/manage/manage-gke-clusters
FAULT_BEHAVIOR = "cloud.google.com/fault-behavior"

log = structlog.get_logger("holdfast.kubernetes.replace")


class Mark(StrEnum):
    """The action on the machine before its pod is deleted."""

    NONE = "none"  # no action, so the next pod may be placed on it again
    CORDON = "cordon"  # cordon it as by `kubectl cordon`, with an annotation
    REPORT = "report"  # cordon it, and report it as faulty to GKE, which repairs or replaces the host


class Replacer:
    """`namespaces`: namespaces of the pods of agents."""

    def __init__(self, access: Access, namespaces: Sequence[str], mark: Mark) -> None:
        """Raises `InvalidSpec`."""
        if not namespaces:
            raise InvalidSpec(
                "HOLDFAST_KUBERNETES_NAMESPACES", "", "the namespaces of jobs, as the provider deletes their pods"
            )
        self._access, self._namespaces, self._mark = access, tuple(namespaces), mark

    async def replace(self, node: str, reason: str) -> str:
        """Replace the pod of a node. Returns a description of the actions. Raises `NotFound` if the node has no pod, `Conflict`
        if it has several, `Refused` or `Unavailable`."""
        async with Api(self._access) as api:
            held = await self._pod(api, node)
            done = []
            if self._mark is not Mark.NONE:
                done.append(await self._mark_machine(api, held.machine, reason))
            done.append(await _delete(api, held))
            return "; ".join(done)

    async def _pod(self, api: Api, node: str) -> Pod:
        """Return the pod of the agent: on the machine of this name or, if agents share machines, the pod of this name."""
        found: list[Pod] = []
        for namespace in self._namespaces:
            objects, _ = await api.list(Resource(POD, "pods", namespace, AGENTS))
            found += [held for each in objects if (held := _of_agent(each)) and node in (held.machine, held.name)]
        if named := [held for held in found if held.name == node and held.machine]:
            found = named
        if not found:
            raise NotFound(f"no pod of an agent is on {node} in {', '.join(self._namespaces)}: nothing was deleted")
        if len(found) > 1:
            names = ", ".join(sorted(f"{held.namespace}/{held.name}" for held in found))
            raise Conflict(f"{node} has several pods of agents ({names}): delete the right one by kubectl delete pod")
        return found[0]

    async def _mark_machine(self, api: Api, machine: str, reason: str) -> str:
        path = f"{Resource(NODE, 'nodes').path}/{machine}"
        seen = await api.request("GET", path, f"get node {machine}")
        was_cordoned = (seen.get("spec") or {}).get("unschedulable") is True
        about: dict[str, object] = {}
        if not was_cordoned:  # a cordon by someone else is not marked as Holdfast's
            about["annotations"] = {CONDEMNED: " ".join(reason.split())[:REASON_CHARS_MAX]}
        if self._mark is Mark.REPORT:
            about["labels"] = {FAULT_BEHAVIOR: "unspecified"}
        body = {"metadata": about, "spec": {"unschedulable": True}}
        await api.request("PATCH", path, f"patch node {machine}", body=body, content_type=MERGE_PATCH)
        log.warning("a machine is cordoned in the cluster", machine=machine, mark=str(self._mark), reason=reason)
        reported = " and reported as faulty" if self._mark is Mark.REPORT else ""
        return (
            f"machine {machine} was cordoned already{reported}"
            if was_cordoned
            else f"machine {machine} is cordoned{reported}"
        )


def _of_agent(found: Object) -> Pod | None:
    """Return the pod; None if it has ended, so that there is nothing to delete."""
    phase = (found.get("status") or {}).get("phase")
    return None if phase in ("Succeeded", "Failed") else pod(found)


async def _delete(api: Api, held: Pod) -> str:
    resource = Resource(POD, "pods", held.namespace)
    body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": held.uid}}
    what = f"delete pod {held.namespace}/{held.name}"
    try:
        await api.request("DELETE", f"{resource.path}/{held.name}", what, body=body)
    except NotFound:
        return f"pod {held.name} is gone"
    log.warning("a pod is deleted, so that another comes elsewhere", pod=held.name, namespace=held.namespace)
    return f"pod {held.name} is deleted, and another one is scheduled"
