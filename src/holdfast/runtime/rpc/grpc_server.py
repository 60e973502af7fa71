"""A gRPC server with health checking, reflection, limits, fast detection of lost peers, and optional mTLS."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.lowlevel
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.hosts import host_and_port
from holdfast.runtime.rpc.grpc_access import Access
from holdfast.runtime.rpc.grpc_fleet import Door
from holdfast.runtime.rpc.grpc_options import COMMON, PING_INTERVAL_MS
from holdfast.runtime.rpc.grpc_tracing import TakeContext
from holdfast.runtime.trust.authorization import RULES, Accepts, Rule
from holdfast.runtime.trust.expiry import OwnExpiry
from holdfast.runtime.trust.fleet import Membership
from holdfast.runtime.trust.renewal import server_credentials
from holdfast.runtime.trust.revocation import revocations_of
from holdfast.runtime.trust.tls import Tls

STOP_GRACE_S = 0.5
CANCELLED_WITHIN_S = 5.0  # after a write to a connection that is broken
# Calls that wait to be accepted: all agents of a fleet, which reconnect at the same time after a restart, and a few more.
PENDING_CALLS_MAX = 65_536
PENDING_S_MAX = 600

OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON,
    # Without this, two processes can listen on one port and share its connections unnoticed.
    ("grpc.so_reuseport", 0),
    # By default, a client that pings more often than every five minutes is disconnected.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS // 4),
    # A client also sends pings to measure bandwidth on a busy stream, which the server counts as well: a connection was ended
    # with "too many pings" (seen with 1.85 on the replicator's inventory stream).
    ("grpc.http2.max_ping_strikes", 0),
    # From 1,000 waiting calls on, gRPC ends some at random, from 3,000 on all, with CANCELLED and no message (seen with 1.85).
    ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
    # By default, gRPC also ends a call that has waited for 30 s, as in a process that was frozen or had no processor.
    ("grpc.server_max_unrequested_time_in_server", PENDING_S_MAX),
)


Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that serves. `endpoint` is `host:port` with the real port, or `unix:/path`."""

    endpoint: str
    port: int  # 0 for a Unix socket


@asynccontextmanager
async def listen(
    address: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    services: Sequence[str],
    tls: Tls | None = None,
    membership: Membership | None = None,
    rules: Mapping[str, Rule] = RULES,
) -> AsyncIterator[Listening]:
    """Serve on `address` (`host:port`, port 0 = any, or `unix:/path`) for the duration of the block.

    `register` adds the servicers; `services` are their full names (`holdfast.v1.Telemetry`), for health and reflection. With
    `membership`, only agents of that fleet may call them. `rules`: who may call which method; those without a rule are refused.
    Raises `Conflict` with the reason if the address cannot be bound. At the end, health turns NOT_SERVING and calls get
    `STOP_GRACE_S` to end.
    """
    door = [Door(membership, services)] if membership is not None else []
    access = _access(tls, rules)
    server = grpc.aio.server(interceptors=[access, TakeContext(), *door], options=OPTIONS)
    register(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, address, tls)
    await server.start()
    try:
        for service in ("", *services):
            await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
        async with access.watching(None if tls is None else OwnExpiry(tls)):
            yield Listening(endpoint=_endpoint(address, port), port=0 if address.startswith("unix:") else port)
    finally:
        with anyio.CancelScope(shield=True):
            await checks.enter_graceful_shutdown()
            await server.stop(STOP_GRACE_S)


def _access(tls: Tls | None, rules: Mapping[str, Rule]) -> Access:
    if tls is None:
        return Access(Accepts(), (), rules)
    return Access(tls.accepts, tls.spiffe, rules, revocations_of(tls))


async def write_whole(context: grpc.aio.ServicerContext[Request, Response], message: Response) -> None:
    """Write a message to a stream, and complete the write even if cancelled. This is quick if the peer reads.

    If the first write of a call is cancelled, grpc.aio does not record that it has sent the initial metadata, sends it again
    with the status, and the core rejects both (`GRPC_CALL_ERROR_TOO_MANY_OPERATIONS`, seen with 1.85). The peer would wait
    indefinitely on an abandoned call. A peer that never reads blocks the caller until its connection breaks or the server
    stops.

    If the connection has broken while this process was frozen, the write fails before grpc.aio has noticed the end of the
    call. It then cancels the call's handler, for which this waits: a handler that fails first is logged as a bug, with two
    tracebacks.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    try:
        with anyio.CancelScope(shield=True):
            await context.write(message)
    except grpc.aio.InternalError:
        await anyio.sleep(CANCELLED_WITHIN_S)
        raise


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    _probe(address)
    try:
        port = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, server_credentials(tls))
        )
    except RuntimeError as error:
        raise Conflict(f"cannot listen on {address}: {error}") from error
    return port


def _probe(address: str) -> None:
    """Bind the address once before the core does, because the core reports a failure without its reason."""
    if address.startswith("unix:"):
        return
    if (parsed := host_and_port(address)) is None:
        raise InvalidSpec("listen address", address, "host:port (port 0 takes any free one) or unix:/path")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(*parsed, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise Conflict(
            f"cannot listen on {address}: {error.strerror or error}; stop whoever has it, or choose another address "
            "(port 0 takes any free one)"
        ) from error


def _endpoint(address: str, port: int) -> str:
    if address.startswith("unix:"):
        return address
    host, _, _ = address.rpartition(":")
    return f"{host}:{port}"
