"""The table of authorization (`runtime.authorization`) in gRPC: every call of every service is checked once, when it begins.

A long stream costs one check, not one for each message. `caller()` tells a method who has called it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import grpc

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.rpc.grpc_fleet import REFUSED
from holdfast.runtime.telling.refusal_log import RefusalLog
from holdfast.runtime.trust.authorization import RULES, Accepts, Arrival, Caller, Rule, Verdict, decide
from holdfast.runtime.trust.expiry import CallerExpiry, OwnExpiry
from holdfast.runtime.trust.identities import Identity, SpiffeRule, identities_in
from holdfast.runtime.trust.revocation import Revocations, serial_of, serials_of, shown

# of gRPC's auth context
URIS, SECURITY, PEM, CHAIN = "peer_uri", "transport_security_type", "x509_pem_cert", "x509_pem_cert_chain"
REVOKED_EVERY_S = 2.0  # how often the CRL is looked at while calls are open

_NOBODY_KNOWN = Caller()
_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who has made the call that this task serves."""
    return _caller.get(_NOBODY_KNOWN)


class Access(grpc.aio.ServerInterceptor):
    """Guards every method of a server; to be its first interceptor, so that nothing else of a refused call runs."""

    def __init__(
        self,
        accepts: Accepts,
        spiffe: Sequence[SpiffeRule] = (),
        rules: Mapping[str, Rule] = RULES,
        revocations: Revocations | None = None,
    ) -> None:
        self._accepts, self._spiffe, self._rules = accepts, tuple(spiffe), rules
        self._revocations = revocations
        self._open: dict[int, set[anyio.CancelScope]] = {}  # by serial number of the certificate, if there is a CRL
        self._refusals = RefusalLog("holdfast.runtime.access", "call refused")
        self._expiry = CallerExpiry()

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
                answered, answer = False, None
                with self._expiry.call(_pem(context), verdict.caller.identities or ()), self._until_revoked(context):
                    answer = await method(request, context)
                    answered = True
            finally:
                _caller.reset(token)
            if not answered:
                await self._refuse(name, context, "the certificate was revoked")
            return answer

        return serve

    def _generating(self, name: str, method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            verdict = await self._enter(name, context)
            with self._expiry.call(_pem(context), verdict.caller.identities or ()):
                async with aclosing(method(request, context)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        yield answer

        return serve

    async def _enter(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> Verdict:
        verdict = self._judge(name, context)
        if verdict.refusal:
            await self._refuse(name, context, verdict.refusal)
        return verdict

    async def _refuse(self, name: str, context: grpc.aio.ServicerContext[Any, Any], reason: str) -> None:
        self._refusals.add(context.peer(), reason, method=name)
        await context.abort(REFUSED, reason)

    def _judge(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> Verdict:
        if self._revocations is not None:
            self._revocations.refresh()
            for serial, what in _serials(context).items():
                if serial in self._revocations:
                    return Verdict(f"{what} (serial number {shown(serial)}) was revoked")
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

    @asynccontextmanager
    async def watching(self, own: OwnExpiry | None = None) -> AsyncIterator[None]:
        """During the block, calls of a certificate end within seconds after it was revoked, and certificates that expire are
        said in the log. `own`: of the server."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._expiry.run)
            if own is not None:
                tasks.start_soon(own.run)
            if self._revocations is not None:
                tasks.start_soon(self._end_revoked, self._revocations)
            yield
            tasks.cancel_scope.cancel()

    async def _end_revoked(self, revocations: Revocations) -> None:
        while True:
            await anyio.sleep(REVOKED_EVERY_S)
            revocations.refresh()
            for serial in [each for each in self._open if each in revocations]:
                for scope in self._open[serial]:
                    scope.cancel()

    @contextmanager
    def _until_revoked(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        if self._revocations is None:
            yield
            return
        serials = _serials(context)
        with anyio.CancelScope() as scope:
            for serial in serials:
                self._open.setdefault(serial, set()).add(scope)
            try:
                yield
            finally:
                for serial in serials:
                    self._open[serial].discard(scope)
                    if not self._open[serial]:
                        del self._open[serial]


def _pem(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    """Return the certificate of the caller; empty without TLS."""
    return next(iter(context.auth_context().get(PEM, ())), b"")


def _serials(context: grpc.aio.ServicerContext[Any, Any]) -> dict[int, str]:
    """Return the serial numbers of the caller's certificate and of the certificates between it and the CA, each with a
    description. Empty without TLS."""
    proved = context.auth_context()
    found = {serial_of(pem): "the certificate" for pem in proved.get(PEM, ())}
    for chain in proved.get(CHAIN, ()):
        found |= {serial: "the CA of the certificate" for serial in serials_of(chain) if serial not in found}
    return found
