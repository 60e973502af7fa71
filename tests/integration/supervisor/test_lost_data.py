"""A Redis that has lost data: its leader has the state in memory, and puts it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from eventlogs import FLEET, redis_log
from redis import asyncio as aioredis
from supervising import (
    PlayedAgent,
    Running,
    crash,
    job_body,
    played_agents,
    publish,
    start_supervisor,
    until_phase,
)
from waiting import TIMEOUT_S, wait_until_async

from holdfast.domain.orders import Prepare
from holdfast.log.keys import Keys
from holdfast.supervisor.leader.term import LeaseTimes

pytestmark = pytest.mark.anyio

# The lease of a process that did not run for some seconds does not expire, and its loss is noticed soon.
WATCHFUL = LeaseTimes(ttl_s=30.0, renew_s=0.3, retry_s=0.05, margin_s=0.2)
BRIEF = LeaseTimes(ttl_s=1.5, renew_s=0.3, retry_s=0.05, margin_s=0.2)


async def confirmed(supervisor: Running, job: str) -> None:
    """It runs, and the present leader has heard so from every node."""

    async def running() -> bool:
        async with supervisor.client() as client:
            answer = await client.get(f"/v1/jobs/{job}")
        return answer.status_code == 200 and answer.json()["phase"] == "running"

    await wait_until_async(running, description=f"{job} to run")


async def leads_since(supervisors: list[Running], epoch: int) -> Running:
    """Who leads under a higher epoch."""

    async def found() -> Running | None:
        for each in supervisors:
            async with each.client() as client:
                answer = await client.get("/v1/version")  # 503 while there is no state at all
            version = answer.json()
            if answer.status_code == 200 and version["leader"] and version["epoch"] > epoch:
                return each
        return None

    return await wait_until_async(found, description="a later leader")


async def asked_after_a_renewal(redis: aioredis.Redis, *, standby: bool) -> None:
    """The leader has renewed its lease once more, and then the standby has asked for it."""
    keys = Keys(FLEET)
    before = await redis.get(keys.renewal("supervisor"))

    async def renewed() -> bool:
        return bool(await redis.get(keys.renewal("supervisor")) != before)

    async def asked() -> bool:
        return bool(await redis.exists(keys.candidate("supervisor")))

    await wait_until_async(renewed, description="a renewal")
    if standby:
        await redis.delete(keys.candidate("supervisor"))
        await wait_until_async(asked, description="the standby to ask")


async def reported(supervisor: Running) -> list[str]:
    async with (
        supervisor.client() as client,
        client.stream("GET", "/v1/events", headers={"Last-Event-ID": "0-0"}) as answer,
    ):
        found: list[str] = []
        async for line in answer.aiter_lines():
            if "Redis has lost" in line:
                return [*found, line]
            found.append(line)
    return found


def orders(agents: list[PlayedAgent]) -> list[dict[str, Any]]:
    return [dict(agent.executed) for agent in agents]


@pytest.mark.parametrize("standby", [False, True])
async def test_an_emptied_redis_gets_its_state_back(redis_url: str, tmp_path: Path, standby: bool) -> None:
    """No order is given a second time, the job goes on, and a fault after that is handled once."""
    log = redis_log(redis_url)
    async with aioredis.Redis.from_url(redis_url) as redis, anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), name="a", times=WATCHFUL)
        others = []
        if standby:  # it asks for the lease five times a second, and has no state
            others.append(await start_supervisor(tasks, tmp_path / "b", redis_log(redis_url), name="b", times=WATCHFUL))
        async with played_agents(tasks, ["n1", "n2"], [each.control for each in (first, *others)]) as agents:
            await first.post("/v1/jobs", job_body())
            await until_phase(first, "gpt", "running")
            before, epoch = orders(agents), (await first.get("/v1/version"))["epoch"]
            await redis.flushall()

            assert await leads_since([first, *others], epoch) is first
            await confirmed(first, "gpt")
            assert orders(agents) == before, "a healthy job got orders"
            with anyio.fail_after(TIMEOUT_S):
                assert "put back from this supervisor's memory" in (await reported(first))[-1]
            await publish(log, crash("gpt", 1, "n1", 0))

            async def resolved() -> bool:
                incidents = (await first.get("/v1/incidents"))["items"]
                return [each["state"] for each in incidents] == ["resolved"]

            await wait_until_async(resolved, description="the incident to be resolved")
            for agent in agents:
                prepared = agent.generations(Prepare)
                assert len(prepared) == len(set(prepared)) == 2
        tasks.cancel_scope.cancel()
    await log.aclose()


@pytest.mark.parametrize(("standby", "elected"), [(False, False), (True, False), (True, True)])
async def test_older_data_does_not_undo_what_was_done(
    redis_url: str, tmp_path: Path, standby: bool, elected: bool
) -> None:
    """After a failover to a replica that lacks the last writes, maybe an election among them: a job that was submitted since
    then runs on. A standby that finds no lease there does not take it."""
    async with aioredis.Redis.from_url(redis_url) as redis, anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), name="a", times=WATCHFUL)
        both = [first]
        if standby:
            both.append(await start_supervisor(tasks, tmp_path / "b", redis_log(redis_url), name="b", times=WATCHFUL))
        async with played_agents(tasks, ["n1", "n2"], [each.control for each in both]) as agents:

            async def two_nodes() -> bool:
                return len((await first.get("/v1/nodes"))["items"]) == 2

            await wait_until_async(two_nodes, description="two nodes")
            older = {key: await redis.dump(key) for key in await redis.keys()}
            epoch = (await first.get("/v1/version"))["epoch"]
            if elected:
                await redis.delete(Keys(FLEET).lease("supervisor"))
            leader = await leads_since(both, epoch if elected else epoch - 1)
            await leader.post("/v1/jobs", job_body())
            await until_phase(leader, "gpt", "running")
            before, epoch = orders(agents), (await leader.get("/v1/version"))["epoch"]
            await asked_after_a_renewal(redis, standby=standby)
            async with redis.pipeline(transaction=True) as at_once:
                at_once.flushall()
                for key, value in older.items():
                    if value is not None and b":lease:" not in key:
                        at_once.restore(key, 0, value)
                await at_once.execute()
            assert await leads_since(both, epoch) is leader
            await confirmed(leader, "gpt")
            assert orders(agents) == before, "a healthy job got orders"
        tasks.cancel_scope.cancel()


async def test_a_state_that_nobody_has_is_reported_as_lost(redis_url: str, tmp_path: Path) -> None:
    """The supervisor and Redis are both started again, Redis without its data: the history says that there was a leader."""
    async with aioredis.Redis.from_url(redis_url) as redis, anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), times=BRIEF)
        await first.post("/v1/jobs", job_body())
        first.scope.cancel()

        async def released() -> bool:
            return not await redis.keys("*:lease:*")

        await wait_until_async(released, description="the supervisor to end")
        await redis.flushall()
        again = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), times=BRIEF)
        assert (await again.get("/v1/jobs"))["items"] == []
        with anyio.fail_after(TIMEOUT_S):
            assert "no supervisor has them in memory" in (await reported(again))[-1]
        tasks.cancel_scope.cancel()
