"""A replica is lent to a job of higher priority and comes back: a real supervisor, its API, and agents over real gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from eventlogs import redis_log
from supervising import PlayedAgent, Running, start_supervisor
from waiting import wait_until_async

from holdfast.domain.evolve import evolve
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import CheckpointNow, Inventory, Prepare, Report, Stop
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.control import decode_order

pytestmark = pytest.mark.anyio


class SavingAgent(PlayedAgent):
    """Its ranks save when they are asked to, and its replicator has what they saved."""

    def facts(self) -> NodeFacts:
        return evolve(super().facts(), replicator_endpoint="127.0.0.1:1")

    def _execute(self, command: pb.Command) -> list[Report]:
        known = command.command_id in self.executed
        reports = super()._execute(command)
        order = decode_order(command)
        if known or not isinstance(order, CheckpointNow):
            return reports
        prepared = [each for each in self.executed.values() if isinstance(each, Prepare) and each.job == order.job][-1]
        shards = tuple(
            ShardRecord(ShardKey(prepared.attempt, order.at_step, rank), prepared.mesh, "memory", 1, "same", self.node)
            for rank in prepared.placement.ranks
        )
        return [*reports, Inventory(order.job, shards)]


def job(name: str, nodes: int, **keys: Any) -> dict[str, Any]:
    return {"name": name, "script": "/train.py", "nodes": nodes, "elastic": {"min_dp": 1}, **keys}


async def until(supervisor: Running, name: str, what: str, **wanted: object) -> Any:
    async def there() -> Any:
        seen = await supervisor.get(f"/v1/jobs/{name}")
        return seen if all(seen[key] == value for key, value in wanted.items()) else None

    return await wait_until_async(there, description=what)


async def test_a_replica_is_lent_to_a_job_of_higher_priority_and_comes_back(redis_url: str, tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(tasks, tmp_path, redis_log(redis_url))
        agents = [SavingAgent(f"n{index}", [supervisor.control]) for index in range(3)]
        for agent in agents:
            tasks.start_soon(agent.run)
        await supervisor.post("/v1/jobs", job("low", 3, checkpoint={"interval_steps": 5}))
        await until(supervisor, "low", "all nodes to run it", phase="running", mesh={"dp": 3})

        await supervisor.post("/v1/jobs", job("high", 1, priority=5))
        waiting = await until(supervisor, "high", "it to wait", phase="pending", priority=5)
        assert "low has 3 nodes" in waiting["reason"]
        running = await until(supervisor, "high", "a node that was lent to it", phase="running")
        smaller = await until(supervisor, "low", "it to go on with two nodes", phase="running", mesh={"dp": 2})
        assert "after a loan to high" in smaller["reason"]
        assert not set(running["nodes"]) & set(smaller["nodes"])
        (lent,) = (agent for agent in agents if agent.node in running["nodes"])
        done = [(type(order), order.job) for order in lent.executed.values() if isinstance(order, Prepare | Stop)]
        assert done.index((Stop, "low")) < done.index((Prepare, "high"))

        await supervisor.post("/v1/jobs/high/stop")
        await until(supervisor, "low", "its replica to come back", phase="running", mesh={"dp": 3})
        tasks.cancel_scope.cancel()
