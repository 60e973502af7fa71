"""Who may ask the REST API for what: each cell of route × role, other people's jobs, and tokens that are no longer valid."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from supervising import job_body

from holdfast.log.names import INBOX
from holdfast.runtime.trust.api_tokens import ApiRole, ApiToken, TokensFile, added, text_of, without
from holdfast.supervisor.api.access import ROUTES, refused
from holdfast.supervisor.api.backend import Principal
from holdfast.supervisor.inbox import InboxEvent
from holdfast.wire import records

pytestmark = pytest.mark.anyio
MakeApi = Callable[..., Any]

ROLES = ("viewer", "submitter", "operator", "admin")
# Written out, not taken from the table that is tested. All routes that are not here are for everybody with a token.
SUBMITTERS = {
    "POST /v1/jobs", "DELETE /v1/jobs/{name}", "POST /v1/jobs/{name}/stop", "POST /v1/jobs/{name}/resume",
    "POST /v1/jobs/{name}/attach", "POST /v1/jobs/{name}/checkpoint", "POST /v1/jobs/{name}/resize",
    "POST /v1/jobs/{name}/policy", "POST /v1/jobs/{name}/checkpoints/prune",
    "GET /v1/jobs/{name}/checkpoints/{attempt}/{step}/sources",
}  # fmt: skip
OPERATORS = {
    "POST /v1/jobs/{name}/faults", "POST /v1/nodes/{name}/cordon", "POST /v1/nodes/{name}/uncordon",
    "POST /v1/nodes/{name}/restart-agent", "PUT /v1/nodes/{name}/notices/{source}",
    "DELETE /v1/nodes/{name}/notices/{source}", "POST /v1/nodes/{name}/repair", "POST /v1/breaker/reset",
    "POST /v1/alerts/test", "GET /v1/audit", "GET /v1/people",
}  # fmt: skip
ADMINS = {"GET /v1/invites", "POST /v1/invites", "DELETE /v1/invites/{invite}"}


class People:
    """A tokens file with one token of each role, and a second submitter."""

    def __init__(self, path: Path) -> None:
        self.path, self.of = path, dict[str, str]()
        self._tokens: tuple[ApiToken, ...] = ()
        for name, role in (*((each, each) for each in ROLES), ("other", "submitter")):
            self._tokens, self.of[name] = added(self._tokens, name, ApiRole(role), time.time())
        self.path.write_bytes(text_of(self._tokens))

    def revoke(self, name: str) -> None:
        self.path.write_bytes(text_of(without(self._tokens, name)))

    def header(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.of[name]}"}


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path / "tokens.json")


@pytest.fixture
async def api(make_api: MakeApi, people: People) -> Any:
    made = await make_api("token-of-the-admin", tokens=TokensFile(people.path))
    made.node("n1")
    return made


OPEN = ("/v1/session", "/v1/enrolment")  # who signs in, or joins, has shown no token of the API yet


def routes(http: httpx.AsyncClient) -> set[str]:
    """All that the application has below /v1."""
    transport: Any = http._transport
    paths = transport.app.openapi()["paths"].items()
    mine = [(path, methods) for path, methods in paths if path.startswith("/v1/") and path not in OPEN]
    return {f"{method.upper()} {path}" for path, methods in mine for method in methods}


async def ask(api: Any, route: str, headers: dict[str, str], **names: str) -> httpx.Response:
    method, _, path = route.partition(" ")
    filled = re.sub(r"{(\w+)}", lambda each: names.get(each[1], "1"), path)
    strange = {"Last-Event-ID": "garbage"} if path == "/v1/events" else {}  # else it would not end
    answer: httpx.Response = await api.http.request(method, filled, headers={**headers, **strange})
    return answer


async def test_each_route_has_a_row_and_no_row_is_without_a_route(api: Any) -> None:
    assert routes(api.http) == set(ROUTES)
    assert set(ROUTES) >= SUBMITTERS | OPERATORS | ADMINS
    changing = {route for route in ROUTES if not route.startswith("GET ")}
    assert changing <= SUBMITTERS | OPERATORS | ADMINS, "nothing changes by a viewer's request"


def test_a_route_without_a_row_is_refused_to_everybody() -> None:
    for role in ApiRole:
        assert "is not in the table of access" in refused(Principal("ada", role), "POST /v1/forgotten")


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
async def test_each_cell_of_route_and_role(api: Any, people: People, role: str) -> None:
    headers = people.header(role) if role in people.of else {}
    wrong = {}
    for route in ROUTES:
        answer = await ask(api, route, headers)
        needed = 1 if route in SUBMITTERS else 2 if route in OPERATORS else 3 if route in ADMINS else 0
        expected = 401 if role == "nobody" else 403 if ROLES.index(role) < needed else 0
        if (answer.status_code if answer.status_code in (401, 403) else 0) != expected:
            wrong[route] = answer.status_code
        if expected == 403:
            assert f"and {role} has role {role}" in answer.json()["detail"]
    assert wrong == {}


@pytest.mark.parametrize("route", sorted(each for each in SUBMITTERS if "{name}" in each))
async def test_a_submitter_changes_its_own_jobs_only(api: Any, people: People, route: str) -> None:
    api.job(owner="submitter")
    with capture_logs() as logs:
        answer = await ask(api, route, people.header("other"), name="gpt")
    assert answer.status_code == 403
    assert (
        answer.json()["detail"] == "job gpt was submitted by submitter; other has role submitter, for its own jobs only"
    )
    (line,) = [each for each in logs if each["event"] == "request refused"]
    assert (line["who"], line["path"].startswith("/v1/jobs/gpt")) == ("other", True)
    for who in ("submitter", "operator", "admin"):
        assert (await ask(api, route, people.header(who), name="gpt")).status_code != 403


async def test_the_owner_of_a_job_is_whose_token_it_was_submitted_with(api: Any, people: People) -> None:
    body = job_body()
    answer = await api.http.post("/v1/jobs", json=body, headers=people.header("submitter"))
    assert answer.status_code == 202, answer.text
    (request,) = [records.loads(delivery.entry.data, InboxEvent) for delivery in await api.log.read(INBOX)]
    event = request.event
    assert event.owner == "submitter"
    api.fold(event)
    assert api.picture.state.jobs["gpt"].owner == "submitter"
    taken = await api.http.post("/v1/jobs?fresh=true", json=body, headers=people.header("other"))
    assert taken.status_code == 403
    assert "was submitted by submitter" in taken.json()["detail"]


async def test_a_job_of_nobody_is_for_operators(api: Any, people: People) -> None:
    """Of a version before tokens, or submitted while none was needed."""
    api.job()
    refused = await api.http.post("/v1/jobs/gpt/stop", headers=people.header("submitter"))
    assert (refused.status_code, "somebody without a token of their own" in refused.text) == (403, True)
    assert (await api.http.post("/v1/jobs/gpt/stop", headers=people.header("operator"))).status_code == 202


async def test_the_token_of_the_environment_is_an_admin(api: Any) -> None:
    headers = {"Authorization": "Bearer token-of-the-admin"}
    assert (await api.http.post("/v1/nodes/n1/cordon", headers=headers)).status_code == 202


async def test_without_tokens_everybody_is_an_admin(make_api: MakeApi) -> None:
    api = await make_api()
    api.node("n1")
    assert (await api.http.post("/v1/nodes/n1/cordon")).status_code == 202


async def test_an_empty_file_lets_nobody_in(make_api: MakeApi, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_bytes(text_of(()))
    api = await make_api(tokens=TokensFile(tmp_path / "empty.json"))
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer hf_0"}):
        assert (await api.http.get("/v1/jobs", headers=headers)).status_code in (401, 403)


async def test_a_revoked_token_is_refused_at_once_and_the_others_are_not(api: Any, people: People) -> None:
    assert (await api.http.get("/v1/jobs", headers=people.header("viewer"))).status_code == 200
    people.revoke("viewer")
    assert (await api.http.get("/v1/jobs", headers=people.header("viewer"))).status_code == 401
    assert (await api.http.get("/v1/jobs", headers=people.header("operator"))).status_code == 200


async def test_the_digest_of_a_token_is_no_token(api: Any, people: People) -> None:
    digest = re.findall(r'"digest": "(\w+)"', people.path.read_text())[0]
    assert (await api.http.get("/v1/jobs", headers={"Authorization": f"Bearer {digest}"})).status_code == 401
    assert not any(token in people.path.read_text() for token in people.of.values())


async def test_who_may_use_the_api_is_shown_to_operators_without_secrets(api: Any, people: People) -> None:
    answer = await api.http.get("/v1/people", headers=people.header("operator"))
    body = answer.json()
    assert body["admin_token"] is True
    assert [(each["name"], each["role"], each["valid"]) for each in body["tokens"]] == [
        (name, name if name in ROLES else "submitter", True) for name in sorted((*ROLES, "other"))
    ]
    assert (body["alert_addresses"], body["alert_topics"]) == ([], [])
    assert not any(token in answer.text for token in (*people.of.values(), "token-of-the-admin"))
    people.revoke("viewer")
    left = (await api.http.get("/v1/people", headers=people.header("operator"))).json()["tokens"]
    assert "viewer" not in {each["name"] for each in left}
