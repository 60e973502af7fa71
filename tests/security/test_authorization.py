"""The table of authorization: each method of each service has a row, and each cell (method × role) holds over real gRPC with
real certificates."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import certificates
import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

import holdfast.v1
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.authorization import RULES
from holdfast.runtime.trust.tls import Tls

pytestmark = pytest.mark.anyio

CLEAR, LOCAL = "without TLS", "Unix socket"
EVERYBODY = {
    "supervisor",
    "diagnostics",
    "agent",
    "replicator",
    "operator",
    "other-fleet",
    "unreadable",
    "foreign-uri",
    "ours",
    CLEAR,
    LOCAL,
}
# Written out, not taken from the table that is tested: who may call a method of a service. Everybody else may not.
WHO_MAY = {
    "holdfast.v1.Control": {"agent", CLEAR, LOCAL},
    "holdfast.v1.Enrolment": {"agent", CLEAR, LOCAL},  # whose certificate: the method itself, test_invitations.py
    "holdfast.v1.Telemetry": {"agent", CLEAR, LOCAL},
    "holdfast.v1.Replicator": {LOCAL},
    "grpc.health.v1.Health": EVERYBODY - {"unreadable"},
    "grpc.reflection.v1alpha.ServerReflection": EVERYBODY - {"unreadable"},
}  # fmt: skip


def services() -> Iterator[Any]:
    """The descriptors of all services of Holdfast's protocols, and of those that each server has besides."""
    for module in pkgutil.iter_modules(holdfast.v1.__path__, "holdfast.v1."):
        if module.name.endswith("_pb2"):
            yield from importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
    yield from health_pb2.DESCRIPTOR.services_by_name.values()
    yield from reflection_pb2.DESCRIPTOR.services_by_name.values()


METHODS = {f"/{service.full_name}/{method.name}": method for service in services() for method in service.methods}


def test_each_method_of_each_service_has_a_row_and_no_row_is_without_a_method() -> None:
    assert set(RULES) == set(METHODS)
    assert {name.split("/")[1] for name in METHODS} == set(WHO_MAY)


class Served:
    """Every method of the table, and one more, on one server. Counts what gets through to a method."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def register(self, server: grpc.aio.Server) -> None:
        strange = "/holdfast.v1.Control/Forgotten"
        for name in (*METHODS, strange):
            _, service, method = name.split("/")
            if service.startswith("grpc."):
                continue  # `listen` has them
            streams = METHODS.get(name)
            handler = self._handler(
                name, bool(streams and streams.client_streaming), bool(streams and streams.server_streaming)
            )
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))  # fmt: skip

    def _handler(self, name: str, requests: bool, answers: bool) -> Any:
        async def single(_: Any, context: Any) -> bytes:
            self.calls.append(name)
            return b"done"

        async def several(_: Any, context: Any) -> AsyncIterator[bytes]:
            self.calls.append(name)
            yield b"done"

        if answers:
            kind = grpc.stream_stream_rpc_method_handler if requests else grpc.unary_stream_rpc_method_handler
            return kind(several)
        return grpc.unary_unary_rpc_method_handler(single)


def settings(pki: Path, leaf: str, **more: Any) -> ServiceSettings:
    return ServiceSettings(fleet="main", **{**certificates.files(pki, leaf), **more})


@asynccontextmanager
async def serving(address: str, tls: Tls | None) -> AsyncIterator[tuple[Served, str]]:
    served = Served()
    async with listen(address, served.register, services=(), tls=tls) as listening:
        yield served, listening.endpoint


@asynccontextmanager
async def calling(pki: Path, tls: Tls | None, who: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of `who` to a server with `tls`."""
    async with (
        serving("localhost:0", tls) as (_, endpoint),
        open_channel(endpoint, certificates.tls(pki, who, "ours")) as channel,
    ):
        yield channel


async def called(channel: grpc.aio.Channel, name: str) -> tuple[bool, str]:
    """Whether the method was reached, and what was said if not. Streams of requests stay empty: a message that meets the end of
    a refused call loses the reason."""
    method = METHODS.get(name)
    streams = (method.client_streaming, method.server_streaming) if method is not None else (False, False)
    kind = f"{'stream' if streams[0] else 'unary'}_{'stream' if streams[1] else 'unary'}"
    start: Any = getattr(channel, kind)(name)
    call = start(timeout=30) if streams[0] else start(b"", timeout=30)
    try:
        if name.startswith("/grpc.") and streams[0]:
            await call.done_writing()
        await (call.read() if streams[1] else call)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return False, error.details() or ""
        if not name.endswith("Health/List"):  # it is reached, and not implemented in gRPC's servicer
            raise
    finally:
        call.cancel()
    return True, ""


@pytest.mark.parametrize("who", sorted(EVERYBODY))
async def test_each_cell_of_method_and_role(pki: Path, tmp_path: Path, who: str) -> None:
    tls = settings(pki, "supervisor").tls
    theirs = None if who in (CLEAR, LOCAL) else certificates.tls(pki, who, "ours")
    address = f"unix:{tmp_path}/s.sock" if who == LOCAL else "localhost:0"
    async with (
        serving(address, tls if theirs else None) as (served, endpoint),
        open_channel(endpoint, theirs) as channel,
    ):
        wrong = {}
        for name in METHODS:
            may, reason = await called(channel, name)
            if may is not (who in WHO_MAY[name.split("/")[1]]):
                wrong[name] = may, reason
            if not may:
                assert name not in served.calls
                assert reason != ""
        assert wrong == {}
        may, reason = await called(channel, "/holdfast.v1.Control/Forgotten")
        assert not may, "a method without a row"
        assert "is not in the table of authorization" in reason or who == "unreadable"


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("diagnostics", "/holdfast.v1.Control/Session is for agent, and the certificate is of holdfast://main/diagnostics"),
        ("other-fleet", "the certificate is of holdfast://other/agent/node-0"),
        ("ours", "the certificate has no identity: it needs a URI holdfast://main/ROLE"),
        ("unreadable", "identity: 'holdfast://main/king' is not valid; expected holdfast://FLEET/ and supervisor"),
    ],
)  # fmt: skip
async def test_a_refusal_names_what_is_wrong_to_both_sides(pki: Path, who: str, reason: str) -> None:
    with capture_logs() as logs:
        async with calling(pki, settings(pki, "supervisor").tls, who) as channel:
            for _ in range(10):
                may, said = await called(channel, "/holdfast.v1.Control/Session")
                assert (may, reason in said) == (False, True), said
    warnings = [each for each in logs if each["event"] == "call refused"]
    assert len(warnings) == 1, "once per host, reason and minute"
    assert reason in warnings[0]["reason"]


@pytest.mark.parametrize(
    ("own", "demand", "accepted"),
    [
        ("supervisor", "auto", {"agent"}),
        ("supervisor", "required", {"agent"}),
        ("supervisor", "optional", {"agent", "ours", "foreign-uri"}),
        ("ours", "auto", {"agent", "ours", "foreign-uri"}),  # an installation of before identities
        ("ours", "required", {"agent"}),
    ],
)
async def test_who_is_let_in_without_an_identity(pki: Path, own: str, demand: str, accepted: set[str]) -> None:
    """In no case a certificate that has an identity, and not the one that is needed."""
    tls = settings(pki, own, tls_identities=demand).tls
    let_in = set()
    async with serving("localhost:0", tls) as (_, endpoint):
        for who in ("agent", "ours", "foreign-uri", "diagnostics", "other-fleet", "unreadable"):
            async with open_channel(endpoint, certificates.tls(pki, who, "ours")) as channel:
                if (await called(channel, "/holdfast.v1.Telemetry/Stream"))[0]:
                    let_in.add(who)
    assert let_in == accepted


async def test_certificates_of_a_spiffe_issuer_by_a_mapping(pki: Path) -> None:
    tls = settings(pki, "supervisor", tls_spiffe="spiffe://example.org/agent/{name}=agent/{name}").tls
    async with calling(pki, tls, "foreign-uri") as channel:
        assert await called(channel, "/holdfast.v1.Control/Session") == (True, "")
