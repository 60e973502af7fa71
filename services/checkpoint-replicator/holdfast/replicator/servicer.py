"""gRPC ↔ engine: converts messages to values and back, and errors to a status with their message."""

# ruff: noqa: N802  (names of calls)

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from importlib.metadata import version
from typing import Any, TypeVar

import grpc

from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IntegrityError,
    InvalidSpec,
    MalformedMessage,
    NotFound,
    OutOfSpace,
    Unrestorable,
)
from holdfast.replicator.engine import Engine
from holdfast.replicator.mover import Mover
from holdfast.replicator.stager import Stager
from holdfast.replicator.transport.links import Links
from holdfast.v1 import replicator_pb2 as pb
from holdfast.v1 import replicator_pb2_grpc as rpc
from holdfast.wire import links as wire_links
from holdfast.wire import shards as wire
from holdfast.wire.retention import decode_end, decode_prune, decode_retain

SERVICE = "holdfast.v1.Replicator"

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[S, Q, Context], Awaitable[A]]

_STATUS: tuple[tuple[type[HoldfastError], grpc.StatusCode], ...] = (
    (InvalidSpec, grpc.StatusCode.INVALID_ARGUMENT),
    (MalformedMessage, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (OutOfSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (IntegrityError, grpc.StatusCode.DATA_LOSS),
    (Unrestorable, grpc.StatusCode.ABORTED),
    (HoldfastError, grpc.StatusCode.UNAVAILABLE),
)


def _reporting_errors(handle: Handler[S, Q, A]) -> Handler[S, Q, A]:
    """Abort the call with the status and the message of a `HoldfastError` that the handler raises."""

    @wraps(handle)
    async def reporting(self: S, request: Q, context: Context) -> A:
        try:
            return await handle(self, request, context)
        except HoldfastError as error:
            await context.abort(next(status for kind, status in _STATUS if isinstance(error, kind)), str(error))
            raise AssertionError("abort() raises") from error

    return reporting


class Servicer(rpc.ReplicatorServicer):
    def __init__(self, engine: Engine, stager: Stager, mover: Mover, links: Links, endpoint: str) -> None:
        self._engine = engine
        self._stager = stager
        self._mover = mover
        self._links = links
        self._endpoint = endpoint

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return pb.DescribeResponse(endpoint=self._endpoint, version=version(DISTRIBUTION))

    @_reporting_errors
    async def Configure(self, request: pb.ConfigureRequest, context: Context) -> pb.ConfigureResponse:
        await self._engine.configure(wire.decode_configure(request))
        return pb.ConfigureResponse()

    @_reporting_errors
    async def Stage(self, request: pb.StageRequest, context: Context) -> pb.StageResponse:
        return wire.encode_staged(await self._stager.stage(wire.decode_stage(request)))

    @_reporting_errors
    async def Archive(self, request: pb.ArchiveRequest, context: Context) -> pb.ArchiveResponse:
        await self._engine.archive(wire.decode_archive(request))
        return pb.ArchiveResponse()

    @_reporting_errors
    async def Retain(self, request: pb.RetainRequest, context: Context) -> pb.RetainResponse:
        await self._engine.retain(decode_retain(request))
        return pb.RetainResponse()

    async def WatchInventory(
        self, request: pb.WatchInventoryRequest, context: Context
    ) -> AsyncIterator[pb.ReplicatorInventory]:
        async for inventory, troubles in self._engine.watch(request.job):
            yield wire.encode_inventory(inventory, troubles)

    @_reporting_errors
    async def End(self, request: pb.EndRequest, context: Context) -> pb.EndResponse:
        await self._engine.end(decode_end(request))
        return pb.EndResponse()

    @_reporting_errors
    async def Prune(self, request: pb.PruneRequest, context: Context) -> pb.PruneResponse:
        await self._engine.prune(decode_prune(request), self._mover.idle)
        return pb.PruneResponse()

    @_reporting_errors
    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        await self._engine.forget(request.job, self._mover.idle)
        return pb.ForgetResponse()

    @_reporting_errors
    async def OpenLink(self, request: pb.OpenLinkRequest, context: Context) -> pb.OpenLinkResponse:
        self._links.door.open(wire_links.decode_open(request))
        return pb.OpenLinkResponse()

    @_reporting_errors
    async def MeasureLink(self, request: pb.MeasureLinkRequest, context: Context) -> pb.MeasureLinkResponse:
        return wire_links.encode_measured(await self._links.measure(wire_links.decode_measure(request)))

    async def CloseLink(self, request: pb.CloseLinkRequest, context: Context) -> pb.CloseLinkResponse:
        self._links.door.close()
        return pb.CloseLinkResponse()
