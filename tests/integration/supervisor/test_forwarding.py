"""Two supervisors, real HTTP: whichever is asked, the leader answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest
from eventlogs import redis_log
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from supervising import Running, job_body, start_supervisor
from training import WarmStack
from waiting import wait_until, wait_until_async

from holdfast.cli.client import Client
from holdfast.cli.stack_options import StackOptions
from holdfast.log.names import EVENTS
from holdfast.log.protocol import FencedLog
from holdfast.supervisor.api.forwarding import FORWARDED_BY, NOT_LEADING
from holdfast.supervisor.api.server import bind, serving, url_of
from holdfast.supervisor.published import LeaderChanged, Published
from holdfast.wire import records

pytestmark = pytest.mark.anyio
TOKEN = "secret"


class Pair:
    """A leader and a standby, whose name is `name`."""

    def __init__(self, leader: Running, standby: Running, name: str, log: FencedLog) -> None:
        self.leader, self.standby, self.name, self.log = leader, standby, name, log

    def http(self, token: str = TOKEN) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.standby.api, headers=headers, trust_env=False)

    async def say_that_it_leads(self, api: str) -> None:
        """A record that is newer than the leader's own; the standby has read it."""
        changed = LeaderChanged(time.time(), 99, "elsewhere", api)
        await self.log.append(EVENTS, records.entry(f"leads at {api}", changed, Published))
        async with self.http() as http:

            async def heard() -> bool:
                return bool((await http.get("/v1/version")).json()["leader_api"] == api)

            await wait_until_async(heard, description="the record to be read")


@pytest.fixture
async def pair(redis_url: str, tmp_path: Path) -> AsyncIterator[Pair]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with anyio.create_task_group() as tasks:
        both = [
            (name, await start_supervisor(tasks, tmp_path / name, redis_log(redis_url), name=name, api_token=TOKEN))
            for name in "ab"
        ]

        async def roles() -> tuple[Running, Running, str] | None:
            """Both name the same leader: on a machine that stands still for seconds, the second may have become it."""
            named = set()
            for _, each in both:
                async with each.client(headers=headers) as http:
                    named.add((await http.get("/v1/version")).json()["leader_api"])
            leading = [each for _, each in both if named == {each.api}]
            standing_by = [(each, name) for name, each in both if named != {each.api}]
            return (leading[0], *standing_by[0]) if leading else None

        log = redis_log(redis_url)
        leader, standby, name = await wait_until_async(roles, description="both to name the same leader")
        pair = Pair(leader, standby, name, log)
        yield pair
        await log.aclose()
        tasks.cancel_scope.cancel()


async def test_a_command_to_the_standby_is_the_leader_s_to_answer(pair: Pair) -> None:
    async with pair.http() as http:
        headers = {"Idempotency-Key": "once", "Holdfast-Launcher-Token": "mine"}
        answer = await http.post("/v1/jobs?fresh=true", json=job_body(), headers=headers)
        assert answer.status_code == 202, answer.text
        assert answer.headers["location"] == answer.json()["url"]
        assert answer.headers["content-type"] == "application/json"
        again = await http.post("/v1/jobs?fresh=true", json=job_body(), headers=headers)
        assert again.json()["id"] == answer.json()["id"], "the key has come along"
        attached = await http.post("/v1/jobs/gpt/attach", json={"token": "mine"})
        assert attached.status_code in (200, 404)
        wrong = await http.get("/v1/incidents", params={"limit": "nonsense"})
        assert (wrong.status_code, wrong.headers["content-type"]) == (422, "application/problem+json")
        assert (await http.get("/healthz")).json()["leader"] is False, "of the standby itself"
        assert (await http.get("/v1/version")).json()["supervisor"] == pair.name


async def test_the_leader_gets_the_request_as_it_came_and_the_client_the_answer(pair: Pair) -> None:
    async def echo(request: Request) -> StreamingResponse:
        received = {
            "method": request.method,
            "path": request.scope["raw_path"].decode(),
            "query": request.url.query,
            "body": (await request.body()).decode(),
            "token": request.headers["authorization"],
            "key": request.headers["idempotency-key"],
            "by": request.headers[FORWARDED_BY],
            "origin": request.headers.get("origin"),
        }

        async def parts() -> AsyncIterator[bytes]:
            yield json.dumps(received).encode()
            await released.wait()
            yield b"\nthe rest"

        return StreamingResponse(parts(), 418, {"Location": "/v1/there", "Retry-After": "7"}, "text/plain")

    released, listener = anyio.Event(), bind("127.0.0.1:0")
    app = Starlette(routes=[Route("/below/{rest:path}", echo, methods=["PUT"])])
    async with serving(app, listener):  # type: ignore[arg-type]
        await pair.say_that_it_leads(f"{url_of(listener)}/below/")
        headers = {"Idempotency-Key": "k", "Origin": pair.standby.api}
        async with (
            pair.http() as http,
            http.stream("PUT", "/v1/findings/a%2Fb?x=1&y=%20", content="{}", headers=headers) as answer,
        ):
            pieces = answer.aiter_raw()
            first = json.loads(await anext(pieces))
            released.set()
            rest = b"".join([piece async for piece in pieces])
    assert first == {
        "method": "PUT",
        "path": "/below/v1/findings/a%2Fb",
        "query": "x=1&y=%20",
        "body": "{}",
        "token": f"Bearer {TOKEN}",
        "key": "k",
        "by": pair.name,
        "origin": None,  # it names the standby, which has checked it
    }
    assert (answer.status_code, answer.headers["location"], answer.headers["retry-after"]) == (418, "/v1/there", "7")
    assert rest == b"\nthe rest"


async def test_the_token_is_the_client_s_own(pair: Pair) -> None:
    async with pair.http(token="") as http:
        assert (await http.get("/v1/jobs")).status_code == 401
        bytes_of_no_text = {b"Authorization": b"Bearer \xff\xfe"}
        assert (await http.get("/v1/jobs", headers=bytes_of_no_text)).status_code == 401
    async with pair.http(token="wrong") as http:
        assert (await http.get("/v1/jobs")).status_code == 401


async def test_a_session_of_the_standby_s_page_is_one_at_the_leader(pair: Pair) -> None:
    page = {"Origin": pair.standby.api}
    async with pair.http(token="") as http:
        assert (await http.post("/v1/session", json={"token": TOKEN}, headers=page)).status_code == 200
        assert (await http.get("/v1/fleet")).status_code == 200
        assert (await http.post("/v1/breaker/reset", headers=page)).status_code == 202
        assert (await http.post("/v1/breaker/reset", headers={"Origin": "http://evil.example"})).status_code == 403
    async with httpx.AsyncClient(base_url=pair.leader.api, cookies=http.cookies, trust_env=False) as leader:
        assert (await leader.get("/v1/fleet")).status_code == 200, "no supervisor keeps sessions"


async def test_events_come_through_as_they_happen(pair: Pair) -> None:
    async with pair.http() as http, http.stream("GET", "/v1/events", timeout=20.0) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        async with httpx.AsyncClient(base_url=pair.leader.api, trust_env=False) as leader:
            await leader.post("/v1/jobs", json=job_body(), headers={"Authorization": f"Bearer {TOKEN}"})
        async for line in lines:
            if line == "event: JobAccepted":
                return
    pytest.fail("the event never came")


async def test_a_request_is_forwarded_once(pair: Pair) -> None:
    async with pair.http() as http:
        answer = await http.get("/v1/jobs", headers={FORWARDED_BY: "c"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert NOT_LEADING in answer.headers
        assert "c has forwarded this request to b, which does not lead" in answer.json()["detail"]
        # The address of the leader is, wrongly, that of the standby under another name: as of two loopback addresses.
        await pair.say_that_it_leads(pair.standby.api.replace("127.0.0.1", "localhost"))
        answer = await http.get("/v1/jobs")
        assert (answer.status_code, answer.json()["items"]) == (200, [])


async def test_a_leader_that_cannot_be_reached_is_answered_for(pair: Pair) -> None:
    await pair.say_that_it_leads("http://127.0.0.1:1")
    async with pair.http() as http:
        answer = await http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "once"})
        assert answer.status_code == 202, "its body was read, and is there for the answer"


async def test_a_connection_that_breaks_says_that_the_leader_may_have_taken_it(pair: Pair) -> None:
    async def hang_up(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hang_up)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        await pair.say_that_it_leads(f"http://127.0.0.1:{port}")
        async with pair.http() as http:
            answer = await http.post("/v1/jobs", json=job_body())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "may have received the request" in answer.json()["detail"]
        tasks.cancel_scope.cancel()


async def test_a_body_that_is_too_large_is_refused_here(pair: Pair) -> None:
    async with pair.http() as http:
        answer = await http.post("/v1/jobs", content=b"x" * (1024 * 1024 + 1))
    assert (answer.status_code, answer.headers["content-type"]) == (413, "application/problem+json")


def test_a_second_supervisor_process_answers_as_the_first(tmp_path: Path) -> None:
    with WarmStack(StackOptions(directory=tmp_path / "stack")) as stack:
        ready = tmp_path / "ready.json"
        settings = {
            "HOLDFAST_REDIS_URL": stack.redis_url,
            "HOLDFAST_SUPERVISOR_NAME": "standby",
            "HOLDFAST_SUPERVISOR_LISTEN": "127.0.0.1:0",
            "HOLDFAST_API_LISTEN": "127.0.0.1:0",
            "HOLDFAST_DATA_DIR": str(tmp_path),
            "HOLDFAST_READY_FILE": str(ready),
            "HOLDFAST_API_TOKEN": stack.for_commands["HOLDFAST_API_TOKEN"],
        }
        with subprocess.Popen([sys.executable, "-m", "holdfast.supervisor"], env={**os.environ, **settings}) as standby:
            try:
                wait_until(ready.exists, description="the standby to serve")
                url = httpx.Response(200, content=ready.read_bytes()).json()["api"]
                with Client(url, token=settings["HOLDFAST_API_TOKEN"]) as client:
                    client.submit({"name": "far", "script": "/train.py"})
                    assert client.job("far")["phase"] == "pending"
                    version = client.version()
                    assert version["leader"] is False
                    assert (version["standby_api"], version["standby_version"]) == (url, version["version"])
                with Client(stack.api_url) as client:
                    assert [job["name"] for job in client.jobs()] == ["far"]
            finally:
                standby.terminate()
