"""The HTTP server inside the service's own event loop."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from fastapi import FastAPI

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.hosts import host_and_port
from holdfast.runtime.service import LoopEnded

STOP_GRACE_S = 1.0
TICK_S = 1.0  # of the Date header
BACKLOG = 512
CONNECTIONS_MAX = 1000


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = anyio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether it should end: half of what an idle supervisor does."""
        while not await self.on_tick(0):
            with anyio.move_on_after(TICK_S):
                await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's business (`runtime.service`)."""
        yield


def bind(address: str) -> socket.socket:
    """Raises `Conflict` when the address cannot be had, saying why."""
    if (parsed := host_and_port(address)) is None:
        raise InvalidSpec("HOLDFAST_API_LISTEN", address, "host:port (port 0 takes any free one)")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(*parsed, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise Conflict(
            f"cannot listen on {address}: {error.strerror or error}; stop whoever has it, or choose another "
            "HOLDFAST_API_LISTEN (port 0 takes any free one)"
        ) from error
    return listener


def url_of(listener: socket.socket, host: str = "", *, secure: bool = False) -> str:
    """`host`: by which clients reach it, if that is not where it listens."""
    bound, port = listener.getsockname()[:2]
    host = host or bound
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Serve `app` until the block is left; open streams get `STOP_GRACE_S` to end. Closes `listener`. `tls`: None = plain
    HTTP."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_GRACE_S,  # type: ignore[arg-type]  # whole seconds in its annotation only
        server_header=False,
    )
    config.load()
    config.ssl = tls  # made here: uvicorn's own context does not use renewed files
    server = _Server(config)
    over = anyio.Event()

    async def serve() -> None:
        # Shielded: it ends on request, so that its connections end in order.
        with anyio.CancelScope(shield=True):
            try:
                await server.serve(sockets=[listener])
            finally:
                over.set()
        if not server.should_exit:
            raise LoopEnded("the HTTP server ended by itself")

    listener.listen(BACKLOG)  # at once: a request that comes before the server has started waits, and is not refused
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            yield
        finally:
            server.leave()
            with anyio.CancelScope(shield=True):
                await over.wait()
