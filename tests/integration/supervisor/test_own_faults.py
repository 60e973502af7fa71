"""The leader ends itself, and Redis, on request: real supervisors, a real Redis, over the API. The run is the same after it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from servers import RedisServer
from supervising import PlayedAgent, Running, job_body, played_agents, until_phase
from supervisor_processes import supervisor
from waiting import wait_until_async

from holdfast.domain.orders import Prepare, Start

pytestmark = [pytest.mark.anyio]

NODES = ("n1", "n2")


async def kill(by: Running, kind: str) -> Any:
    return await by.post("/v1/jobs/gpt/faults", {"kind": kind, "rank": 0})


async def until_answered(by: Running, epoch: int) -> Any:
    """The version, once a leader of a later epoch is there."""

    async def led() -> Any:
        async with by.client() as client:
            answer = await client.get("/v1/version")
        return answer.json() if answer.status_code == 200 and answer.json()["epoch"] > epoch else None

    return await wait_until_async(led, description="a new epoch")


def untouched(agents: list[PlayedAgent]) -> None:
    for agent in agents:
        assert (agent.generations(Prepare), agent.generations(Start)) == ([1], [1]), agent.node


async def test_a_leader_kills_itself_only_when_a_standby_is_there(own_server: RedisServer, tmp_path: Path) -> None:
    allowed = {"HOLDFAST_FAULT_LEADER_KILL": "standby"}
    async with supervisor(tmp_path / "a", own_server.url, **allowed) as first, anyio.create_task_group() as tasks:
        alone = first.running
        async with supervisor(tmp_path / "b", own_server.url, **allowed) as second:
            ends = [each.running.control for each in (first, second)]
            async with played_agents(tasks, NODES, ends) as agents:
                await alone.post("/v1/jobs", job_body(chaos=True))
                await until_phase(alone, "gpt", "running")
                epoch = (await alone.get("/v1/version"))["epoch"]
                done = await kill(second.running, "leader_kill")
                assert (done["state"], done["reason"]) == ("succeeded", "leader_kill, asked for gpt, follows at once")
                await wait_until_async(lambda: first.process.poll() is not None, description="its end")
                assert first.process.returncode == -signal.SIGKILL
                assert (await until_answered(second.running, epoch))["leader"]
                assert '"event": "fault injected"' in first.log.read_text()
                assert (await until_phase(second.running, "gpt", "running"))["generation"] == 1
                assert (await second.running.get("/v1/incidents"))["items"] == []
                untouched(agents)
                refused = await kill(second.running, "leader_kill")
                assert refused["state"] == "failed"
                assert "no standby has asked for the lead within the last 3 s" in refused["reason"]
                assert second.process.poll() is None


async def test_redis_is_killed_and_the_leader_goes_on_with_the_same_run(
    own_server: RedisServer, tmp_path: Path
) -> None:
    allowed = {"HOLDFAST_FAULT_REDIS_KILL": "restarted"}
    async with (
        supervisor(tmp_path / "a", own_server.url, **allowed) as only,
        anyio.create_task_group() as tasks,
        played_agents(tasks, NODES, [only.running.control]) as agents,
    ):
        await only.running.post("/v1/jobs", job_body(chaos=True))
        await until_phase(only.running, "gpt", "running")
        before = await only.running.get("/v1/version")
        assert before["event_log"]
        assert (await kill(only.running, "redis_kill"))["state"] == "succeeded"

        def ended() -> bool:
            return own_server.exit_code == 0  # type: ignore[attr-defined, no-any-return]

        if hasattr(own_server, "exit_code"):
            await wait_until_async(ended, description="the end of Redis, as after SHUTDOWN")
        own_server.stop()
        await wait_until_async(lambda: "stepping down" in only.log.read_text(), description="the end of the term")
        own_server.start()

        async def back() -> Any:
            async with only.running.client() as client:
                answer = await client.get("/v1/version")
            return answer.json() if answer.status_code == 200 and answer.json()["event_log"] else None

        after = await wait_until_async(back, description="another lifetime of Redis")
        assert after["event_log"] != before["event_log"]
        assert (await until_phase(only.running, "gpt", "running", timeout_s=40))["generation"] == 1
        assert (await only.running.get("/v1/incidents"))["items"] == []
        untouched(agents)
        assert (await only.running.post("/v1/nodes/n1/cordon", {"reason": "commands are answered"}))["state"] == (
            "succeeded"
        )


async def test_without_a_setting_neither_is_touched(own_server: RedisServer, tmp_path: Path) -> None:
    async with (
        supervisor(tmp_path / "a", own_server.url) as only,
        anyio.create_task_group() as tasks,
        played_agents(tasks, NODES, [only.running.control]),
    ):
        await only.running.post("/v1/jobs", job_body(chaos=True))
        await until_phase(only.running, "gpt", "running")
        before = await only.running.get("/v1/version")
        for kind, setting in (("leader_kill", "LEADER_KILL=standby"), ("redis_kill", "REDIS_KILL=restarted")):
            done = await kill(only.running, kind)
            assert done["state"] == "failed"
            assert f"this supervisor does not allow {kind}; set HOLDFAST_FAULT_{setting}" in done["reason"]
        async with only.running.client() as client:
            await only.running.post("/v1/jobs", job_body("calm", nodes=1))
            answer = await client.post("/v1/jobs/calm/faults", json={"kind": "leader_kill", "rank": 0})
            assert answer.status_code == 409
            assert "calm does not allow injected faults" in answer.json()["detail"]
        after = await only.running.get("/v1/version")
        assert (after["epoch"], after["event_log"]) == (before["epoch"], before["event_log"])
