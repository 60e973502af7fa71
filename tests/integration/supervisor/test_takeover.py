"""A leader that dies between any two writes: the standby finishes the same incident, and no order is carried out twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from eventlogs import redis_log
from supervising import QUICK, MortalLog, crash, job_body, played_agents, publish, start_supervisor, until_phase
from waiting import wait_until_async

from holdfast.domain.orders import Prepare, Start
from holdfast.log.names import INBOX, SUPERVISOR_GROUP
from holdfast.log.protocol import Commit

pytestmark = pytest.mark.anyio

NODES = ("n1", "n2", "n3")


def published(words: bytes) -> Callable[[Commit], bool]:
    return lambda commit: any(words in entry.data for _, entry in commit.append)


# The leader dies when it writes this down.
MOMENTS: dict[str, Callable[[Commit], bool]] = {
    "the_incident_is_opened": published(b'"state":"open"'),
    "the_new_generation_is_planned": published(b'"stage":"planned"'),
    "an_order_is_answered": lambda commit: (INBOX, SUPERVISOR_GROUP) in commit.acknowledge,
    "the_new_generation_is_started": published(b'"stage":"started"'),
    "every_rank_has_stepped": published(b'"stage":"stepping"'),
}


@pytest.mark.parametrize("after", [False, True], ids=["before_the_write", "after_the_write"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_standby_finishes_the_incident(redis_url: str, tmp_path: Path, moment: str, after: bool) -> None:
    mortal, lasting = MortalLog(redis_log(redis_url)), redis_log(redis_url)
    async with anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", mortal, name="a", times=QUICK)
        second = await start_supervisor(tasks, tmp_path / "b", lasting, name="b", times=QUICK)
        async with played_agents(tasks, NODES, [first.control, second.control]) as agents:
            await first.post("/v1/jobs", job_body())
            await until_phase(first, "gpt", "running")
            mortal.die_when(MOMENTS[moment], after=after)
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
