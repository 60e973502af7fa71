"""Trace context in gRPC metadata: `traceparent`, as in the W3C recommendation.

Interceptors for asyncio that handle only the context. On the client side for unary calls: the streams between agents and
services stay open for days and contain the context of many incidents, each in its own message (`Command.traceparent`,
`WorkerExited.traceparent`). On the server side for calls of all four kinds."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from holdfast.runtime.telling import telemetry

KEY = "traceparent"


class SendContext(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the current span to the metadata of a call."""

    async def intercept_unary_unary(
        self, continuation: Callable[..., Awaitable[Any]], client_call_details: Any, request: Any
    ) -> Any:
        if (context := telemetry.current()) is None:
            return await continuation(client_call_details, request)
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()))
        metadata.add(KEY, context.traceparent)
        return await continuation(client_call_details._replace(metadata=metadata), request)


class TakeContext(grpc.aio.ServerInterceptor):
    """Makes the caller's span the current span during the call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        traceparent = dict(handler_call_details.invocation_metadata or ()).get(KEY, "")
        if handler is None or not traceparent:
            return handler
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        wrap = _streaming if handler.response_streaming else _single
        return handler._replace(**{kind: wrap(getattr(handler, kind), str(traceparent))})


def _single(method: Callable[..., Awaitable[Any]], traceparent: str) -> Callable[..., Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        with telemetry.within(traceparent):
            return await method(request, context)

    return handle


def _streaming(method: Callable[..., Any], traceparent: str) -> Callable[..., Any]:
    """Handles a method with streamed responses, which is a generator or a coroutine that writes to its context."""

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(method(request, context)) as answers:
            while True:
                with telemetry.within(traceparent):  # not across a yield, because the consumer has its own context
                    try:
                        answer = await anext(answers)
                    except StopAsyncIteration:
                        return
                yield answer

    if inspect.isasyncgenfunction(method):
        return generate
    return _single(method, traceparent)
