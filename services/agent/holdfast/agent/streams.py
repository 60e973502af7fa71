"""Common code of the two gRPC streams: a failed stream is one exception with a reason, on whichever side it is noticed."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import grpc

from holdfast.runtime.grpc_channel import cancellable

Request = TypeVar("Request")
Response = TypeVar("Response")


async def write(call: grpc.aio.StreamStreamCall[Request, Response], message: Request) -> None:
    """Send one message, waiting for flow control. Raises `AioRpcError` when the stream has ended."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise await broken(call) from None


async def read(call: grpc.aio.StreamStreamCall[Request, Response], kind: type[Response]) -> Response:
    """The next message. Raises `AioRpcError` when there will be none."""
    message = await cancellable(call.read())
    if isinstance(message, kind):
        return message
    raise await broken(call)


async def broken(call: grpc.aio.StreamStreamCall[Request, Response]) -> grpc.aio.AioRpcError:
    """Why the stream ended, to be raised."""
    details = await call.details() or "the stream ended"
    return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def first_error(group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> grpc.aio.AioRpcError:
    """The break itself; reader and writer may both have noticed it."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
