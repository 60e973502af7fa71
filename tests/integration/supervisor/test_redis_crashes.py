"""Redis is killed and started again between any two writes of an incident: it is handled once, by whoever leads then."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import redis
from eventlogs import redis_log
from servers import RedisServer
from supervising import QUICK, crash, job_body, played_agents, publish, start_supervisor, until_phase
from waiting import wait_until_async

from holdfast.domain.orders import Prepare, Start
from holdfast.log.protocol import Commit, Lease
from holdfast.log.redis import RedisLog

pytestmark = pytest.mark.anyio

NODES = ("n1", "n2", "n3")
WORDS = {
    "the_incident_is_opened": b'"state":"open"',
    "the_new_generation_is_planned": b'"stage":"planned"',
    "the_new_generation_is_started": b'"stage":"started"',
    "every_rank_has_stepped": b'"stage":"stepping"',
}


class CrashingRedis:
    """Crashes once, at the commit that publishes `words`, and starts again."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.words = b""
        self.after = False
        self.crashed = False

    def log(self) -> RedisLog:
        log = redis_log(self._server.url)
        commit_to_log = log.commit

        async def commit(lease: Lease, commit: Commit) -> None:
            due = bool(self.words) and any(self.words in entry.data for _, entry in commit.append) and not self.crashed
            self.crashed |= due
            if due and not self.after:
                await anyio.to_thread.run_sync(self._crash)
            await commit_to_log(lease, commit)
            if due and self.after:
                await anyio.to_thread.run_sync(self._crash)

        log.commit = commit  # type: ignore[method-assign]
        return log

    def _crash(self) -> None:
        self._server.kill()
        self._server.start()


@pytest.mark.parametrize("after", [False, True], ids=["before_the_write", "after_the_write"])
@pytest.mark.parametrize("moment", WORDS)
async def test_an_incident_is_handled_once(own_server: RedisServer, tmp_path: Path, moment: str, after: bool) -> None:
    # Otherwise a busy disk delays acknowledged writes by up to two seconds, and a kill loses them.
    with redis.Redis.from_url(own_server.url) as operator:
        operator.config_set("appendfsync", "always")
    crashing = CrashingRedis(own_server)
    async with anyio.create_task_group() as tasks:
        supervisors = [
            await start_supervisor(tasks, tmp_path / name, crashing.log(), name=name, times=QUICK)
            for name in ("a", "b")
        ]
        async with played_agents(tasks, NODES, [each.control for each in supervisors]) as agents:
            await supervisors[0].post("/v1/jobs", job_body())
            running = await until_phase(supervisors[0], "gpt", "running")
            assert running is not None
            crashing.words, crashing.after = WORDS[moment], after
            finder = redis_log(own_server.url)
            await publish(finder, crash("gpt", 1, running["nodes"][0], 0))
            await finder.aclose()

            async def resolved() -> bool:
                async with supervisors[1].client() as client:
                    answer = await client.get("/v1/incidents")
                items = answer.json().get("items") if answer.status_code == 200 else None
                return items is not None and [each["state"] for each in items] == ["resolved"]

            await wait_until_async(resolved, description="the incident to be resolved", timeout_s=40)
            job = await until_phase(supervisors[1], "gpt", "running")
            incidents = (await supervisors[1].get("/v1/incidents"))["items"]
            assert crashing.crashed
            assert [each["action"]["kind"] for each in incidents] == ["restart"]
            assert job is not None
            assert job["generation"] == 2
            for agent in agents:
                for kind in (Prepare, Start):
                    assert all(count == 1 for count in Counter(agent.generations(kind)).values()), agent
        tasks.cancel_scope.cancel()
