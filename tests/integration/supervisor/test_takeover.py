"""A leader that dies between any two writes: the standby finishes the same incident, and no order is carried out twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest
from eventlogs import redis_log
from supervising import QUICK, MortalLog, crash, job_body, played_agents, publish, start_supervisor, until_phase
from waiting import wait_until_async

from holdfast.domain.orders import Prepare, Start

pytestmark = pytest.mark.anyio

NODES = ("n1", "n2", "n3")


@pytest.mark.parametrize("after", [False, True], ids=["before_the_write", "after_the_write"])
@pytest.mark.parametrize("commits", [1, 2, 3, 4, 5])
async def test_a_standby_finishes_the_incident(redis_url: str, tmp_path: Path, commits: int, after: bool) -> None:
    mortal, lasting = MortalLog(redis_log(redis_url)), redis_log(redis_url)
    async with anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", mortal, name="a", times=QUICK)
        second = await start_supervisor(tasks, tmp_path / "b", lasting, name="b", times=QUICK)
        async with played_agents(tasks, NODES, [first.control, second.control]) as agents:
            await first.post("/v1/jobs", job_body())
            await until_phase(first, "gpt", "running")
            mortal.die_in(commits, after=after)
            await publish(lasting, crash("gpt", 1, "n1", 0))

            async def recovered() -> bool:
                incidents = (await second.get("/v1/incidents"))["items"]
                return bool(incidents) and incidents[0]["state"] == "resolved"

            await wait_until_async(recovered, description="the incident to be resolved", timeout_s=20)
            job = await until_phase(second, "gpt", "running")
            incidents = (await second.get("/v1/incidents"))["items"]
            assert len(incidents) == 1
            assert incidents[0]["action"]["kind"] == "restart"
            assert job["generation"] == 2
            for agent in agents:
                for kind in (Prepare, Start):
                    assert all(count == 1 for count in Counter(agent.generations(kind)).values()), agent
        assert mortal.dead, "the first leader finished alone: this case tests nothing"
        tasks.cancel_scope.cancel()
