"""Other ways to lose the lead: a stale leader, a Redis that goes away and comes back, a supervisor that is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from eventlogs import FLEET, redis_log
from redis import asyncio as aioredis
from servers import RedisServer
from supervising import (
    QUICK,
    PlayedAgent,
    Running,
    crash,
    job_body,
    played_agents,
    publish,
    start_supervisor,
    until_phase,
)
from waiting import wait_until_async

from holdfast.domain.errors import Unavailable
from holdfast.domain.orders import Prepare
from holdfast.log.embedded import MEMORY_MAX
from holdfast.log.keys import Keys
from holdfast.supervisor.leader.term import LeaseTimes

pytestmark = pytest.mark.anyio

ABSENCE_S = 3.0
SLOW = LeaseTimes(ttl_s=60, renew_s=30, retry_s=0.1, margin_s=0.1)
STALE = LeaseTimes(ttl_s=60, renew_s=2.0, retry_s=60, margin_s=0.1)  # seldom looks


async def resolved(supervisor: Running, count: int = 1) -> list[Any]:
    """Every incident, once that many are there and all are resolved."""

    async def there() -> list[Any] | None:
        incidents = (await supervisor.get("/v1/incidents"))["items"]
        done = len(incidents) >= count and all(incident["state"] == "resolved" for incident in incidents)
        return incidents if done else None

    return await wait_until_async(there, description=f"{count} resolved incidents")


async def takes_the_lead(supervisor: Running, redis: aioredis.Redis) -> None:
    """The lease is taken away until this one has it: the other one may look at that moment, and take it back."""

    async def leads() -> bool:
        if (await supervisor.get("/v1/version"))["leader"]:
            return True
        await redis.delete(Keys(FLEET).lease("supervisor"))
        return False

    await wait_until_async(leads, description="another leader", poll_s=1.0)


def assert_prepared_once(agents: list[PlayedAgent]) -> None:
    for agent in agents:
        prepared = agent.generations(Prepare)
        assert len(prepared) == len(set(prepared)), f"{agent.node} prepared {prepared}"


async def test_a_leader_that_does_not_know_of_its_end_writes_and_does_nothing(redis_url: str, tmp_path: Path) -> None:
    """Its lease is taken away behind its back; it learns of it when it wants to write, or to renew it."""
    log = redis_log(redis_url)
    async with aioredis.Redis.from_url(redis_url) as redis, anyio.create_task_group() as tasks:
        stale = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), name="a", times=STALE)
        async with played_agents(tasks, ["n1", "n2"], [stale.control]) as agents:
            await stale.post("/v1/jobs", job_body())
            await until_phase(stale, "gpt", "running")
            fresh = await start_supervisor(tasks, tmp_path / "b", log, name="b", times=SLOW)
            await takes_the_lead(fresh, redis)
            for agent in agents:
                agent.endpoints = [stale.control, fresh.control]
            await publish(log, crash("gpt", 1, "n1", 0))
            incidents = await resolved(fresh)
            epoch = (await fresh.get("/v1/version"))["epoch"]  # it serves before it leads
            assert len(incidents) == 1
            assert_prepared_once(agents)
            assert all(agent.epochs[-1] == epoch for agent in agents)

            async def has_noticed() -> bool:
                return not (await stale.get("/v1/version"))["leader"]

            await wait_until_async(has_noticed, description="the first one to notice")
            # One that comes now and asks again. Of the first two nothing is certain: a write that meets the end of its stream
            # replaces the reason by gRPC's own.
            late = PlayedAgent("n3", [stale.control])
            tasks.start_soon(late.run)
            await wait_until_async(
                lambda: any("not the leader" in refusal for refusal in late.refusals),
                description="an agent to be sent away by the first one",
            )
        tasks.cancel_scope.cancel()


async def test_a_full_redis_stops_decisions_and_nothing_else(own_server: RedisServer, tmp_path: Path) -> None:
    """Whoever asks gets the reason; nobody's workers are touched; when there is room, what was held up is done."""
    log = redis_log(own_server.url)
    async with aioredis.Redis.from_url(own_server.url) as redis, anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(tasks, tmp_path / "a", redis_log(own_server.url), times=QUICK)
        async with played_agents(tasks, ["n1", "n2"], [supervisor.control]) as agents, supervisor.client() as client:
            await supervisor.post("/v1/jobs", job_body())
            await until_phase(supervisor, "gpt", "running")
            before = [dict(agent.executed) for agent in agents]
            await redis.config_set("maxmemory", 1)
            with pytest.raises(Unavailable, match=r"the memory of Redis at .* is full"):
                await publish(log, crash("gpt", 1, "n1", 0))
            refused = await client.post("/v1/jobs/gpt/stop")
            assert refused.status_code == 503
            assert "is full" in refused.json()["detail"]

            async def unhealthy() -> bool:
                return (await client.get("/healthz")).status_code == 503

            await wait_until_async(unhealthy, description="the health check to say so")
            assert "is full" in (await client.get("/healthz")).json()["detail"]
            assert "is full" in (await supervisor.get("/v1/version"))["trouble"]
            assert "is full" in (await supervisor.get("/v1/jobs/gpt"))["reason"]
            assert (await client.get("/readyz")).status_code == (await client.get("/livez")).status_code == 200
            await anyio.sleep(2 * QUICK.ttl_s)  # a lease can be renewed, and a new one cannot be taken
            assert [dict(agent.executed) for agent in agents] == before, "nothing was ordered"
            await redis.config_set("maxmemory", MEMORY_MAX)
            await publish(log, crash("gpt", 1, "n1", 0))
            [incident] = await resolved(supervisor)
            assert incident["kind"] == "worker_crash"
            assert_prepared_once(agents)

            async def healthy() -> bool:
                return (await client.get("/healthz")).status_code == 200

            await wait_until_async(healthy, description="the health check to be content")
            assert "is full" not in (await supervisor.get("/v1/jobs/gpt"))["reason"]
        tasks.cancel_scope.cancel()
    await log.aclose()


async def test_a_leader_that_may_not_read_says_so(own_server: RedisServer, tmp_path: Path) -> None:
    """Its lease is renewed all the same, and without a new finding it writes nothing that could fail."""
    async with aioredis.Redis.from_url(own_server.url) as redis, anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(tasks, tmp_path / "a", redis_log(own_server.url), times=QUICK)
        async with supervisor.client() as client:

            async def is_healthy() -> bool:
                return (await client.get("/healthz")).status_code == 200

            async def is_unhealthy() -> bool:
                return not await is_healthy()

            await wait_until_async(is_healthy, description="the supervisor to lead")
            await redis.execute_command("ACL", "SETUSER", "default", "-xreadgroup")  # type: ignore[no-untyped-call]
            await wait_until_async(is_unhealthy, description="the health check to say so")
            assert "no permissions to run the 'xreadgroup' command" in (await client.get("/healthz")).json()["detail"]
            await redis.execute_command("ACL", "SETUSER", "default", "+xreadgroup")  # type: ignore[no-untyped-call]
            await wait_until_async(is_healthy, description="the health check to be content")
        tasks.cancel_scope.cancel()


async def test_redis_goes_away_amid_an_incident_and_comes_back(own_server: RedisServer, tmp_path: Path) -> None:
    log = redis_log(own_server.url)
    async with anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(tasks, tmp_path / "a", log, times=QUICK)
        async with played_agents(tasks, ["n1", "n2"], [supervisor.control]) as agents:
            await supervisor.post("/v1/jobs", job_body())
            await until_phase(supervisor, "gpt", "running")
            for agent in agents:
                agent.steps = False  # the incident stays open: its generation does not step yet
            await publish(log, crash("gpt", 1, "n1", 0))
            await until_phase(supervisor, "gpt", "starting")
            before = (await supervisor.get("/v1/incidents"))["items"]
            await anyio.to_thread.run_sync(own_server.stop)
            await wait_until_async(lambda: not any(agent.connected for agent in agents), description="no leader")
            async with supervisor.client() as client:
                answer = await client.get("/v1/jobs/gpt")
            assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
            assert "Redis" in answer.json()["detail"]
            await anyio.sleep(ABSENCE_S)
            await anyio.to_thread.run_sync(own_server.start)
            await wait_until_async(lambda: all(agent.connected for agent in agents), description="the leader again")
            for agent in agents:
                agent.steps = True
            await publish(log, crash("gpt", 2, "n2", 1, name="f-2"))
            after = await resolved(supervisor)
            assert before[0]["id"] in [incident["id"] for incident in after]
            await until_phase(supervisor, "gpt", "running")
            assert_prepared_once(agents)
        tasks.cancel_scope.cancel()


async def test_a_new_supervisor_carries_on_from_what_was_committed(redis_url: str, tmp_path: Path) -> None:
    """Stopped in order, it gives the lease back: the next one leads at once, and knows jobs, nodes and incidents."""
    async with anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), times=SLOW)
        async with played_agents(tasks, ["n1", "n2"], [first.control]) as agents:
            await first.post("/v1/jobs", job_body())
            await until_phase(first, "gpt", "running")
            first.scope.cancel()
            began = anyio.current_time()
            second = await start_supervisor(tasks, tmp_path / "b", redis_log(redis_url), times=SLOW)
            assert anyio.current_time() - began < SLOW.ttl_s / 2
            for agent in agents:
                agent.endpoints = [second.control]
            await wait_until_async(lambda: all(len(a.epochs) == 2 for a in agents), description="both agents to return")
            assert (await second.get("/v1/jobs/gpt"))["phase"] == "running"
            sizes = [size for _, size in (await second.get("/v1/jobs/gpt/goodput"))["world_sizes"]]
            assert sizes == [0, 2], "the history is rebuilt"
            assert_prepared_once(agents)
        tasks.cancel_scope.cancel()
