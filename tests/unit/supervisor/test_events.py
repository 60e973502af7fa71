"""Server-sent events over real HTTP: a reader that lost its connection goes on where it was."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from supervising import Running, job_body, start_supervisor

from holdfast.log.memory import MemoryLog

pytestmark = pytest.mark.anyio


async def read_events(sup: Running, count: int, **headers: str) -> list[tuple[str, str, Any]]:
    """(id, type, data) of so many events."""
    found: list[tuple[str, str, Any]] = []
    event: dict[str, str] = {}
    with anyio.fail_after(10):
        async with sup.client() as client, client.stream("GET", "/v1/events", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name:
                    event[name] = value
                elif "data" in event:
                    found.append((event["id"], event["event"], json.loads(event["data"])))
                    event = {}
                if len(found) == count:
                    return found
    raise AssertionError(f"the stream ended after {found}")


@pytest.fixture
async def sup(tmp_path: Path) -> AsyncIterator[Running]:
    async with anyio.create_task_group() as tasks:
        yield await start_supervisor(tasks, tmp_path, MemoryLog(block_s=0.05))
        tasks.cancel_scope.cancel()


async def test_events_resume_after_the_last_one_seen(sup: Running) -> None:
    for name in ("a", "b"):
        await sup.post("/v1/jobs", job_body(name=name))
    everything = await read_events(sup, 6, **{"Last-Event-ID": "0"})
    assert [kind for _, kind, _ in everything][:3] == ["LeaderChanged", "OperationDone", "JobAccepted"]
    assert everything[2][2]["job"] == "a"
    for seen in (1, 3):
        assert await read_events(sup, 6 - seen, **{"Last-Event-ID": everything[seen - 1][0]}) == everything[seen:]


async def test_without_an_id_only_later_events_are_sent(sup: Running) -> None:
    await sup.post("/v1/jobs", job_body(name="old"))
    found: list[Any] = []
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            found.extend(await read_events(sup, 1))

        async def submit() -> None:
            for number in range(100):
                if found:
                    return
                await sup.post("/v1/jobs", job_body(name=f"new-{number}"))

        tasks.start_soon(read)
        tasks.start_soon(submit)
    assert "old" not in json.dumps(found)


@pytest.mark.parametrize("last", ["x", "1-", "$", "-1"])
async def test_a_wrong_id_is_refused(sup: Running, last: str) -> None:
    async with sup.client() as client:
        answer: httpx.Response = await client.get("/v1/events", headers={"Last-Event-ID": last})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Last-Event-ID"


async def test_an_open_stream_does_not_hold_up_the_end_of_the_service(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path, MemoryLog(block_s=0.05))
        async with sup.client() as client, client.stream("GET", "/v1/events") as answer:
            assert answer.status_code == 200
            began = anyio.current_time()
            sup.scope.cancel()
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in answer.aiter_lines():
                    pass
            assert anyio.current_time() - began < 20
