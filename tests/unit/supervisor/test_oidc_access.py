"""Tokens of an OpenID Connect issuer at the REST API: roles, sessions of browsers, event streams, the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from oidc_issuer import AUDIENCE, ROLES, Issuer, issuing, rsa
from structlog.testing import capture_logs
from supervising import job_body

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust import oidc
from holdfast.runtime.trust.api_tokens import ApiRole, TokensFile, added, text_of
from holdfast.supervisor.api import access, event_tail, session
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.settings import SupervisorSettings

pytestmark = pytest.mark.anyio
MakeApi = Callable[..., Any]
HERE = {"Origin": "http://test"}
CORDON = "/v1/nodes/n1/cordon"


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing(rsa("k1")) as made:
        yield made


@pytest.fixture
async def api(make_api: MakeApi, issuer: Issuer) -> Any:
    made = await make_api(oidc=issuer.tokens())
    made.node("n1")
    return made


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_an_issuer_alone_closes_the_api(api: Any) -> None:
    for headers in ({}, bearer(""), bearer("hf_0"), bearer("eyJ.."), bearer("x")):
        answer = await api.http.get("/v1/jobs", headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await api.http.get("/v1/session")).json()["required"] is True


@pytest.mark.parametrize(("groups", "status"), [(["ml-platform"], 202), (["researchers"], 403), ([], 403)])
async def test_roles_are_those_of_the_claims(api: Any, issuer: Issuer, groups: list[str], status: int) -> None:
    headers = bearer(issuer.token(groups=groups))
    assert (await api.http.get("/v1/jobs", headers=headers)).status_code == 200
    assert (await api.http.post(CORDON, headers=headers)).status_code == status


async def test_without_a_rule_for_it_a_valid_token_is_not_enough(make_api: MakeApi, issuer: Issuer) -> None:
    api = await make_api(oidc=issuer.tokens(roles=oidc.parse_roles("groups:ml-platform=operator")))
    answer = await api.http.get("/v1/jobs", headers=bearer(issuer.token()))
    assert (answer.status_code, "gives oidc:ada a role" in answer.text) == (403, True)
    assert (await api.http.get("/v1/session", headers=bearer(issuer.token()))).json()["signed_in"] is False


async def test_a_refusal_says_what_is_wrong_with_the_token(api: Any, issuer: Issuer) -> None:
    answer = await api.http.get("/v1/jobs", headers=bearer(issuer.token(aud="another")))
    assert (answer.status_code, f"it must be {AUDIENCE}" in answer.json()["detail"]) == (401, True)
    assert "expired" in (await api.http.get("/v1/jobs", headers=bearer(issuer.token(exp=1)))).text


async def test_a_dead_issuer_is_a_503_for_its_tokens_and_nothing_for_others(make_api: MakeApi, tmp_path: Path) -> None:
    with issuing(rsa("k1")) as issuer:
        token = issuer.token(groups=["ml-platform"])
        tokens, of_ada = added((), "ada", ApiRole.VIEWER, time.time())
        (tmp_path / "tokens.json").write_bytes(text_of(tokens))
        api = await make_api("eyJ.looks.alike", tokens=TokensFile(tmp_path / "tokens.json"), oidc=issuer.tokens())
    answer = await api.http.get("/v1/jobs", headers=bearer(token))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert issuer.url in answer.json()["detail"]
    assert (await api.http.get("/v1/jobs")).status_code == 401, "and not open"
    for own in ("eyJ.looks.alike", of_ada):
        assert (await api.http.get("/v1/jobs", headers=bearer(own))).status_code == 200
    assert (await api.http.post("/v1/session", json={"token": token}, headers=HERE)).status_code == 503


async def test_jobs_belong_to_the_name_of_the_issuer_and_no_token_in_a_file_can_have_it(
    make_api: MakeApi, issuer: Issuer, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec, match="not beginning with oidc:"):
        added((), "oidc:ada", ApiRole.SUBMITTER, time.time())
    tokens, of_ada = added((), "ada", ApiRole.SUBMITTER, time.time())
    path = tmp_path / "tokens.json"
    path.write_bytes(text_of(tokens).replace(b'"ada"', b'"oidc:ada"'))
    with pytest.raises(InvalidSpec, match="oidc:ada"):
        TokensFile(path)
    path.write_bytes(text_of(tokens))
    audit = await AuditStore.open(tmp_path / "audit.sqlite3")
    api = await make_api(tokens=TokensFile(path), oidc=issuer.tokens(), audit=audit)
    mine = bearer(issuer.token(groups=["researchers"]))
    with capture_logs() as logs:
        assert (await api.http.post("/v1/jobs", json=job_body(name="gpt"), headers=mine)).status_code == 202
    assert [(each["who"], each["role"]) for each in logs if each["event"] == "audit"] == [("oidc:ada", "submitter")]
    operator = bearer(issuer.token(sub="grace", groups=["ml-platform"]))
    [line] = (await api.http.get("/v1/audit", headers=operator)).json()["items"]
    assert line["who"] == "oidc:ada"
    await audit.aclose()
    api.job(name="gpt", owner="oidc:ada")
    assert (await api.http.post("/v1/jobs/gpt/stop", headers=bearer(of_ada))).status_code == 403
    assert (await api.http.post("/v1/jobs/gpt/stop", headers=mine)).status_code == 202


async def test_operators_see_whose_tokens_count(api: Any, issuer: Issuer) -> None:
    answer = await api.http.get("/v1/people", headers=bearer(issuer.token(groups=["ml-platform"])))
    assert answer.json()["oidc"] == {"issuer": issuer.url, "audiences": [AUDIENCE], "roles": ROLES.split(", ")}


# ---------------------------------------------------------------- browsers


async def test_a_browser_signs_in_and_its_session_ends_with_the_token(
    api: Any, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = int(time.time()) + 300
    token = issuer.token(groups=["researchers"], exp=ends)
    answer = await api.http.post("/v1/session", json={"token": token}, headers=HERE)
    body = answer.json()
    assert (body["name"], body["role"], body["until"]) == ("oidc:ada", "submitter", ends)
    age = int(answer.headers["set-cookie"].partition("Max-Age=")[2].partition(";")[0])
    assert 290 <= age <= 300
    assert (await api.http.get("/v1/fleet")).status_code == 200
    assert (await api.http.post(CORDON, headers=HERE)).status_code == 403
    # A browser that keeps the cookie for longer has nothing of it.
    kept = {"Cookie": f"{session.COOKIE}={ends + 9999}.{token}"}
    assert (await api.http.get("/v1/fleet", headers=kept)).status_code == 200
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 300 + oidc.LEEWAY_S)
    assert (await api.http.get("/v1/fleet", headers=kept)).status_code == 401
    assert (await api.http.get("/v1/fleet")).status_code == 401
    assert (await api.http.get("/v1/session")).json()["signed_in"] is False


async def test_a_session_lasts_twelve_hours_at_most(api: Any, issuer: Issuer) -> None:
    token = issuer.token(exp=int(time.time()) + 90 * 86_400)
    body = (await api.http.post("/v1/session", json={"token": token}, headers=HERE)).json()
    assert body["until"] <= time.time() + session.LASTS_S


@pytest.mark.parametrize("claims", [{"exp": 1}, {"aud": "another"}, {"iss": "https://evil.example"}])
async def test_a_token_that_is_not_accepted_signs_nobody_in(api: Any, issuer: Issuer, claims: dict[str, Any]) -> None:
    answer = await api.http.post("/v1/session", json={"token": issuer.token(**claims)}, headers=HERE)
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    cookie = {"Cookie": f"{session.COOKIE}={int(time.time()) + 600}.{issuer.token(**claims)}"}
    assert (await api.http.get("/v1/fleet", headers=cookie)).status_code == 401


async def test_a_token_that_no_cookie_holds_is_refused_with_the_reason(api: Any, issuer: Issuer) -> None:
    token = issuer.token(groups=["g" * 10] * 400)
    assert (await api.http.get("/v1/fleet", headers=bearer(token))).status_code == 200
    answer = await api.http.post("/v1/session", json={"token": token}, headers=HERE)
    assert (answer.status_code, "to fit into a cookie" in answer.json()["detail"]) == (422, True)


# ---------------------------------------------------------------- event streams


@pytest.mark.parametrize("ends", ["expired", "revoked"])
async def test_an_event_stream_ends_with_its_token(
    make_api: MakeApi, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    tokens, of_ada = added((), "ada", ApiRole.VIEWER, time.time())
    path = tmp_path / "tokens.json"
    path.write_bytes(text_of(tokens))
    monkeypatch.setattr(event_tail, "WAIT_S", 0.02)
    api = await make_api(tokens=TokensFile(path), oidc=issuer.tokens())
    token = issuer.token() if ends == "expired" else of_ada
    over, answered = anyio.Event(), []

    async def follow() -> None:
        answered.append(await api.http.get("/v1/events", headers=bearer(token)))
        over.set()

    checks, goes_on = 0, anyio.Event()
    plain = access.identify

    def counted(*arguments: Any) -> Any:
        nonlocal checks
        checks += 1
        if checks == 5:
            goes_on.set()
        return plain(*arguments)

    monkeypatch.setattr(access, "identify", counted)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        with anyio.fail_after(10):
            await goes_on.wait()
            assert not over.is_set()
            if ends == "expired":
                monkeypatch.setattr(time, "time", lambda now=time.time: now() + 600 + oidc.LEEWAY_S)
            else:
                path.write_bytes(text_of(()))
            await over.wait()
    assert answered[0].status_code == 200


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(("environment", "named"), [
    ({"ISSUER": "https://issuer.example"}, oidc.AUDIENCE), ({"AUDIENCE": "x"}, oidc.ISSUER),
    ({"ISSUER": "http://issuer.example", "AUDIENCE": "x", "ROLES": "*=viewer"}, oidc.ISSUER),
    ({"ISSUER": "https://issuer.example", "AUDIENCE": "x", "ROLES": "*=king"}, oidc.ROLES),
    ({"ISSUER": "https://issuer.example", "AUDIENCE": "x", "ROLES": "*=viewer", "CA": "/no/such/file"}, "HOLDFAST_API_OIDC_CA"),
])  # fmt: skip
def test_a_supervisor_does_not_start_with_half_of_an_issuer(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], named: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"HOLDFAST_API_OIDC_{name}", value)
    settings = SupervisorSettings(redis_url="redis://x", data_dir=Path("/x"))
    with pytest.raises(InvalidSpec, match=named):
        _ = settings.api_oidc
