"""Common code of the two gRPC streams: a failed stream raises one exception with a reason, both for reads and for writes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import grpc

from holdfast.runtime.grpc_channel import cancellable

Request = TypeVar("Request")
Response = TypeVar("Response")


async def write(call: grpc.aio.StreamStreamCall[Request, Response], message: Request) -> None:
    """Send one message; waits for flow control. Raises `AioRpcError` if the stream has ended."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise await broken(call) from None


async def read(call: grpc.aio.StreamStreamCall[Request, Response], kind: type[Response]) -> Response:
    """Return the next message. Raises `AioRpcError` if the stream has ended."""
    message = await cancellable(call.read())
    if isinstance(message, kind):
        return message
    raise await broken(call)


async def broken(call: grpc.aio.StreamStreamCall[Request, Response]) -> grpc.aio.AioRpcError:
    """Return the error of an ended stream."""
    details = await call.details() or "the stream ended"
    return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def first_error(group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> grpc.aio.AioRpcError:
    """Return the error of the stream from a group; reader and writer may both have raised it."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
