"""Sign-in of browsers: what a cookie opens, for whom, and for how long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.runtime.trust.api_tokens import ApiRole, TokensFile, added, digest_of, text_of
from holdfast.supervisor.api import session

pytestmark = pytest.mark.anyio

TOKEN = "s3cret"
NOBODY = {"required": True, "signed_in": False, "until": None, "name": "", "role": None}
ANYBODY = {"required": False, "signed_in": True, "until": None, "name": "", "role": "admin"}
HERE = {"Origin": "http://test"}
ELSEWHERE = {"Origin": "http://evil.example"}


async def signed_in(make_api: Any) -> Any:
    api = await make_api(token=TOKEN)
    answer = await api.http.post("/v1/session", json={"token": TOKEN}, headers=HERE)
    assert answer.status_code == 200, answer.text
    return api


def cookie_of(answer: httpx.Response) -> str:
    return answer.headers["set-cookie"]


async def test_a_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(make_api: Any) -> None:
    api = await make_api(token=TOKEN)
    assert (await api.http.get("/v1/fleet")).status_code == 401
    assert (await api.http.get("/v1/session")).json() == NOBODY
    answer = await api.http.post("/v1/session", json={"token": TOKEN})
    assert answer.json()["signed_in"]
    attributes = cookie_of(answer).lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes
    assert "secure" not in attributes, "or a browser would not send it over plain HTTP"
    assert TOKEN not in attributes
    assert (await api.http.get("/v1/fleet")).status_code == 200
    assert (await api.http.get("/v1/session")).json()["until"] > time.time()


async def test_over_tls_the_cookie_stays_there(make_api: Any) -> None:
    api = await make_api(token=TOKEN)
    answer = await api.http.post("https://test/v1/session", json={"token": TOKEN})
    assert "secure" in cookie_of(answer).lower()


async def test_a_wrong_token_is_no_session(make_api: Any) -> None:
    api = await make_api(token=TOKEN)
    for body, status in (({"token": "s3cre"}, 401), ({"token": ""}, 422), ({}, 422)):
        answer = await api.http.post("/v1/session", json=body)
        assert answer.status_code == status
        assert "set-cookie" not in answer.headers


async def test_signing_out_deletes_the_cookie(make_api: Any) -> None:
    api = await signed_in(make_api)
    assert (await api.http.delete("/v1/session", headers=HERE)).json()["signed_in"] is False
    assert (await api.http.get("/v1/fleet")).status_code == 401


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda cookie: cookie[:-1] + ("0" if cookie[-1] != "0" else "1"),
        lambda cookie: "9" + cookie,
        lambda cookie: str(int(cookie.split(".")[0]) + 9) + "." + cookie.split(".", 1)[1],
        lambda cookie: cookie.rsplit(".", 1)[0] + ".",
        lambda _: "",
        lambda _: "..",
        lambda _: "²²²." + "0" * 32,
        lambda _: session.issue("another token", time.time() + 100),
        lambda _: session.issue("", time.time() + 100),
        lambda _: session.issue(TOKEN, time.time() - 1),
    ],
)
def test_a_cookie_that_is_over_or_not_ours_stands_for_nothing(spoiled: Any) -> None:
    cookie = session.issue(TOKEN, time.time() + 100)
    assert session.token_of(cookie, ("other", TOKEN, ""), time.time()) is not None
    assert session.token_of(spoiled(cookie), ("other", TOKEN, ""), time.time()) is None


@pytest.mark.parametrize("token", [TOKEN, ""])
async def test_a_page_of_another_site_changes_nothing(make_api: Any, token: str) -> None:
    """Neither with a cookie that the browser adds, nor at an API on this machine that asks for no token."""
    api = await make_api(token=token)
    if token:
        await api.http.post("/v1/session", json={"token": token})
    api.node("n1")
    path = "/v1/nodes/n1/cordon"
    for headers in (ELSEWHERE, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = await api.http.post(path, headers=headers)
        assert answer.status_code == 403, headers
        assert "may change something" in answer.json()["detail"]
        assert answer.headers["content-type"] == "application/problem+json"
    assert (await api.http.post("/v1/session", json={"token": "x"}, headers=ELSEWHERE)).status_code == 403
    assert (await api.http.post(path, headers=HERE)).status_code == 202
    assert (await api.http.post(path)).status_code == 202, "no browser sends this"


async def test_the_header_is_enough_wherever_a_request_comes_from(make_api: Any) -> None:
    api = await make_api(token=TOKEN)
    api.node("n1")
    headers = ELSEWHERE | {"Authorization": f"Bearer {TOKEN}"}
    assert (await api.http.post("/v1/nodes/n1/cordon", headers=headers)).status_code == 202
    assert (await api.http.get("/v1/session", headers=headers)).json()["signed_in"]


async def test_a_wrong_header_is_not_mended_by_a_cookie(make_api: Any) -> None:
    api = await signed_in(make_api)
    assert (await api.http.get("/v1/fleet", headers={"Authorization": "Bearer wrong"})).status_code == 401


async def test_without_a_token_nobody_has_to_sign_in(api: Any) -> None:
    assert (await api.http.get("/v1/session")).json() == ANYBODY
    answer = await api.http.post("/v1/session", json={"token": "anything"})
    assert answer.json()["required"] is False
    assert "set-cookie" not in answer.headers


@pytest.fixture
def viewer(tmp_path: Path) -> tuple[TokensFile, str]:
    tokens, token = added((), "ada", ApiRole.VIEWER, time.time())
    path = tmp_path / "tokens.json"
    path.write_bytes(text_of(tokens))
    return TokensFile(path), token


async def test_a_token_with_a_role_signs_in_with_its_role(make_api: Any, viewer: tuple[TokensFile, str]) -> None:
    tokens, token = viewer
    api = await make_api(token=TOKEN, tokens=tokens)
    api.node("n1")
    answer = await api.http.post("/v1/session", json={"token": token}, headers=HERE)
    assert (answer.json()["name"], answer.json()["role"]) == ("ada", "viewer")
    assert (await api.http.get("/v1/fleet")).status_code == 200
    assert (await api.http.post("/v1/nodes/n1/cordon", headers=HERE)).status_code == 403
    found = (await api.http.get("/v1/session")).json()
    assert (found["signed_in"], found["name"], found["role"]) == (True, "ada", "viewer")


async def test_a_session_ends_with_its_token(make_api: Any, viewer: tuple[TokensFile, str], tmp_path: Path) -> None:
    tokens, token = viewer
    api = await make_api(tokens=tokens)
    assert (await api.http.get("/v1/session")).json() == NOBODY
    await api.http.post("/v1/session", json={"token": token}, headers=HERE)
    assert (await api.http.get("/v1/fleet")).status_code == 200
    (tmp_path / "tokens.json").write_bytes(text_of(()))
    assert (await api.http.get("/v1/fleet")).status_code == 401
    assert (await api.http.get("/v1/session")).json() == NOBODY


async def test_the_digest_of_a_token_signs_no_cookie(make_api: Any, viewer: tuple[TokensFile, str]) -> None:
    """Whoever has read the file of tokens has no token."""
    tokens, token = viewer
    api = await make_api(tokens=tokens)
    for key in (digest_of(token), token):
        cookie = session.issue(key, time.time() + 100)
        answer = await api.http.get("/v1/fleet", headers={"Cookie": f"{session.COOKIE}={cookie}"})
        assert answer.status_code == 401
