"""Real supervisors on machines whose clocks differ by hours, and whose clocks jump while they lead. A preloaded library keeps
the offset of each process (benchmarks/soak/clock.c); the machine's own clock is never set."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from jumping_clocks import clocks_in
from supervising import PlayedAgent, Running, job_body, played_agents, until_phase
from supervisor_processes import Supervisor, supervisor
from waiting import wait_until_async

from benchmarks.soak.clock import Clocks
from holdfast.domain.orders import Prepare, Start

pytestmark = [pytest.mark.anyio]

RUNNING, ANNOUNCED, IDLE = ("n1", "n2"), "n3", "n4"
EVENT = "the machine is moved"
HOUR_S = 3600.0
AHEAD_S = 3 * HOUR_S  # more than the notice's time to its start and the hour for which it applies after it
LATER_S = 1800.0  # so long before the maintenance nothing has to move
PATIENCE_S = 40.0


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return clocks_in(tmp_path / "clocks")


async def wall_s(by: Running) -> float:
    """The wall clock of the supervisor's process, to the second."""
    async with by.client() as client:
        answer = await client.get("/healthz")
    return parsedate_to_datetime(answer.headers["Date"]).timestamp()


async def node(by: Running, name: str) -> Any:
    return await by.get(f"/v1/nodes/{name}")


async def until_led_by(by: Running, epoch: int) -> None:
    """Until this supervisor leads in a later epoch."""

    async def led() -> bool:
        async with by.client() as client:
            answer = await client.get("/v1/version")
        return answer.status_code == 200 and answer.json()["leader"] and answer.json()["epoch"] > epoch

    await wait_until_async(led, description="a new epoch", timeout_s=PATIENCE_S)


async def put(by: Running, path: str, body: Any) -> None:
    """Put, and wait until it is folded."""
    async with by.client() as client:
        answer = await client.put(path, json=body)
        assert answer.status_code == 202, answer.text

        async def done() -> bool:
            return bool((await client.get(answer.headers["Location"])).json()["state"] == "succeeded")

        await wait_until_async(done, description=f"the operation of PUT {path}", timeout_s=PATIENCE_S)


@asynccontextmanager
async def fleet(supervisors: Sequence[Supervisor]) -> AsyncIterator[tuple[list[PlayedAgent], anyio.CancelScope]]:
    """Agents of four nodes, and what ends the agent of the last one."""
    ends = [each.running.control for each in supervisors]
    scope = anyio.CancelScope()
    idle = PlayedAgent(IDLE, ends)

    async def until_ended() -> None:
        with scope:
            await idle.run()

    async with anyio.create_task_group() as tasks, played_agents(tasks, (*RUNNING, ANNOUNCED), ends) as agents:
        tasks.start_soon(until_ended)
        await wait_until_async(lambda: idle.connected, description=f"{IDLE} to be connected")
        yield agents, scope
        tasks.cancel_scope.cancel()


async def begin(by: Running) -> None:
    """A job that runs, and a node whose maintenance is announced for a time that is far away."""
    await put(by, f"/v1/nodes/{ANNOUNCED}/notices/owner", {"event": EVENT, "in_s": LATER_S})
    await by.post("/v1/jobs", job_body(nodes=len(RUNNING)))
    await until_phase(by, "gpt", "running")


async def until_timers_have_run(by: Running, ending: anyio.CancelScope) -> None:
    """An agent without ranks ends. A timer of seconds publishes its node as lost, after all timers that are due already."""
    ending.cancel()

    async def lost() -> bool:
        return bool((await node(by, IDLE))["state"] == "lost")

    await wait_until_async(lost, description=f"{IDLE} to be lost", timeout_s=PATIENCE_S)


async def nothing_has_expired(by: Running, agents: list[PlayedAgent]) -> None:
    assert [each["event"] for each in (await node(by, ANNOUNCED))["notices"]] == [EVENT]
    assert (await until_phase(by, "gpt", "running"))["generation"] == 1
    assert (await by.get("/v1/incidents"))["items"] == []
    for agent in agents:
        expected = [1] if agent.node in RUNNING else []
        assert (agent.generations(Prepare), agent.generations(Start)) == (expected, expected), agent.node


async def test_a_standby_with_another_clock_takes_over_and_nothing_expires(
    redis_url: str, tmp_path: Path, clocks: Clocks
) -> None:
    ahead = clocks.environment("b")
    clocks.set("b", AHEAD_S)
    async with (
        supervisor(tmp_path / "a", redis_url) as first,
        supervisor(tmp_path / "b", redis_url, **ahead) as second,
        fleet([first, second]) as (agents, ending),
    ):
        by = second.running
        await begin(first.running)
        assert [(await node(first.running, each))["clock_ahead_s"] for each in RUNNING] == [0.0, 0.0]
        assert await wall_s(by) - await wall_s(first.running) > AHEAD_S / 2
        epoch = (await by.get("/v1/version"))["epoch"]
        first.process.kill()
        await until_led_by(by, epoch)
        await until_phase(by, "gpt", "running")
        await until_timers_have_run(by, ending)
        await nothing_has_expired(by, agents)

        async def named() -> bool:
            shown = await node(by, RUNNING[0])
            return (
                abs((shown["clock_ahead_s"] or 0.0) + AHEAD_S) < 60.0 and "behind the supervisor's" in shown["reason"]
            )

        await wait_until_async(named, description="the difference of the clocks to be named")
        assert "this machine's clock differs from the time of the previous leader" in second.log.read_text()


@pytest.mark.parametrize("jump_s", [AHEAD_S, -AHEAD_S], ids=["forwards", "backwards"])
async def test_a_clock_that_jumps_while_its_supervisor_leads_neither_fires_nor_delays_timers(
    redis_url: str, tmp_path: Path, clocks: Clocks, jump_s: float
) -> None:
    async with (
        supervisor(tmp_path / "a", redis_url, **clocks.environment("a")) as leader,
        fleet([leader]) as (agents, ending),
    ):
        by = leader.running
        await begin(by)
        before = await wall_s(by)
        clocks.set("a", jump_s)

        async def jumped() -> bool:
            return abs(await wall_s(by) - before) > AHEAD_S / 2

        await wait_until_async(jumped, description="the clock of the supervisor to jump")
        await until_timers_have_run(by, ending)
        await nothing_has_expired(by, agents)
