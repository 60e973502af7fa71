"""Sessions of agents with certificates of an own CA, for tests of mutual TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from supervising import facts
from waiting import TIMEOUT_S

from holdfast.domain.orders import Hello
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.tls import Tls
from holdfast.v1.control_pb2_grpc import ControlStub
from holdfast.wire.control import encode_report


def issue(authority: Authority, role: Role, name: str = "") -> tuple[dict[str, Any], str]:
    """The settings of a process that has a new certificate, and its serial number."""
    pair = authority.issue([Identity("main", role, name)], ["localhost", "127.0.0.1"], 1)
    folder = authority.directory / pair.record.serial
    folder.mkdir()
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    files = {"tls_cert": folder / "tls.crt", "tls_key": folder / "tls.key", "tls_ca": authority.directory / "ca.crt"}
    return files, pair.record.serial


def loaded(**settings: Any) -> Tls:
    tls = ServiceSettings(fleet="main", **settings).tls
    assert tls is not None
    return tls


@asynccontextmanager
async def session(endpoint: str, tls: Tls, node: str) -> AsyncIterator[Any]:
    """Greeted and welcome."""
    async with open_channel(endpoint, tls) as channel:
        call: Any = ControlStub(channel).Session()
        with anyio.fail_after(TIMEOUT_S):
            await call.write(encode_report(Hello(facts(node)), 1))
            assert (await call.read()).WhichOneof("message") == "welcome"
        yield call
        call.cancel()
