"""Both ends of a connection over real sockets: health, reflection, limits, mutual TLS, a peer that falls silent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import grpc
import pytest
from certificates import tls
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.runtime.processes.children import spawn
from holdfast.runtime.rpc import grpc_channel, grpc_server
from holdfast.runtime.rpc.grpc_channel import cancellable, open_channel
from holdfast.runtime.rpc.grpc_server import PENDING_S_MAX, listen, write_whole
from holdfast.v1 import control_pb2, control_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc

pytestmark = pytest.mark.anyio

NAME = "holdfast.v1.Telemetry"
MEGABYTE = "x" * 2**20
TIMES = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}


class Echo(telemetry_pb2_grpc.TelemetryServicer):
    async def Stream(  # noqa: N802 - the protocol's name
        self,
        request_iterator: AsyncIterator[telemetry_pb2.Tick],
        context: grpc.aio.ServicerContext[AsyncIterator[telemetry_pb2.Tick], AsyncIterator[telemetry_pb2.TickAck]],
    ) -> AsyncIterator[telemetry_pb2.TickAck]:
        async for tick in request_iterator:
            yield telemetry_pb2.TickAck(seq=tick.seq)


def register(server: grpc.aio.Server) -> None:
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(Echo(), server)


async def echo(channel: grpc.aio.Channel, tick: telemetry_pb2.Tick) -> int:
    call = telemetry_pb2_grpc.TelemetryStub(channel).Stream(timeout=10)
    await call.write(tick)
    answer = await call.read()
    assert isinstance(answer, telemetry_pb2.TickAck)
    await call.done_writing()
    return answer.seq


async def test_a_deadline_ends_a_read_that_waits_for_a_name_server() -> None:
    """And nothing but the read: the agent of a partitioned node once ended here, and its workers with it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        async with open_channel(f"dns://127.0.0.1:{silent.getsockname()[1]}/supervisor.invalid:8471") as channel:
            call = telemetry_pb2_grpc.TelemetryStub(channel).Stream()
            with anyio.move_on_after(0.2) as limit:
                await cancellable(call.read())
        assert limit.cancelled_caught


class Overflowing(control_pb2_grpc.ControlServicer):
    """Writes more than its peer reads at once, and ends the call with that write under way."""

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[control_pb2.AgentMessage], context: Any
    ) -> None:
        begun = anyio.Event()

        async def overflow() -> None:
            begun.set()
            await write_whole(context, control_pb2.SupervisorMessage(welcome=control_pb2.Welcome(supervisor=MEGABYTE)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overflow)
            await begun.wait()
            tasks.cancel_scope.cancel()
        await context.abort(grpc.StatusCode.ABORTED, "enough")


async def test_the_status_of_a_call_arrives_behind_its_first_write_that_was_under_way() -> None:
    def overflowing(server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_ControlServicer_to_server(Overflowing(), server)

    async with listen("127.0.0.1:0", overflowing, services=[]) as server, open_channel(server.endpoint) as channel:
        call = control_pb2_grpc.ControlStub(channel).Session()
        with anyio.fail_after(TIMEOUT_S), contextlib.suppress(grpc.aio.AioRpcError):
            while await cancellable(call.read()) is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED


class Writing(control_pb2_grpc.ControlServicer):
    """Writes until the connection breaks."""

    def __init__(self) -> None:
        self.begun, self.ended = anyio.Event(), anyio.Event()

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[control_pb2.AgentMessage], context: Any
    ) -> None:
        async def write() -> None:
            while True:
                await write_whole(context, control_pb2.SupervisorMessage())
                await anyio.lowlevel.checkpoint()

        try:
            async for _ in request_iterator:
                break
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write)
                self.begun.set()
                async for _ in request_iterator:
                    pass
        finally:
            self.ended.set()


READER = """
import sys, threading, grpc
channel = grpc.insecure_channel(sys.argv[1])
session = channel.stream_stream("/holdfast.v1.Control/Session", lambda raw: raw, lambda raw: raw)
waiting = threading.Event()
def messages():
    yield b""
    waiting.wait()
for _ in session(messages()):
    pass
"""


def started(endpoint: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", READER, endpoint])


def kill_and_wait(reader: subprocess.Popen[bytes]) -> None:
    """This blocks the loop, as a freeze does, until the kernel has closed the connection."""
    reader.kill()
    reader.wait()


async def test_a_connection_that_broke_while_the_server_was_frozen_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The write comes before grpc.aio has noticed the end. Once, each such session was logged with two tracebacks."""
    for _ in range(4):  # which of the two comes first differs
        servicer = Writing()

        def writing(server: grpc.aio.Server, servicer: Writing = servicer) -> None:
            control_pb2_grpc.add_ControlServicer_to_server(servicer, server)

        async with listen("127.0.0.1:0", writing, services=[]) as server:
            reader = started(server.endpoint)
            with anyio.fail_after(TIMEOUT_S):
                await servicer.begun.wait()
            kill_and_wait(reader)
            with anyio.fail_after(TIMEOUT_S):
                await servicer.ended.wait()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_deadline_ends_a_call_that_nobody_answers() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with open_channel(f"127.0.0.1:{mute.getsockname()[1]}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            with anyio.move_on_after(0.2) as limit:
                await cancellable(check)
        assert limit.cancelled_caught


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_serves_on_a_port_or_a_path(scheme: str, tmp_path: Path) -> None:
    address = "127.0.0.1:0" if scheme == "tcp" else f"unix:{tmp_path}/s.sock"
    async with listen(address, register, services=[NAME]) as server, open_channel(server.endpoint) as channel:
        assert await echo(channel, telemetry_pb2.Tick(seq=7)) == 7
        assert (server.port > 0) == (scheme == "tcp")
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=NAME))
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services() -> None:
    async with listen("127.0.0.1:0", register, services=[NAME]) as server, open_channel(server.endpoint) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        await call.done_writing()
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Conflict, match=rf"cannot listen on {address}: Address already in use"):
            async with listen(address, register, services=[NAME]):
                pass


async def test_two_servers_cannot_share_a_port() -> None:
    async with listen("127.0.0.1:0", register, services=[NAME]) as first:
        with pytest.raises(Conflict, match="already in use"):
            async with listen(first.endpoint, register, services=[NAME]):
                pass


@pytest.mark.parametrize("address", ["", "7000", "localhost", "localhost:http"])
async def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(InvalidSpec, match="host:port"):
        async with listen(address, register, services=[NAME]):
            pass


async def test_a_message_beyond_the_limit_is_refused_and_the_next_one_is_not() -> None:
    async with listen("127.0.0.1:0", register, services=[NAME]) as server, open_channel(server.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(channel, telemetry_pb2.Tick(seq=1, node="x" * (17 * 1024 * 1024)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await echo(channel, telemetry_pb2.Tick(seq=2, node="x" * (8 * 1024 * 1024))) == 2


async def test_a_fleet_that_comes_back_at_once_is_not_turned_away() -> None:
    async with listen("127.0.0.1:0", register, services=[NAME]) as server:
        with grpc.insecure_channel(server.endpoint) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            # From a thread of gRPC's own, while this loop, which is also the server's, looks at none of them.
            calls = [check.future(health_pb2.HealthCheckRequest()) for _ in range(2_000)]
            ends = await anyio.to_thread.run_sync(lambda: Counter(call.code() for call in calls))
    assert ends == {grpc.StatusCode.OK: 2_000}


async def test_calls_wait_for_a_process_that_does_not_run_as_long_as_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own limit is 30 s. Here ours is a second: the calls that end show that it is the one in effect."""
    assert PENDING_S_MAX > 30
    short = tuple((name, 1 if value == PENDING_S_MAX else value) for name, value in grpc_server.OPTIONS)
    monkeypatch.setattr(grpc_server, "OPTIONS", short)
    async with listen("127.0.0.1:0", register, services=[NAME]) as server:
        with grpc.insecure_channel(server.endpoint) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            calls = [check.future(health_pb2.HealthCheckRequest()) for _ in range(10)]
            time.sleep(2.5)  # noqa: ASYNC251 - the length of the freeze: this loop is also the server's
            ends = await anyio.to_thread.run_sync(lambda: Counter(call.code() for call in calls))
    assert ends == {grpc.StatusCode.CANCELLED: 10}


async def test_a_peer_that_falls_silent_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its sockets open: only the missing answers to pings give it away."""
    server = spawn("silent server", [sys.executable, "-c", SILENT_SERVER.format(file=str(tmp_path / "endpoint"))])
    try:
        wait_until((tmp_path / "endpoint").exists, description="the server")
        faster = tuple((name, value // 5 if name in TIMES else value) for name, value in grpc_channel.OPTIONS)
        monkeypatch.setattr(grpc_channel, "OPTIONS", faster)
        async with open_channel((tmp_path / "endpoint").read_text()) as channel:
            call = telemetry_pb2_grpc.TelemetryStub(channel).Stream()
            await call.write(telemetry_pb2.Tick(seq=1))
            await call.read()
            os.kill(server.pid, signal.SIGSTOP)
            with anyio.fail_after(TIMEOUT_S), pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(grace_s=0)


SILENT_SERVER = """
import anyio, pathlib, sys
from holdfast.runtime.rpc.grpc_server import listen, write_whole
from holdfast.v1 import control_pb2, control_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc

class Echo(telemetry_pb2_grpc.TelemetryServicer):
    async def Stream(self, ticks, context):
        async for tick in ticks:
            yield telemetry_pb2.TickAck(seq=tick.seq)

async def main():
    add = lambda server: telemetry_pb2_grpc.add_TelemetryServicer_to_server(Echo(), server)
    async with listen("127.0.0.1:0", add, services=["holdfast.v1.Telemetry"]) as server:
        path = pathlib.Path({file!r})
        path.with_suffix(".tmp").write_text(server.endpoint)
        path.with_suffix(".tmp").rename(path)
        await anyio.sleep_forever()

anyio.run(main)
"""


# ---------------------------------------------------------------- mutual TLS


async def test_both_ends_of_one_ca_talk(pki: Path) -> None:
    ours = tls(pki, "ours", "ours")
    serving = listen("localhost:0", register, services=[NAME], tls=ours)
    async with serving as server, open_channel(server.endpoint, ours) as channel:
        assert await echo(channel, telemetry_pb2.Tick(seq=3)) == 3


@pytest.mark.parametrize("client", ["foreign certificate", "foreign CA", "no TLS"])
async def test_nobody_else_gets_in(pki: Path, client: str) -> None:
    theirs = {
        "foreign certificate": tls(pki, "foreign", "ours"),  # trusts us, but we do not know it
        "foreign CA": tls(pki, "ours", "foreign"),  # does not trust us
        "no TLS": None,
    }[client]
    serving = listen("localhost:0", register, services=[NAME], tls=tls(pki, "ours", "ours"))
    async with serving as server, open_channel(server.endpoint, theirs) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(channel, telemetry_pb2.Tick(seq=3))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_key_is_not_shown(pki: Path) -> None:
    assert "PRIVATE" not in repr(tls(pki, "ours", "ours"))
