"""Common code of the two gRPC streams: a failed stream raises one exception with a reason, both for reads and for writes; and
both ends prove of which fleet they are (`runtime.fleet`)."""

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
from holdfast.runtime.fleet import Introduction
from holdfast.runtime.grpc_channel import cancellable
from holdfast.runtime.grpc_fleet import REFUSED

PROOF_TIMEOUT_S = 3.0
METADATA_TIMEOUT_S = 1.0  # services of versions before join tokens send none before their first answer
REASON_TIMEOUT_S = 0.5
REFUSED_S = (
    5.0  # pause after every endpoint was of another fleet; also what this costs when the right service takes the port
)

REPEATED_EVERY_S = 60.0

Request = TypeVar("Request")
Response = TypeVar("Response")

log = structlog.get_logger("holdfast.agent.streams")


class Failures:
    """Which failures of one stream are logged: the first, each of another kind than the one before, and one a minute. A service
    that is away for a day, or an address that is wrong, fails every second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[str, float, int]] = {}  # endpoint → kind, when it was logged, how many since

    def failed(self, event: str, endpoint: str, error: grpc.aio.AioRpcError) -> None:
        code, reason = error.code().name, error.details() or ""
        # Why a service is not reached is worded by the operating system, and differs from one attempt to the next.
        kind = code if error.code() is grpc.StatusCode.UNAVAILABLE else f"{code}: {reason}"
        self._warn(event, endpoint, kind, code=code, reason=reason)

    def refused(self, event: str, endpoint: str, reason: str) -> None:
        self._warn(event, endpoint, reason, reason=reason)

    def _warn(self, event: str, endpoint: str, kind: str, **details: object) -> None:
        """Failures of one `kind` are the same. `times`: how many of it there were since the last one that was logged."""
        known, logged_at, unsaid = self._last.get(endpoint, ("", 0.0, 0))
        now = self._clock()
        if kind == known and now - logged_at < REPEATED_EVERY_S:
            self._last[endpoint] = kind, logged_at, unsaid + 1
            return
        self._last[endpoint] = kind, now, 0
        times = {"times": unsaid + 1} if kind == known and unsaid else {}
        log.warning(event, endpoint=endpoint, **details, **times)

    def over(self, endpoint: str) -> None:
        """It has answered: its next failure is a new one."""
        self._last.pop(endpoint, None)


async def join(call: grpc.aio.StreamStreamCall[Request, Response], introduction: Introduction) -> None:
    """To be called before the first message is sent. Raises `OtherFleet` if a proof is demanded and not given in time."""
    demands_proof = introduction.membership.demands_proof
    with freeze.patience(PROOF_TIMEOUT_S if demands_proof else METADATA_TIMEOUT_S) as waiting:
        if not await check(call, introduction):
            # The reason of a refusal is lost when a message is written to a stream that has ended.
            await _raise_refusal(call)
    if demands_proof and waiting.cancelled_caught:
        raise OtherFleet(
            f"this service has not proved within {PROOF_TIMEOUT_S:g} s that it is of the agent's fleet: it has no join token"
        )


async def check(call: grpc.aio.StreamStreamCall[Request, Response], introduction: Introduction) -> Mapping[str, str]:
    """Return what the service says of its fleet. Raises `OtherFleet` if that is another one, `AioRpcError` if it has refused
    the call."""
    received = await cancellable(call.initial_metadata())
    answer = {key: value for key, value in received if isinstance(value, str)}
    try:
        introduction.check(answer)
    except OtherFleet:
        await _raise_refusal(call)
        raise
    return answer


async def _raise_refusal(call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
    """A service that refuses the call sends its reason without metadata before it. Returns if there is none."""
    with anyio.move_on_after(REASON_TIMEOUT_S):
        await cancellable(call.code())
        raise await broken(call) from None


def is_of_another_fleet(error: Exception) -> bool:
    """Whether `join`, `check` or the service says so: then another attempt right away is of no use."""
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
