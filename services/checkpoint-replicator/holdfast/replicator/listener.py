"""The listener of the data plane: accepts connections and gives each to a thread, with a maximum number at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import anyio
import structlog

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.hosts import host_and_port

BACKLOG = 128

log = structlog.get_logger("holdfast.replicator.transport")


def bind(address: str) -> socket.socket:
    """Return a listening socket. Raises InvalidSpec if the address is not `host:port`, and Conflict if it cannot be bound."""
    if (parsed := host_and_port(address)) is None:
        raise InvalidSpec("HOLDFAST_REPLICATOR_LISTEN", address, "host:port (port 0 takes any free one)")
    try:
        family, *_, place = socket.getaddrinfo(*parsed, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((str(place[0]), int(place[1])), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Conflict(f"cannot listen on {address} for shard data: {error}") from error
    listener.setblocking(False)
    return listener


def endpoint(listener: socket.socket, reachable_at: str) -> str:
    """Return the address that is sent to peers. Raises InvalidSpec for a wildcard without an address."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        if not reachable_at:
            raise InvalidSpec("HOLDFAST_ADDRESS", "", f"where peers reach this node, since it listens on {host}")
        host = reachable_at
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def accept(listener: socket.socket, serve: Callable[[socket.socket], None], connections_max: int) -> None:
    """Accept connections. Never returns. Connections beyond the limit wait in the backlog until the client's timeout."""
    free = asyncio.Semaphore(connections_max)

    def finished(connection: asyncio.Future[None]) -> None:
        free.release()
        if not connection.cancelled() and (error := connection.exception()) is not None:
            log.error("connection handler failed", exc_info=error)

    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(connections_max, "connection")
    try:
        while True:
            await free.acquire()
            connection = await _next(listener)
            loop.run_in_executor(pool, serve, connection).add_done_callback(finished)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


async def _next(listener: socket.socket) -> socket.socket:
    while True:
        await anyio.wait_readable(listener)
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue  # the client has disconnected
        connection.setblocking(True)
        return connection
