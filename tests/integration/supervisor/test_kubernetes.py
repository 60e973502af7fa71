"""A real supervisor takes what the cluster says of machines: notices, failure domains; also after a change of leader."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from eventlogs import redis_log
from kube_cluster import ClusterApi, node, pod, serving
from supervising import MortalLog, PlayedAgent, Running, publish, start_supervisor
from waiting import wait_until_async

from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.kubernetes.machines import CONDEMNED
from holdfast.wire.events import finding_entry

pytestmark = pytest.mark.anyio

CORDONED = "Kubernetes: cordoned"
ZONE_B = {"topology.kubernetes.io/zone": "b"}


def settings(url: str) -> dict[str, Any]:
    return {
        "kubernetes_watch": True,
        "kubernetes_api": url,
        "kubernetes_namespaces": "ml",
        "provider": "kubernetes",
    }


async def until(supervisor: Running, name: str, **wanted: Any) -> dict[str, Any]:
    """Of a node."""

    async def there() -> Any:
        items = (await supervisor.get("/v1/nodes"))["items"]
        found = next((each for each in items if each["node"] == name), None)
        return found if found is not None and wanted.items() <= found.items() else None

    return dict(await wait_until_async(there, description=f"{name} with {wanted}"))


async def test_notices_and_zones_follow_the_cluster_and_survive_a_change_of_leader(
    redis_url: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    api = ClusterApi(node("m1"), node("m2", labels=ZONE_B))
    api.token = "secret"
    async with AsyncExitStack() as stack:
        url = stack.enter_context(serving(api))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        log = MortalLog(redis_log(redis_url))
        more = {**settings(url), "kubernetes_token_file": token}
        first = await start_supervisor(tasks, tmp_path / "1", log, name="sup-1", **more)
        second = await start_supervisor(tasks, tmp_path / "2", redis_log(redis_url), name="sup-2", **more)
        for name in ("m1", "m2"):
            tasks.start_soon(PlayedAgent(name, [first.control, second.control]).run)
        await until(first, "m2", state="spare", zone="b")
        api.put(node("m1", unschedulable=True))
        cordoned = await until(first, "m1", state="cordoned")
        assert CORDONED in cordoned["reason"]

        log.die_when(lambda _: True, after=False)  # the leader, in the middle of its watch
        api.put(node("m1"))
        api.put(node("m2", taints=("ToBeDeletedByClusterAutoscaler",), labels=ZONE_B))
        await until(second, "m2", state="cordoned")
        await until(second, "m1", state="spare")
        tasks.cancel_scope.cancel()


async def test_a_condemned_node_has_its_pod_deleted(redis_url: str, tmp_path: Path) -> None:
    api, log = ClusterApi(node("m1"), pod("p1", "m1")), redis_log(redis_url)
    token = tmp_path / "token"
    token.write_text("secret")
    async with AsyncExitStack() as stack:
        url = stack.enter_context(serving(api))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        supervisor = await start_supervisor(
            tasks, tmp_path, redis_log(redis_url), kubernetes_token_file=token, **settings(url)
        )
        tasks.start_soon(PlayedAgent("m1", [supervisor.control]).run)
        await until(supervisor, "m1", state="spare")
        wrong = Finding(
            id="f-1", kind=FindingKind.SILENT_CORRUPTION, severity=Severity.FATAL, at=1.0, since=1.0,
            summary="m1 computes wrong products", node="m1", recommended_actions=(Remedy.REPLACE_NODE,),
        )  # fmt: skip
        await publish(log, finding_entry(wrong))
        await wait_until_async(lambda: "DELETE pods/p1" in api.requests, description="the pod to be deleted")
        assert api.find("nodes", "m1")["metadata"]["annotations"] == {CONDEMNED: "m1 computes wrong products"}

        async def said() -> Any:
            found = (await supervisor.get("/v1/nodes/m1"))["reason"]
            return found if "pod p1 is deleted" in found else None

        await wait_until_async(said, description="the provider's answer")
        tasks.cancel_scope.cancel()
    await log.aclose()


async def test_a_right_that_is_missing_shows_in_the_api_until_it_is_given(redis_url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    api = ClusterApi(node("m1", unschedulable=True))
    api.refuse["nodes"] = 403
    async with AsyncExitStack() as stack:
        url = stack.enter_context(serving(api))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        supervisor = await start_supervisor(
            tasks, tmp_path, redis_log(redis_url), kubernetes_token_file=token, **settings(url)
        )
        tasks.start_soon(PlayedAgent("m1", [supervisor.control]).run)

        async def seen(problem: str) -> Any:
            bridge = await supervisor.get("/v1/kubernetes")
            problems = {each["what"]: each["problem"] for each in bridge["watched"]}
            there = "nodes" in problems and (problem in problems["nodes"] if problem else not problems["nodes"])
            return problems if there else None

        problems = await wait_until_async(partial(seen, "has no right to"), description="the refusal")
        assert problems["nodes"].startswith("may not list nodes: the service account has no right to")
        assert problems["pods of namespace ml"] == ""
        await until(supervisor, "m1", state="spare")
        del api.refuse["nodes"]
        await until(supervisor, "m1", state="cordoned")
        await wait_until_async(partial(seen, ""), description="no problem")
        tasks.cancel_scope.cancel()


async def test_a_supervisor_without_the_bridge_asks_nobody(redis_url: str, tmp_path: Path) -> None:
    api = ClusterApi(node("m1", unschedulable=True))
    async with AsyncExitStack() as stack:
        url = stack.enter_context(serving(api))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        supervisor = await start_supervisor(tasks, tmp_path, redis_log(redis_url), kubernetes_api=url)
        tasks.start_soon(PlayedAgent("m1", [supervisor.control]).run)
        await until(supervisor, "m1", state="spare")
        assert api.requests == []
        assert await supervisor.get("/v1/kubernetes") == {"watch": False, "watched": []}
        tasks.cancel_scope.cancel()
