"""The client side of gRPC: the limits and pings of the server, quick reconnects, no hidden retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import grpc

from holdfast.runtime.rpc.grpc_options import COMMON
from holdfast.runtime.rpc.grpc_tracing import SendContext
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.renewal import renewed
from holdfast.runtime.trust.server_identity import look
from holdfast.runtime.trust.tls import Tls

Answer = TypeVar("Answer")

OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),  # also the time that one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # the library must not retry, because an order must not be sent twice
    ("grpc.enable_http_proxy", 0),  # peers are inside the cluster; a user's http_proxy must not reroute them
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit the back-off of another
)


@asynccontextmanager
async def connected(endpoint: str, tls: Tls | None, role: Role) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server of this role, which has proved it before anything is sent. Raises `OtherRole` if it is another, and
    `AioRpcError` if it does not answer. Without TLS, any server is accepted. Files of certificates that have
    changed are read again."""
    tls = renewed(tls) if tls is not None else None
    pinned = await look(endpoint, tls, role) if tls is not None and tls.checks_identities else b""
    async with open_channel(endpoint, tls, pinned) as channel:
        yield channel


def open_channel(endpoint: str, tls: Tls | None = None, pinned: bytes = b"") -> grpc.aio.Channel:
    """Return a channel to `host:port` or `unix:/path`, which connects on first use. Use it as an async context manager.

    `pinned`: PEM of the only certificate that the server may present."""
    interceptors = [SendContext()]
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=OPTIONS, interceptors=interceptors)
    return grpc.aio.secure_channel(
        endpoint, tls.channel_credentials(pinned), options=OPTIONS, interceptors=interceptors
    )


async def cancellable(call: Awaitable[Answer]) -> Answer:
    """Await a call, or one read of a stream, inside a cancel scope that can cancel it.

    A gRPC call that is cancelled raises its own, unmarked CancelledError. No scope recognises it, so it would pass every
    deadline and end the task group, and therefore the service, without a message.
    """
    try:
        return await call
    except asyncio.CancelledError:
        await anyio.lowlevel.checkpoint_if_cancelled()  # raises the scope's cancellation, if a scope cancelled the call
        raise
