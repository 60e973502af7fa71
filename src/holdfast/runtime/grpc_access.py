"""The table of authorization (`runtime.authorization`) in gRPC: every call of every service is checked once, when it begins.

A long stream costs one check, not one for each message. `caller()` tells a method who has called it."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc
import structlog

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.authorization import RULES, Accepts, Arrival, Caller, Rule, Verdict, decide
from holdfast.runtime.grpc_fleet import LOG_EVERY_S, LOGGED_MAX, REFUSED
from holdfast.runtime.identities import Identity, SpiffeRule, identities_in

URIS, SECURITY = "peer_uri", "transport_security_type"  # of gRPC's auth context

log = structlog.get_logger("holdfast.runtime.access")
_NOBODY_KNOWN = Caller()
_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who has made the call that this task serves."""
    return _caller.get(_NOBODY_KNOWN)


class Access(grpc.aio.ServerInterceptor):
    """Guards every method of a server; to be its first interceptor, so that nothing else of a refused call runs."""

    def __init__(self, accepts: Accepts, spiffe: Sequence[SpiffeRule] = (), rules: Mapping[str, Rule] = RULES) -> None:
        self._accepts, self._spiffe, self._rules = accepts, tuple(spiffe), rules
        self._logged: dict[tuple[str, str], float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        method = getattr(handler, kind)
        wrap = self._generating if inspect.isasyncgenfunction(method) else self._awaited
        return handler._replace(**{kind: wrap(handler_call_details.method, method)})

    def _awaited(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            verdict = await self._enter(name, context)
            token = _caller.set(verdict.caller)
            try:
                return await method(request, context)
            finally:
                _caller.reset(token)

        return serve

    def _generating(self, name: str, method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            await self._enter(name, context)
            async with aclosing(method(request, context)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    yield answer

        return serve

    async def _enter(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> Verdict:
        verdict = self._judge(name, context)
        if verdict.refusal:
            self._log(name, context.peer(), verdict.refusal)
            await context.abort(REFUSED, verdict.refusal)
        return verdict

    def _judge(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> Verdict:
        try:
            arrival = Arrival(context.peer().startswith("unix:"), self._identities(context.auth_context()))
        except InvalidSpec as error:
            return Verdict(str(error))
        return decide(name, arrival, self._accepts, self._rules)

    def _identities(self, proved: Mapping[str, Iterable[bytes]]) -> tuple[Identity, ...] | None:
        if b"ssl" not in proved.get(SECURITY, ()):
            return None
        uris = [uri.decode(errors="replace") for uri in proved.get(URIS, ())]
        return identities_in(uris, self._accepts.fleet, self._spiffe)

    def _log(self, method: str, peer: str, reason: str) -> None:
        host, now = peer.rpartition(":")[0], time.monotonic()
        if now - self._logged.get((host, reason), -LOG_EVERY_S) < LOG_EVERY_S:
            return
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged[host, reason] = now
        log.warning("call refused", method=method, peer=peer, reason=reason, repeated_after_s=LOG_EVERY_S)
