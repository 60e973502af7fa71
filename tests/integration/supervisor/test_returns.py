"""A machine that failed is booted, and its node comes back: over real gRPC, with the settings of a real supervisor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from eventlogs import redis_log
from supervising import PlayedAgent, Running, publish, start_supervisor
from waiting import wait_until_async

from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.nodes import Check, Preflight
from holdfast.wire.events import finding_entry

pytestmark = pytest.mark.anyio

HOLD_S, PROBATION_S = 6.0, 5.0  # each is to be seen while it lasts

PASSED = (Check("disk", True, "9 GB free"),)


def booted(supervisor: Running, life: int) -> PlayedAgent:
    """The agent of the machine's so-manieth boot, which has passed its tests."""
    tested = Preflight(time.time(), 0.1, PASSED)
    return PlayedAgent("n1", [supervisor.control], f"i{life}", boot_id=f"boot {life}", preflight=tested)


async def test_a_node_is_held_down_after_its_reboot_and_is_a_spare_on_probation_then(
    redis_url: str, tmp_path: Path
) -> None:
    log = redis_log(redis_url)
    async with anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(
            tasks, tmp_path, redis_log(redis_url), node_hold_s=HOLD_S, node_probation_s=PROBATION_S
        )

        async def until(what: str, **wanted: object) -> Any:
            async def there() -> Any:
                nodes = {node["node"]: node for node in (await supervisor.get("/v1/nodes"))["items"]}
                node = nodes.get("n1")
                return node if node and all(node[key] == value for key, value in wanted.items()) else None

            return await wait_until_async(there, description=what)

        async with anyio.create_task_group() as first:
            first.start_soon(booted(supervisor, 1).run)
            await until("the node to connect", state="spare", returns_by="")
            now = time.time()
            recommended_actions = (Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)
            dead = Finding(
                id="f-1", kind=FindingKind.GPU_ERROR, severity=Severity.FATAL, at=now, since=now,
                summary="Xid 79 on GPU 0 of n1", node="n1", recommended_actions=recommended_actions,
            )  # fmt: skip
            await publish(log, finding_entry(dead))
            out = await until("the node to be out of service", state="cordoned", returns_by="itself", hold_until=None)
            assert "when its machine has been booted again and has passed its tests" in out["reason"]
            first.cancel_scope.cancel()

        before = time.time()
        tasks.start_soon(booted(supervisor, 2).run)
        held = await until("the node to be held down", state="cordoned", boot_id="boot 2")
        assert held["reason"].startswith("on hold until")
        assert before + HOLD_S <= held["hold_until"] <= time.time() + HOLD_S
        spare = await until("the node to be a spare", state="spare")
        assert time.time() >= held["hold_until"]
        assert spare["reason"].startswith("on probation until")
        assert (
            spare["probation_until"] >= held["hold_until"] + PROBATION_S
        )  # it begins when the node is a spare, at the earliest then
        await until("the end of its probation", state="spare", probation_until=None, reason="")
        tasks.cancel_scope.cancel()
    await log.aclose()
