"""A TCP proxy that loses answers: the server has carried a command out, and its client never hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteStream, SocketAttribute

CHUNK_BYTES = 65536


class CuttingProxy:
    """`cut_after(b"XADD")`: the next request that contains it is passed on, its answer is dropped, the connection closed."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._cut_after: bytes | None = None
        self.port = 0
        self.cuts = 0

    def cut_after(self, command: bytes) -> None:
        self._cut_after = command

    async def _serve(self, client: ByteStream) -> None:
        async with client, await anyio.connect_tcp("127.0.0.1", self._upstream_port) as server:
            doomed = False

            async def requests() -> None:
                nonlocal doomed
                async for request in client:
                    if self._cut_after is not None and self._cut_after in request:
                        self._cut_after, doomed = None, True
                    await server.send(request)
                tasks.cancel_scope.cancel()

            async def answers() -> None:
                async for answer in server:
                    if doomed:
                        self.cuts += 1
                        break
                    await client.send(answer)
                tasks.cancel_scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(requests)
                tasks.start_soon(answers)


@asynccontextmanager
async def cutting_proxy(upstream_port: int) -> AsyncIterator[CuttingProxy]:
    """On a free port of the loopback, in front of `upstream_port`."""
    proxy = CuttingProxy(upstream_port)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        proxy.port = listener.extra(SocketAttribute.local_port)
        tasks.start_soon(listener.serve, proxy._serve)
        yield proxy
        tasks.cancel_scope.cancel()
