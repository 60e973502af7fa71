"""The trace's context goes along with a call, and is the current one while the call is handled, whatever kind it is of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.telling import telemetry
from holdfast.runtime.trust.authorization import Rule

pytestmark = pytest.mark.anyio

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "written")


def seen() -> bytes:
    context = telemetry.current()
    return context.traceparent.encode() if context else b"nothing"


async def single(request: bytes, context: Any) -> bytes:
    return seen()


async def gathered(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in requests:
        pass
    return seen()


async def streamed(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield seen()


async def answered(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield seen()


async def written(requests: AsyncIterator[bytes], context: Any) -> None:
    async for _ in requests:
        await context.write(seen())


HANDLERS: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler(single),
    "stream_unary": grpc.stream_unary_rpc_method_handler(gathered),
    "unary_stream": grpc.unary_stream_rpc_method_handler(streamed),
    "stream_stream": grpc.stream_stream_rpc_method_handler(answered),
    "written": grpc.stream_stream_rpc_method_handler(written),
}


RULES = {f"/t.T/{name}": Rule(anybody=True) for name in HANDLERS}


def register(server: grpc.aio.Server) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", HANDLERS),))


@asynccontextmanager
async def served() -> AsyncIterator[grpc.aio.Channel]:
    listening = listen("127.0.0.1:0", register, services=["t.T"], rules=RULES)
    async with listening as server, open_channel(server.endpoint) as channel:
        yield channel


async def call(channel: grpc.aio.Channel, kind: str, name: str = "", **options: Any) -> list[bytes]:
    method = getattr(channel, "stream_stream" if kind == "written" else kind)(f"/t.T/{name or kind}")
    request = iter([b"1", b"2", b"3"]) if kind.startswith(("stream", "written")) else b"1"
    going = method(request, **options)
    return [answer async for answer in going] if kind.endswith(("_stream", "written")) else [await going]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_runs_below_the_callers_span(kind: str) -> None:
    async with served() as channel:
        below = await call(channel, kind, metadata=[("traceparent", PARENT)])
        assert set(below) == {PARENT.encode()}
        assert len(below) == (1 if kind.endswith("_unary") else 3)
        assert set(await call(channel, kind)) == {b"nothing"}
        assert set(await call(channel, kind, metadata=[("traceparent", "garbage")])) == {b"nothing"}
    assert telemetry.current() is None


async def test_a_call_takes_the_current_span_along() -> None:
    async with served() as channel:
        with telemetry.span("prepare", PARENT) as context:
            assert context is not None
            assert await call(channel, "unary_unary", timeout=5) == [context.traceparent.encode()]
            other = await call(channel, "unary_unary", metadata=[("x", "y")], timeout=5)
            assert other == [context.traceparent.encode()]
        assert await call(channel, "unary_unary") == [b"nothing"]


async def test_errors_pass_through() -> None:
    async with served() as channel:
        with telemetry.span("prepare", PARENT), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary", "no_such_method")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
