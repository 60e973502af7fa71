"""The proof of the fleet (`runtime.fleet`) in gRPC: refuses the calls of other fleets' agents before a message is read."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

import anyio
import grpc

from holdfast.domain.errors import OtherFleet
from holdfast.runtime.telling.refusal_log import RefusalLog
from holdfast.runtime.trust.fleet import Membership

REFUSED = grpc.StatusCode.PERMISSION_DENIED


class Door(grpc.aio.ServerInterceptor):
    """Guards `services`, whose methods are streams in both directions, written as coroutines. Health and reflection stay
    open."""

    def __init__(self, membership: Membership, services: Collection[str]) -> None:
        self._membership = membership
        self._services = frozenset(services)
        self._refusals = RefusalLog("holdfast.runtime.trust.fleet", "agent of another fleet refused")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        service = handler_call_details.method.strip("/").partition("/")[0]
        if handler is None or service not in self._services:
            return handler
        if not inspect.iscoroutinefunction(method := handler.stream_stream):
            raise TypeError(
                f"{handler_call_details.method} is not a stream in both directions that is written by a coroutine"
            )
        introduction = {
            key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }
        try:
            answer = self._membership.admit(introduction)
        except OtherFleet as refusal:
            return handler._replace(stream_stream=self._refuse(str(refusal)))
        return handler._replace(stream_stream=_after(answer, method))

    def _refuse(self, reason: str) -> Callable[[Any, Any], Awaitable[None]]:
        async def refuse(_: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._refusals.add(context.peer(), reason)
            await context.abort(REFUSED, reason)

        return refuse


def _after(
    answer: Mapping[str, str], method: Callable[[Any, Any], Awaitable[None]]
) -> Callable[[Any, Any], Awaitable[None]]:
    async def serve(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        with anyio.CancelScope(shield=True):  # see `grpc_server.write_whole`
            await context.send_initial_metadata(tuple(answer.items()))
        await method(requests, context)

    return serve
