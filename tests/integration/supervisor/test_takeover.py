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
    mortals = {name: MortalLog(redis_log(redis_url)) for name in ("a", "b")}
    async with anyio.create_task_group() as tasks:
        supervisors = {
            name: await start_supervisor(tasks, tmp_path / name, mortal, name=name, times=QUICK)
            for name, mortal in mortals.items()
        }
        first = supervisors["a"]
        async with played_agents(tasks, NODES, [each.control for each in supervisors.values()]) as agents:
            await first.post("/v1/jobs", job_body())
            await until_phase(first, "gpt", "running")

            # Whoever leads by then: on a busy machine a lease this short may have changed hands.
            def moment_of_the_first(commit: Commit) -> bool:
                return MOMENTS[moment](commit) and not any(mortal.dead for mortal in mortals.values())

            for mortal in mortals.values():
                mortal.die_when(moment_of_the_first, after=after)
            await publish(mortals["b"], crash("gpt", 1, "n1", 0))
            await wait_until_async(
                lambda: any(mortal.dead for mortal in mortals.values()), description="the leader's death"
            )
            second = next(supervisors[name] for name, mortal in mortals.items() if not mortal.dead)

            async def recovered() -> bool:
                incidents = (await second.get("/v1/incidents"))["items"]
                return bool(incidents) and incidents[0]["state"] == "resolved"

            await wait_until_async(recovered, description="the incident to be resolved")
            job = await until_phase(second, "gpt", "running")
            incidents = (await second.get("/v1/incidents"))["items"]
            assert len(incidents) == 1
            assert incidents[0]["action"]["kind"] == "restart"
            assert job["generation"] == 2
            for agent in agents:
                for kind in (Prepare, Start):
                    assert all(count == 1 for count in Counter(agent.generations(kind)).values()), agent
        tasks.cancel_scope.cancel()
