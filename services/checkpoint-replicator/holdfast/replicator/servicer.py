"""gRPC ↔ engine: converts messages to values and back, and errors to a status with their message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

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

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

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


class Servicer(rpc.ReplicatorServicer):
    def __init__(self, engine: Engine, stager: Stager, mover: Mover, links: Links, endpoint: str) -> None:
        self._engine = engine
        self._stager = stager
        self._mover = mover
        self._links = links
        self._endpoint = endpoint

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: Context
    ) -> pb.DescribeResponse:
        return pb.DescribeResponse(endpoint=self._endpoint, version=version(DISTRIBUTION))

    async def Configure(  # noqa: N802
        self, request: pb.ConfigureRequest, context: Context
    ) -> pb.ConfigureResponse:
        async def configure() -> None:
            await self._engine.configure(wire.decode_configure(request))

        await _answered(context, configure())
        return pb.ConfigureResponse()

    async def Stage(  # noqa: N802
        self, request: pb.StageRequest, context: Context
    ) -> pb.StageResponse:
        async def stage() -> pb.StageResponse:
            return wire.encode_staged(await self._stager.stage(wire.decode_stage(request)))

        return await _answered(context, stage())

    async def Archive(  # noqa: N802
        self, request: pb.ArchiveRequest, context: Context
    ) -> pb.ArchiveResponse:
        async def archive() -> None:
            await self._engine.archive(wire.decode_archive(request))

        await _answered(context, archive())
        return pb.ArchiveResponse()

    async def Retain(  # noqa: N802
        self, request: pb.RetainRequest, context: Context
    ) -> pb.RetainResponse:
        async def retain() -> None:
            await self._engine.retain(decode_retain(request))

        await _answered(context, retain())
        return pb.RetainResponse()

    async def WatchInventory(  # noqa: N802
        self,
        request: pb.WatchInventoryRequest,
        context: Context,
    ) -> AsyncIterator[pb.ReplicatorInventory]:
        async for inventory, troubles in self._engine.watch(request.job):
            yield wire.encode_inventory(inventory, troubles)

    async def End(  # noqa: N802
        self, request: pb.EndRequest, context: Context
    ) -> pb.EndResponse:
        async def end() -> None:
            await self._engine.end(decode_end(request))

        await _answered(context, end())
        return pb.EndResponse()

    async def Prune(  # noqa: N802
        self, request: pb.PruneRequest, context: Context
    ) -> pb.PruneResponse:
        async def prune() -> None:
            await self._engine.prune(decode_prune(request), self._mover.idle)

        await _answered(context, prune())
        return pb.PruneResponse()

    async def Forget(  # noqa: N802
        self, request: pb.ForgetRequest, context: Context
    ) -> pb.ForgetResponse:
        await _answered(context, self._engine.forget(request.job, self._mover.idle))
        return pb.ForgetResponse()

    async def OpenLink(  # noqa: N802
        self, request: pb.OpenLinkRequest, context: Context
    ) -> pb.OpenLinkResponse:
        async def open_link() -> None:
            self._links.door.open(wire_links.decode_open(request))

        await _answered(context, open_link())
        return pb.OpenLinkResponse()

    async def MeasureLink(  # noqa: N802
        self, request: pb.MeasureLinkRequest, context: Context
    ) -> pb.MeasureLinkResponse:
        async def measure() -> pb.MeasureLinkResponse:
            return wire_links.encode_measured(await self._links.measure(wire_links.decode_measure(request)))

        return await _answered(context, measure())

    async def CloseLink(  # noqa: N802
        self, request: pb.CloseLinkRequest, context: Context
    ) -> pb.CloseLinkResponse:
        self._links.door.close()
        return pb.CloseLinkResponse()


async def _answered(context: Context, work: Awaitable[T]) -> T:
    try:
        return await work
    except HoldfastError as error:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        await _abort(context, status, str(error))


async def _abort(context: Context, status: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(status, text)
    raise AssertionError("abort() raises")
