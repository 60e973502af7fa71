"""Common code of the two gRPC streams. A failed stream raises one exception with a reason, for reads and for writes. Both ends
prove that they belong to the same fleet (`runtime.fleet`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import anyio
import grpc
import structlog

from holdfast.domain.errors import OtherFleet
from holdfast.runtime import freeze
from holdfast.runtime.rpc.grpc_channel import cancellable
from holdfast.runtime.rpc.grpc_fleet import REFUSED
from holdfast.runtime.trust.fleet import Introduction

PROOF_TIMEOUT_S = 3.0
METADATA_TIMEOUT_S = 1.0  # services of versions before join tokens send none before their first answer
REASON_TIMEOUT_S = 0.5
# pause if every endpoint belongs to another fleet; a service of the right fleet is noticed after this time
REFUSED_S = 5.0

REPEATED_EVERY_S = 60.0

# grpc.aio's own words for a write to a call that the other end has just ended. They replace the status that was on its way.
ENDED_UNDER_A_WRITE = "Internal error from Core"

Request = TypeVar("Request")
Response = TypeVar("Response")

log = structlog.get_logger("holdfast.agent.connection.streams")


class Failures:
    """Logs failures of one stream: the first, each whose kind differs from the previous one, and one a minute. An unavailable
    service or a wrong address causes a failure every second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, explain: Callable[[], str] = lambda: "") -> None:
        """`explain`: what this side knows of the cause, such as its expired certificate; empty = nothing."""
        self._clock = clock
        self._explain = explain
        self._last: dict[str, tuple[str, float, int]] = {}  # endpoint → kind, time of the log line, failures since

    def failed(self, event: str, endpoint: str, error: grpc.aio.AioRpcError) -> None:
        code, reason = error.code().name, error.details() or ""
        if error.code() is grpc.StatusCode.INTERNAL and reason == ENDED_UNDER_A_WRITE:
            reason = "the service ended the call while this agent wrote to it, so its reason is not known"
            self._warn(event, endpoint, self._last.get(endpoint, (reason,))[0], code=code, reason=reason)
            return
        if explained := self._explain():
            self._warn(event, endpoint, explained, code=code, reason=explained, error=reason)
            return
        # The operating system's reason why a service is not reached differs from one attempt to the next.
        kind = code if error.code() is grpc.StatusCode.UNAVAILABLE else f"{code}: {reason}"
        self._warn(event, endpoint, kind, code=code, reason=reason)

    def refused(self, event: str, endpoint: str, reason: str) -> None:
        self._warn(event, endpoint, reason, reason=reason)

    def _warn(self, event: str, endpoint: str, kind: str, **details: object) -> None:
        """Log a failure unless one of the same `kind` was logged recently. `times`: number of failures since that log line."""
        known, logged_at, unlogged = self._last.get(endpoint, ("", 0.0, 0))
        now = self._clock()
        if kind == known and now - logged_at < REPEATED_EVERY_S:
            self._last[endpoint] = kind, logged_at, unlogged + 1
            return
        self._last[endpoint] = kind, now, 0
        times = {"times": unlogged + 1} if kind == known and unlogged else {}
        log.warning(event, endpoint=endpoint, **details, **times)

    def over(self, endpoint: str) -> None:
        """Record that the endpoint has answered. Its next failure is logged as a new one."""
        self._last.pop(endpoint, None)


async def join(call: grpc.aio.StreamStreamCall[Request, Response], introduction: Introduction) -> None:
    """Check the service before the first message is sent. Raises `OtherFleet` if a required proof does not arrive in time."""
    demands_proof = introduction.membership.demands_proof
    with freeze.patience(PROOF_TIMEOUT_S if demands_proof else METADATA_TIMEOUT_S) as waiting:
        if not await check(call, introduction):
            # Writing to a stream that has ended would lose the reason of the refusal.
            await _raise_refusal(call)
    if demands_proof and waiting.cancelled_caught:
        raise OtherFleet(
            f"this service has not proved within {PROOF_TIMEOUT_S:g} s that it is of the agent's fleet: it has no join token"
        )


async def check(call: grpc.aio.StreamStreamCall[Request, Response], introduction: Introduction) -> Mapping[str, str]:
    """Return the service's metadata about its fleet. Raises `OtherFleet` if the fleet is another one, and `AioRpcError` if the
    service has refused the call."""
    received = await cancellable(call.initial_metadata())
    answer = {key: value for key, value in received if isinstance(value, str)}
    try:
        introduction.check(answer)
    except OtherFleet:
        await _raise_refusal(call)
        raise
    return answer


async def _raise_refusal(call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
    """Raise the refusal of the call, which a service sends without initial metadata. Returns if there is none."""
    with anyio.move_on_after(REASON_TIMEOUT_S):
        await cancellable(call.code())
        raise await broken(call) from None


def is_of_another_fleet(error: Exception) -> bool:
    """Whether `join`, `check` or the service has reported another fleet. An immediate retry is then useless."""
    return isinstance(error, OtherFleet) or (isinstance(error, grpc.aio.AioRpcError) and error.code() is REFUSED)


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
