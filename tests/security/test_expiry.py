"""A certificate that expires between two connections: the supervisor's log names the node, and the agent's log its own file."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from certified import issue, loaded, session
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from structlog.testing import capture_logs
from supervising import start_supervisor
from waiting import wait_until_async

from holdfast.agent.connection.streams import Failures
from holdfast.log.memory import MemoryLog
from holdfast.runtime.trust import expiry
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.expiry import own_problem
from holdfast.runtime.trust.identities import Identity, Role

pytestmark = pytest.mark.anyio

LIFE_S = 8.0


def short_lived(authority: Authority, node: str) -> dict[str, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate, _ = authority.sign_agent(
        key.public_key(), Identity("main", Role.AGENT, node), timedelta(seconds=LIFE_S)
    )
    folder = authority.directory / node
    folder.mkdir()
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return {"tls_cert": folder / "tls.crt", "tls_key": folder / "tls.key", "tls_ca": authority.directory / "ca.crt"}


async def test_both_sides_name_a_certificate_that_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "LOOK_S", 0.05)
    authority = Authority.create(tmp_path / "ca", "main", 2)
    server, _ = issue(authority, Role.SUPERVISOR)
    with capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            sup = await start_supervisor(tasks, tmp_path / "sup", MemoryLog(), **server)
            endpoint = f"localhost:{sup.control.rpartition(':')[2]}"
            tls = loaded(**short_lived(authority, "node-7"))
            async with session(endpoint, tls, "node-7"):
                await wait_until_async(
                    lambda: any(each["event"] == "certificate of a caller has expired" for each in lines),
                    description="a line about the certificate",
                )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with session(endpoint, tls, "node-7"):
                    pass
            tasks.cancel_scope.cancel()
    [named] = [each for each in lines if each["event"] == "certificate of a caller has expired"]
    assert (named["certificate"], named["common_name"]) == ("agent/node-7", "agent/node-7")
    assert "holdfast ca issue agent/node-7" in named["advice"]
    assert any(each["event"] == "certificate of a caller expires soon" for each in lines)
    with capture_logs() as of_agent:
        Failures(explain=lambda: own_problem(tls, time.time())).failed(
            "control session failed", endpoint, refused.value
        )
    [line] = of_agent
    assert f"the certificate of this side (agent/node-7, {tls.files[0]}) expired at" in line["reason"]
    assert "holdfast nodes invite node-7" in line["reason"]
