"""The REST API: every route of its OpenAPI document, asked by everybody for anything.

schemathesis makes requests that conform to the document and requests that do not; bodies, paths and headers that no document
describes are added to them.

What must hold for each request:

* no answer is a 5xx, and none takes more time or memory than the bounds of a target
* the status, the media type and the body are what the document says; every error is a problem with its own status
* nothing comes into the inbox from who may not ask for it, and nothing of a refused request
* what is accepted can be folded, stored, published and sent, and everything can be shown afterwards
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import httpx
import schemathesis
from fuzz.mutations import TEXTS, damaged, documents, json_texts
from fuzz.rest_world import ADMINS_TOKEN, ANSWER_BYTES_MAX, World, run, world
from fuzz.target import Target
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.schemas import OpenApiSchema
from supervising import job_body

from holdfast.runtime.trust.api_tokens import ApiRole
from holdfast.supervisor.api.access import ROUTES
from holdfast.supervisor.api.problems import MEDIA_TYPE

ASKING = ("admin", "admin", "submitter", "operator", "other", "viewer", "nobody", "stranger")
BODIES: Mapping[str, tuple[Any, ...]] = {
    "POST /v1/jobs": (
        job_body("new"),
        {
            **job_body("new"),
            "mesh": {"dp": 2},
            "env": {"A": "b"},
            "env_from": {"S": {"file": "/secret"}},
            "priority": 3,
            "checkpoint": {"interval_steps": 5},
        },
    ),
    "POST /v1/jobs/{name}/stop": ({"reason": "why", "save": False},),
    "POST /v1/jobs/{name}/resume": ({"step": 20}, {}),
    "POST /v1/jobs/{name}/attach": ({"token": "t"},),
    "POST /v1/jobs/{name}/checkpoint": ({"grace_s": 5.0},),
    "POST /v1/jobs/{name}/resize": ({"dp": 2, "reason": "why"},),
    "POST /v1/jobs/{name}/checkpoints/prune": ({"steps": [{"attempt": 1, "step": 20}]},),
    "POST /v1/jobs/{name}/policy": ({"policy": ""}, {"policy": {"file": "/p.py", "params": {"x": 1}}}),
    "POST /v1/jobs/{name}/faults": ({"kind": "crash", "rank": 0}, {"kind": "clock_jump", "rank": 0, "offset_s": 2.0}),
    "PUT /v1/nodes/{name}/notices/{source}": ({"event": "maintenance", "starts_at": 1.9e9}, {"in_s": 60.0}),
    "POST /v1/session": ({"token": ADMINS_TOKEN},),
}
REASON = ({"reason": "why"},)
AFTERWARDS = (
    "/v1/jobs",
    "/v1/fleet",
    "/v1/fleet/checkpoints",
    "/v1/fleet/nodes",
    "/v1/nodes",
    "/v1/audit",
    "/v1/breaker",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `path` and `query` are encoded; headers are Latin-1."""

    route: str
    who: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@cache
def _schema() -> OpenApiSchema:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return schemathesis.openapi.from_dict(world().app.openapi())


@cache
def _routes() -> dict[str, Any]:
    operations = [cast(Any, found).ok() for found in _schema().get_all_operations()]
    return {f"{each.method.upper()} {each.path}": each for each in operations}


# ---------------------------------------------------------------- requests


def _asks(route: str) -> st.SearchStrategy[Ask]:
    operation = _routes()[route]
    method, _, template = route.partition(" ")
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    by_document = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]).map(_of_case)
    strange_name = st.one_of(st.sampled_from([text[:300] for text in TEXTS]), st.text(max_size=10))
    names = {**world().names, "name": world().names["node" if template.startswith("/v1/nodes") else "name"]}
    values = {name: st.one_of(*[st.sampled_from(known)] * 3, strange_name) for name, known in names.items()}
    filled = st.fixed_dictionaries({name: values[name] for name in values if "{" + name in template})
    paths = filled.map(lambda given: template.format(**{name: _quoted(text) for name, text in given.items()}))
    bodies: st.SearchStrategy[bytes] = st.just(b"")
    if method != "GET":
        valid = BODIES.get(route, REASON)
        whole = st.sampled_from(valid).map(lambda body: json.dumps(body).encode())
        bodies = st.one_of(
            documents(*valid).map(_json),
            documents(*valid).map(_json),
            json_texts(*valid),
            damaged(whole),
            whole,
            st.just(b""),
        )
    queries = st.one_of(
        st.just(""),
        st.lists(
            st.tuples(
                st.sampled_from(_parameters(operation)),
                st.one_of(st.sampled_from(["true", "1", "-1", "100"]), strange_name),
            ),
            max_size=3,
        ).map(lambda pairs: str(httpx.QueryParams(_encodable(pairs)))),
    )
    made = st.tuples(paths, queries, _headers(), bodies)
    who = st.sampled_from(ASKING)
    one = st.tuples(st.one_of(by_document, made, made), who, paths, st.integers(0, 2))
    return one.map(lambda it: Ask(route, it[1], it[2] if it[3] == 0 else it[0][0], it[0][1], it[0][2], it[0][3]))


def _of_case(case: Any) -> tuple[str, str, tuple[tuple[str, str], ...], bytes]:
    given = case.as_transport_kwargs(base_url="http://test")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            request = httpx.Request(
                given["method"],
                given["url"],
                params=given.get("params"),
                json=given.get("json"),
                content=given.get("data"),
            )
            url = request.url
            body = request.read()
        except (TypeError, ValueError, httpx.InvalidURL):  # what no client can send
            return "/v1/version", "", (), b""
    headers = tuple((str(name), str(value)) for name, value in (case.headers or {}).items())
    return url.raw_path.decode("ascii").partition("?")[0], url.query.decode("ascii"), headers, body


def _headers() -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    names = [
        "Idempotency-Key",
        "Last-Event-ID",
        "Holdfast-Launcher-Token",
        "Content-Type",
        "Cookie",
        "Origin",
        "Accept",
        "Host",
        "Holdfast-Forwarded-By",
        "X-Forwarded-For",
    ]
    usual = [
        "k",
        "0",
        "1-0",
        "99999999999999999999-1",
        "application/json",
        "text/plain",
        "application/json; charset=utf-16",
        "holdfast_session=1.2.3",
        "http://test",
        "https://elsewhere",
        "http://[",
        "\x7f",
        "ä",
        "x" * 300,
    ]
    values = st.one_of(st.sampled_from(usual), st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12))
    return st.lists(st.tuples(st.sampled_from(names), values), max_size=2).map(tuple)


def _parameters(operation: Any) -> list[str]:
    return [each["name"] for each in operation.definition.raw.get("parameters", ()) if each["in"] == "query"] or ["x"]


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text.encode(errors="replace").decode(), safe="") or "%20"


def _encodable(pairs: list[tuple[str, str]]) -> list[tuple[str, str | int | float | bool | None]]:
    return [(name, value.encode(errors="replace").decode()) for name, value in pairs]


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


# ---------------------------------------------------------------- what must hold


def _read(ask: Ask) -> None:
    here = world()
    here.reset()
    run(_asked(here, ask))


async def _asked(here: World, ask: Ask) -> None:
    answer = await _send(here, ask)
    where = f"{ask.who}: {ask.route} answered {answer.status_code} {answer.text[:300]}"
    _check_answer(ask.route, answer, where)
    requests = await here.requests()
    if requests:
        assert answer.status_code == 202, f"a request that was not accepted is in the inbox; {where}"
        assert _may(here, ask), f"{requests[0].event!r:.300} is in the inbox; {where}"
        here.fold(requests)
        for path in (*AFTERWARDS, *(f"/v1/jobs/{_quoted(name)}" for name in here.shown.jobs)):
            shown = await here.http.get(path, headers={"Authorization": f"Bearer {ADMINS_TOKEN}"})
            assert shown.status_code == 200, f"{path} answers {shown.status_code} {shown.text[:300]} after {where}"
    elif answer.status_code == 200 and ask.path.startswith("/v1/") and not ask.path.startswith("/v1/session"):
        assert _role(ask.who) is not None, f"answered without a token; {where}"


async def _send(here: World, ask: Ask) -> httpx.Response:
    headers = [(name, value) for name, value in ask.headers if _is_header(value) and name.lower() != "content-length"]
    if token := here.tokens.get(ask.who, "wrong" if ask.who == "stranger" else ""):
        headers = [each for each in headers if each[0].lower() != "authorization"] + [
            ("Authorization", f"Bearer {token}")
        ]
    if ask.body and not any(name.lower() == "content-type" for name, _ in headers):
        headers.append(("Content-Type", "application/json"))
    url = httpx.URL("http://test").copy_with(raw_path=(ask.path + ("?" + ask.query if ask.query else "")).encode())
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    here.http.cookies.clear()
    request = here.http.build_request(ask.route.partition(" ")[0], url, headers=raw, content=ask.body)
    answer = await here.http.send(request)
    here.http.cookies.clear()
    return answer


def _is_header(value: str) -> bool:
    """What a server lets pass: h11 refuses control characters before the application sees them."""
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return all(character == "\t" or character >= " " for character in value) and value == value.strip()


@cache
def _validator(route: str, status: int, media_type: str) -> Draft202012Validator | None:
    """Of the body that the document states for this answer; None for one that is not JSON. Raises KeyError for an answer that
    it does not state."""
    document = world().app.openapi()
    method, _, path = route.partition(" ")
    responses = document["paths"][path][method.lower()]["responses"]
    content = responses.get(str(status), responses["default"])["content"]
    if media_type == "text/event-stream":
        assert media_type in content
        return None
    return Draft202012Validator({**content[media_type]["schema"], "components": document["components"]})


def _check_answer(route: str, answer: httpx.Response, where: str) -> None:
    assert answer.status_code < 500, where
    assert len(answer.content) <= ANSWER_BYTES_MAX, f"{len(answer.content)} bytes; {where[:200]}"
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == MEDIA_TYPE, where
        problem = answer.json()
        assert problem["status"] == answer.status_code, where
        assert problem["title"], where
        assert problem["detail"], where
    if answer.status_code == 405:
        return  # a strange name has made it another path, which has no such method
    validator = _validator(route, answer.status_code, answer.headers.get("content-type", "").partition(";")[0])
    if validator is not None:
        validator.validate(answer.json())


def _role(who: str) -> ApiRole | None:
    if who in ("nobody", "stranger"):
        return None
    return ApiRole.SUBMITTER if who == "other" else ApiRole(who)


def _may(here: World, ask: Ask) -> bool:
    """Decided here from what docs/security.md promises, not by the code that is tested."""
    role = _role(ask.who)
    if role in (ApiRole.OPERATOR, ApiRole.ADMIN):
        return True
    if role is not ApiRole.SUBMITTER or not ask.path.startswith("/v1/jobs"):
        return False
    if ask.route == "POST /v1/jobs":
        return here.owner(json.loads(ask.body).get("name")) in (None, ask.who)
    from urllib.parse import unquote

    name = unquote(ask.path.split("/")[3])
    return not ask.path.endswith("/faults") and here.owner(name) in (None, ask.who)


PUBLIC = ("GET /v1/session", "POST /v1/session", "DELETE /v1/session", "GET /healthz")
SLOW = {"POST /v1/jobs/{name}/policy": 0.1, "POST /v1/jobs": 1.0}  # a policy is tried in a process of its own


def _target(route: str) -> Target:
    return Target(f"REST {route}", lambda: _asks(route), _read, share=SLOW.get(route, 0.25), cpu_s_max=5.0)


TARGETS = tuple(_target(route) for route in (*ROUTES, *PUBLIC))
