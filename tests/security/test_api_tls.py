"""The REST API with TLS: real supervisors, the command's own client, and everything that must be refused or said."""

from __future__ import annotations

import gc
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import certificates
import httpx
import pytest
from structlog.testing import capture_logs
from supervising import Running, start_supervisor
from waiting import TIMEOUT_S, wait_until_async

from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi, Untrusted
from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.integrations.loggers.supervisor import Supervisor
from holdfast.log.memory import MemoryLog
from holdfast.log.redis import RedisLog
from holdfast.runtime.probe import main as probe_main
from holdfast.runtime.probe import probe
from holdfast.runtime.trust.api_trust import Trust

pytestmark = pytest.mark.anyio
TOKEN = "a-token-of-the-api"
ANYWHERE = "0.0.0.0:0"
T = TypeVar("T")


@pytest.fixture
def own(tmp_path: Path, pki: Path) -> Path:
    """A copy of the PKI, whose files a test replaces."""
    return shutil.copytree(pki, tmp_path / "pki")


@asynccontextmanager
async def serving(directory: Path, pki: Path, leaf: str = "supervisor", **settings: Any) -> AsyncIterator[Running]:
    files: dict[str, Any] = {**certificates.files(pki, leaf)}
    async with anyio.create_task_group() as tasks:
        options = {"api_listen": ANYWHERE, "api_token": TOKEN, "fleet": "main", **files, **settings}
        yield await start_supervisor(tasks, directory, MemoryLog(), **options)
        tasks.cancel_scope.cancel()


async def in_thread(call: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(call)


def trust(monkeypatch: pytest.MonkeyPatch, **files: Path) -> None:
    for name in ("HOLDFAST_API_CA", "HOLDFAST_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
        if file := files.get(name.removeprefix("HOLDFAST_").lower()):
            monkeypatch.setenv(name, str(file))


def version(url: str) -> Any:
    with Client(url, token=TOKEN) as client:
        return client.version()


def context(ca: Path) -> ssl.SSLContext:
    return Trust(only=ca).context()


async def refusal(url: str) -> str:
    with pytest.raises(HoldfastError) as refused:
        await in_thread(lambda: version(url))
    assert isinstance(refused.value, Untrusted), refused.value
    return str(refused.value)


async def test_beyond_loopback_the_certificate_of_the_service_is_used(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, pki) as sup:
        assert sup.api.startswith("https://localhost:"), "a name of the certificate"
        for name in ("api_ca", "tls_ca"):
            trust(monkeypatch, **{name: pki / "ours-ca.pem"})
            assert (await in_thread(lambda: version(sup.api)))["supervisor"] == "sup-1"
        # HOLDFAST_API_CA alone counts where it is set: a certificate of the services' CA is not enough
        trust(monkeypatch, api_ca=pki / "foreign-ca.pem", tls_ca=pki / "ours-ca.pem")
        said = await refusal(sup.api)
        assert "not signed by a CA that is trusted here" in said
        assert "set HOLDFAST_API_CA" in said
        trust(monkeypatch)
        assert "the CAs of the system" in await refusal(sup.api)
        trust(monkeypatch, api_ca=tmp_path / "gone.pem")
        with pytest.raises(InvalidSpec, match="HOLDFAST_API_CA"):
            version(sup.api)


async def test_http_to_the_port_of_https_and_the_reverse_say_what_to_do(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(monkeypatch, api_ca=pki / "ours-ca.pem")
    async with serving(tmp_path / "a", pki) as secure, serving(tmp_path / "b", pki, api_listen="127.0.0.1:0") as plain:
        port = secure.api.rpartition(":")[2]
        said = await refusal(f"http://localhost:{port}")
        assert f"HOLDFAST_API=https://localhost:{port}" in said
        assert plain.api.startswith("http://127.0.0.1:"), "only this machine reaches it"
        said = await refusal(plain.api.replace("http:", "https:"))
        assert "it answers without TLS" in said
        said = await in_thread(lambda: probe(f"http://localhost:{port}/healthz"))
        assert "use https://" in said
    with pytest.raises(NoApi, match="start one with `holdfast up`"):
        await in_thread(lambda: version("https://localhost:1"))


async def test_off_is_plain_http_for_a_proxy_and_on_is_tls_on_loopback(pki: Path, tmp_path: Path) -> None:
    async with serving(tmp_path / "a", pki, api_tls="off") as sup:
        assert sup.api.startswith("http://0.0.0.0:")
        async with sup.client(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            assert (await http.get("/v1/version")).json()["supervisor"] == "sup-1"
    async with serving(tmp_path / "b", pki, api_tls="on", api_listen="127.0.0.1:0") as sup:
        assert sup.api.startswith("https://127.0.0.1:")


@pytest.mark.parametrize(("names", "begins", "days", "said"), [
    (["localhost"], -3, 2, "has expired"),
    (["localhost"], 1, 2, "not valid yet"),
    (["elsewhere.example"], -1, 2, "for other names"),
])  # fmt: skip
async def test_a_certificate_that_is_not_valid_is_refused_with_its_reason(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], begins: int, days: int, said: str
) -> None:
    trust(monkeypatch, api_ca=own / "ours-ca.pem")
    certificates.issue_at(own, "bad", names=names, begins_in_days=begins, days=days)
    files: dict[str, Any] = {"api_tls_cert": own / "bad.pem", "api_tls_key": own / "bad.key"}
    with capture_logs() as logs:
        async with serving(tmp_path, own, **files) as sup:
            url = f"https://localhost:{sup.api.rpartition(':')[2]}"
            assert said in await refusal(url)
            assert said in await in_thread(lambda: probe(f"{url}/healthz", trust=Trust(own / "ours-ca.pem")))
    if names == ["localhost"]:
        assert any(said in each["event"] for each in logs), "the supervisor says it when it starts"


async def test_renewed_files_are_used_without_a_restart_and_open_streams_stay(own: Path, tmp_path: Path) -> None:
    """By another CA, so that it shows which certificate a connection gets."""
    cert, key = own / "supervisor.pem", own / "supervisor.key"
    async with serving(tmp_path, own) as sup:
        before, after = context(own / "ours-ca.pem"), context(own / "foreign-ca.pem")
        headers = {"Authorization": f"Bearer {TOKEN}"}

        async def accepted(trusted: ssl.SSLContext) -> bool:
            try:
                async with httpx.AsyncClient(verify=trusted, base_url=sup.api, headers=headers) as http:
                    return (await http.get("/v1/version")).is_success
            except httpx.ConnectError:
                return False

        async with (
            httpx.AsyncClient(verify=before, base_url=sup.api, headers=headers, timeout=30) as http,
            http.stream("GET", "/v1/events") as events,
        ):
            assert events.status_code == 200
            with capture_logs() as logs:
                shutil.copy(own / "foreign.pem", cert)  # without its key yet
                assert await accepted(before)
                assert not await accepted(after)
                reasons = [each["reason"] for each in logs if "not used" in each["event"]]
                assert len(reasons) == 1, "said once"
                assert "the certificate of the key in HOLDFAST_TLS_KEY" in reasons[0]
                shutil.copy(own / "foreign.key", key)
                assert await accepted(after)
                assert not await accepted(before)
                assert [each["event"] for each in logs].count("certificate of the API renewed") == 1
            async with httpx.AsyncClient(verify=after, base_url=sup.api, headers=headers) as other:
                answer = await other.post("/v1/breaker/reset", json={"reason": "to be seen"})
                assert answer.status_code == 202, answer.text
            with anyio.fail_after(TIMEOUT_S):
                assert await anext(line async for line in events.aiter_lines() if "to be seen" in line)


async def test_a_browser_signs_in_with_a_cookie_that_only_https_carries(pki: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, pki) as sup, sup.client(verify=context(pki / "ours-ca.pem")) as http:
        assert (await http.get("/v1/jobs")).status_code == 401
        answer = await http.post("/v1/session", json={"token": TOKEN}, headers={"Origin": sup.api})
        assert answer.status_code == 200, answer.text
        cookie = answer.headers["set-cookie"]
        assert {"Secure", "HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        assert (await http.get("/v1/jobs")).status_code == 200
        assert (await http.get("/")).text.lower().startswith("<!doctype html")
        other = await http.post("/v1/breaker/reset", json={"reason": "x"}, headers={"Origin": "https://evil.example"})
        assert other.status_code == 403
        assert "Secure" in (await http.delete("/v1/session")).headers["set-cookie"]
    async with serving(tmp_path / "plain", pki, api_tls="off") as sup, sup.client() as http:
        answer = await http.post("/v1/session", json={"token": TOKEN}, headers={"Origin": sup.api})
        assert "Secure" not in answer.headers["set-cookie"], "a browser would not send it back"


async def test_a_standby_asks_the_leader_with_tls_and_checks_its_certificate(
    own: Path, tmp_path: Path, redis_url: str
) -> None:
    files: dict[str, Any] = {**certificates.files(own, "supervisor")}
    options = {"api_listen": ANYWHERE, "api_token": TOKEN, "fleet": "main", **files}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with anyio.create_task_group() as tasks:
        first = await start_supervisor(tasks, tmp_path / "a", RedisLog(redis_url, "main"), name="a", **options)
        second = await start_supervisor(tasks, tmp_path / "b", RedisLog(redis_url, "main"), name="b", **options)
        trusted = context(own / "ours-ca.pem")

        async def answered_by() -> str | None:
            async with second.client(verify=trusted, headers=headers) as http:
                found = (await http.get("/v1/version")).json()
            return "b" if found["leader_api"] == second.api else "a" if found["leader_api"] == first.api else None

        leader = await wait_until_async(answered_by, description="a leader that both know")
        standby = second if leader == "a" else first
        with capture_logs() as logs:
            async with standby.client(verify=trusted, headers=headers) as http:
                assert (await http.get("/v1/audit")).status_code == 200, "forwarded"
            assert not [each for each in logs if each["event"] == "the leader cannot be reached"]
            # the leader gets the certificate of another CA; connections that the standby has kept are not made anew
            shutil.copy(own / "foreign.pem", own / "supervisor.pem")
            shutil.copy(own / "foreign.key", own / "supervisor.key")
            shutil.copy(own / "ours-ca.pem", own / "again.pem")
            (own / "ours-ca.pem").write_bytes((own / "again.pem").read_bytes())  # looked at again: new connections

            async def refused() -> list[Any]:
                async with standby.client(verify=context(own / "foreign-ca.pem"), headers=headers) as http:
                    assert (await http.get("/v1/jobs")).status_code == 200, "answered from the standby's own picture"
                return [each for each in logs if each["event"] == "the leader cannot be reached"]

            said = await wait_until_async(refused, description="the leader's certificate to be refused")
            assert said[0]["log_level"] == "warning"
            assert "set HOLDFAST_API_CA" in said[0]["reason"]
        tasks.cancel_scope.cancel()


async def test_health_checks_and_loggers_check_the_certificate(
    pki: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, wrong = {"HOLDFAST_API_CA": str(pki / "ours-ca.pem")}, {"HOLDFAST_API_CA": str(pki / "foreign-ca.pem")}
    async with serving(tmp_path, pki) as sup:
        target = f"{sup.api}/healthz"
        assert await in_thread(lambda: probe_main([target], good)) == 0
        assert await in_thread(lambda: probe_main([target], wrong)) == 1
        assert "set HOLDFAST_API_CA" in capsys.readouterr().out

        def read(environ: dict[str, str]) -> Any:
            asked = Supervisor.of_environment(
                {"HOLDFAST_API": sup.api, "HOLDFAST_API_TOKEN": TOKEN, **environ}, job="none", generation=1
            )
            assert asked is not None
            return asked.read(0)

        with pytest.raises(OSError, match="404"):
            await in_thread(lambda: read(good))
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await in_thread(lambda: read(wrong))
        with pytest.raises(InvalidSpec, match="HOLDFAST_API_CA"):
            read({"HOLDFAST_API_CA": str(tmp_path / "gone")})
    gc.collect()  # a connection that an answer with an error has left open is a warning now, and so an error


async def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(own: Path, tmp_path: Path) -> None:
    (own / "empty.pem").write_text("")
    for cert, key, said in (
        ("empty.pem", "ours.key", "HOLDFAST_API_TLS_CERT"),
        ("ours.pem", "foreign.key", "the certificate of the key in HOLDFAST_API_TLS_KEY"),
        ("gone.pem", "ours.key", "a readable PEM file"),
    ):
        with pytest.raises(ExceptionGroup) as failed:
            async with serving(tmp_path, own, api_tls_cert=own / cert, api_tls_key=own / key):
                pass
        assert failed.group_contains(InvalidSpec, match=said)
