"""A certificate that was revoked: its open session ends, and it opens no other; a service that has one is not spoken to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from certified import issue, loaded, session
from supervising import start_supervisor
from waiting import TIMEOUT_S

from holdfast.domain.errors import InvalidSpec, OtherRole
from holdfast.log.memory import MemoryLog
from holdfast.runtime.rpc import grpc_access
from holdfast.runtime.rpc.grpc_channel import connected
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.identities import Role

pytestmark = pytest.mark.anyio


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "main", 2)


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_revoked_certificate_loses_its_session_and_gets_no_other(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_access, "REVOKED_EVERY_S", 0.05)
    server, _ = issue(authority, Role.SUPERVISOR)
    stolen, serial = issue(authority, Role.AGENT, "node-1")
    good, _ = issue(authority, Role.AGENT, "node-2")
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(
            tasks, tmp_path / "sup", MemoryLog(), **server, tls_crl=authority.directory / "crl.pem"
        )
        endpoint = f"localhost:{sup.control.rpartition(':')[2]}"
        async with session(endpoint, loaded(**stolen), "node-1") as call, session(endpoint, loaded(**good), "node-2"):
            authority.revoke(serial)
            with anyio.fail_after(TIMEOUT_S), pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_to_the_end(call)
            assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert ended.value.details() == "the certificate was revoked"
            with pytest.raises(grpc.aio.AioRpcError, match=f"serial number {serial}\\) was revoked"):
                async with session(endpoint, loaded(**stolen), "node-1"):
                    pass
            connections = {each["node"]: each["connected"] for each in (await sup.get("/v1/nodes"))["items"]}
            assert connections == {"node-1": False, "node-2": True}, "the other one's session goes on"
        tasks.cancel_scope.cancel()


async def test_an_agent_does_not_speak_to_a_service_whose_certificate_was_revoked(
    authority: Authority, tmp_path: Path
) -> None:
    server, serial = issue(authority, Role.SUPERVISOR)
    agent, _ = issue(authority, Role.AGENT, "node-1")
    tls = loaded(**agent, tls_crl=authority.directory / "crl.pem")
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path / "sup", MemoryLog(), **server)
        endpoint = f"localhost:{sup.control.rpartition(':')[2]}"
        async with connected(endpoint, tls, Role.SUPERVISOR) as channel:
            with anyio.fail_after(TIMEOUT_S):
                await channel.channel_ready()
        authority.revoke(serial)
        with pytest.raises(OtherRole, match="was revoked"):
            async with connected(endpoint, tls, Role.SUPERVISOR):
                pass
        await anyio.Path(authority.directory / "crl.pem").unlink()
        with pytest.raises(OtherRole, match="was revoked"):
            async with connected(endpoint, tls, Role.SUPERVISOR):
                pass
        tasks.cancel_scope.cancel()


async def test_a_list_that_is_gone_keeps_no_agent_from_its_supervisor(authority: Authority, tmp_path: Path) -> None:
    server, _ = issue(authority, Role.SUPERVISOR)
    agent, _ = issue(authority, Role.AGENT, "node-1")
    settings = ServiceSettings(fleet="main", **agent, tls_crl=authority.directory / "crl.pem")
    tls = settings.tls_as(Role.AGENT, name="node-1")
    await anyio.Path(authority.directory / "crl.pem").unlink()
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path / "sup", MemoryLog(), **server)
        async with connected(f"localhost:{sup.control.rpartition(':')[2]}", tls, Role.SUPERVISOR) as channel:
            with anyio.fail_after(TIMEOUT_S):
                await channel.channel_ready()
        tasks.cancel_scope.cancel()


def test_a_list_that_cannot_be_used_is_named_at_the_start(authority: Authority, tmp_path: Path) -> None:
    files, _ = issue(authority, Role.AGENT, "node-1")
    with pytest.raises(InvalidSpec, match="HOLDFAST_TLS_CRL"):
        ServiceSettings(fleet="main", **files, tls_crl=tmp_path / "none.pem").tls_as(Role.AGENT, name="node-1")
