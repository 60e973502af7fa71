"""Certificates that are renewed while a supervisor and an agent have a session: it goes on, the next connection uses them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import certificates
import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from lone_sessions import lone_session
from structlog.testing import capture_logs
from supervising import start_supervisor
from waiting import TIMEOUT_S, wait_until_async

from holdfast.agent.connection.session import Session
from holdfast.log.memory import MemoryLog
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.telling import telemetry
from holdfast.runtime.telling.metrics import CERTIFICATE_EXPIRY, Metric
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.renewal import renewed
from holdfast.runtime.trust.tls import Tls

pytestmark = pytest.mark.anyio


@pytest.fixture
def renewable(tmp_path: Path) -> Path:
    """A CA of this test, whose leaves are replaced in it."""
    folder = tmp_path / "pki"
    folder.mkdir()
    certificates.make(folder)
    certificates.issue(folder, "supervisor", "holdfast://main/supervisor")
    certificates.issue(folder, "agent", "holdfast://main/agent/node-0")
    return folder


def tls_of(pki: Path, leaf: str) -> Tls:
    loaded = ServiceSettings(fleet="main", **{**certificates.files(pki, leaf)}).tls  # type: ignore[arg-type]
    assert loaded is not None
    return loaded


def an_agent(endpoint: str, tls: Tls) -> Session:
    return lone_session([endpoint], "node-0", tls=tls)


async def connected(sup: Any) -> bool:
    return [node["connected"] for node in (await sup.get("/v1/nodes"))["items"]] == [True]


async def test_certificates_are_renewed_during_a_session(renewable: Path, tmp_path: Path) -> None:
    """By another CA, so that it shows who uses the old ones: the old pair is refused, the new one is welcome."""
    async with anyio.create_task_group() as tasks:
        files: dict[str, Any] = {**certificates.files(renewable, "supervisor")}
        sup = await start_supervisor(tasks, tmp_path / "sup", MemoryLog(), **files)
        endpoint = f"localhost:{sup.control.rpartition(':')[2]}"
        with capture_logs() as logs:
            tasks.start_soon(an_agent(endpoint, tls_of(renewable, "agent")).run)
            await wait_until_async(lambda: connected(sup), description="the session")
            old = tls_of(renewable, "agent")
            certificates.make(renewable)
            for leaf, uri in (("supervisor", "holdfast://main/supervisor"), ("agent", "holdfast://main/agent/node-0")):
                certificates.issue(renewable, leaf, uri)
            async with open_channel(endpoint, tls_of(renewable, "agent")) as channel:
                with anyio.fail_after(TIMEOUT_S):
                    await channel.channel_ready()
            with pytest.raises(grpc.aio.AioRpcError):
                async with open_channel(endpoint, old) as channel:
                    await HealthStub(channel).Check(HealthCheckRequest(), timeout=30)
            assert await connected(sup)
        assert not [each for each in logs if each["event"].startswith(("control session failed", "session ended"))]
        assert [each["event"] for each in logs].count("control session opened") == 1
        assert "certificate renewed" in [each["event"] for each in logs]
        tasks.cancel_scope.cancel()


async def test_an_agent_reconnects_with_the_renewed_certificate(renewable: Path, tmp_path: Path) -> None:
    """The same process, the same session object: it read its files when it started, and the CA of that time is gone."""
    async with anyio.create_task_group() as tasks:
        session = an_agent("localhost:1", tls_of(renewable, "agent"))
        certificates.make(renewable)
        certificates.issue(renewable, "supervisor", "holdfast://main/supervisor")
        certificates.issue(renewable, "agent", "holdfast://main/agent/node-0")
        files: dict[str, Any] = {**certificates.files(renewable, "supervisor")}
        sup = await start_supervisor(tasks, tmp_path / "sup", MemoryLog(), **files)
        session._endpoints = (f"localhost:{sup.control.rpartition(':')[2]}",)
        tasks.start_soon(session.run)
        await wait_until_async(lambda: connected(sup), description="the session with the renewed certificate")
        tasks.cancel_scope.cancel()


def test_files_that_are_not_whole_are_not_used(renewable: Path) -> None:
    before = tls_of(renewable, "agent")
    assert renewed(before) is before
    certificates.issue(renewable, "next", "holdfast://main/agent/node-0")
    certificates.issue(renewable, "other", "holdfast://main/agent/node-9")
    cert, key = renewable / "agent.pem", renewable / "agent.key"

    def refused(reason: str) -> None:
        with capture_logs() as logs:
            assert renewed(before) is before
        assert reason in logs[0]["reason"]

    shutil.copy(renewable / "next.pem", cert)
    refused("the certificate of the key in HOLDFAST_TLS_KEY")
    shutil.copy(renewable / "other.pem", cert)
    shutil.copy(renewable / "other.key", key)
    refused("a certificate for holdfast://main/agent/node-0")
    cert.write_text("")
    refused("a PEM file with a certificate")
    cert.unlink()
    assert renewed(before) is before, "between two files"
    shutil.copy(renewable / "next.pem", cert)
    shutil.copy(renewable / "next.key", key)
    assert renewed(before).cert == (renewable / "next.pem").read_bytes()


def test_the_metric_says_when_the_certificate_expires(renewable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []

    def show(metric: Metric, points: Iterable[tuple[float, object]]) -> None:
        assert metric is CERTIFICATE_EXPIRY
        shown.extend(value for value, _ in points)

    monkeypatch.setattr(telemetry, "show", show)
    tls = ServiceSettings(fleet="main", **{**certificates.files(renewable, "supervisor")}).tls_as(Role.SUPERVISOR)  # type: ignore[arg-type]
    assert tls is not None
    certificates.issue(renewable, "supervisor", "holdfast://main/supervisor", days=3)
    renewed(tls)
    in_days = [round((at - time.time()) / 86400) for at in shown]
    assert in_days == [30, 3]
