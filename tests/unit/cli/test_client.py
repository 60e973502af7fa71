"""The REST client against an API that is played: pages, operations, and what each kind of bad answer becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from holdfast.cli import connection
from holdfast.cli.client import Client
from holdfast.cli.connection import LEADER_TIMEOUT_S, OPERATION_TIMEOUT_S, NoApi, default_url
from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IncompatibleVersion,
    InvalidSpec,
    InvalidSpecs,
    NotFound,
    RedisAway,
    Unavailable,
)

URL = "http://127.0.0.1:8470"
Handler = Callable[[httpx.Request], httpx.Response]


class Clock:
    """Time passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def played(handler: Handler, clock: Clock | None = None, **options: Any) -> Client:
    clock = clock or Clock()
    return Client(URL, transport=httpx.MockTransport(handler), clock=clock, sleep=clock.sleep, **options)


def test_a_field_that_another_version_does_not_have_is_named() -> None:
    row = {"name": "gpt", "mesh": {"dp": 2}}
    client = played(lambda _: httpx.Response(200, json={"items": [row], "next_cursor": None}))
    [job] = client.jobs()
    assert job == row
    assert job.get("step") is None
    with pytest.raises(IncompatibleVersion, match="without 'phase'"):
        job["phase"]
    with pytest.raises(IncompatibleVersion, match="without 'pp'"):
        job["mesh"]["pp"]


def problem(
    status: int, detail: str, errors: list[dict[str, Any]] | None = None, *, kind: str = "urn:x"
) -> httpx.Response:
    body = {
        "type": kind,
        "title": "No",
        "status": status,
        "detail": detail,
        **({"errors": errors} if errors else {}),
    }
    return httpx.Response(status, json=body, headers={"content-type": "application/problem+json"})


def answers(*responses: httpx.Response) -> tuple[Handler, list[httpx.Request]]:
    """A handler that gives `responses` in turn, and the requests that it got."""
    requests: list[httpx.Request] = []
    turn: Iterator[httpx.Response] = iter(responses)

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return next(turn)

    return handler, requests


def test_pages_are_read_to_the_end() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        page = int(request.url.params.get("cursor", "0"))
        return httpx.Response(
            200, json={"items": [{"node": f"n{page}"}], "next_cursor": str(page + 1) if page < 2 else None}
        )

    with played(handler) as client:
        assert [node["node"] for node in client.nodes()] == ["n0", "n1", "n2"]


def test_incidents_of_one_job_are_asked_for_by_name() -> None:
    handler, requests = answers(httpx.Response(200, json={"items": [], "next_cursor": None}))
    with played(handler) as client:
        assert list(client.incidents("llm")) == []
    assert requests[0].url.params["job"] == "llm"


def test_a_command_waits_for_its_operation() -> None:
    handler, requests = answers(
        httpx.Response(202, json={"id": "op-1", "state": "pending"}),
        httpx.Response(200, json={"id": "op-1", "state": "pending"}),
        httpx.Response(200, json={"id": "op-1", "state": "succeeded"}),
    )
    with played(handler) as client:
        assert client.submit({"name": "llm"})["state"] == "succeeded"
    assert [request.url.path for request in requests] == ["/v1/jobs", "/v1/operations/op-1", "/v1/operations/op-1"]
    assert json.loads(requests[0].content) == {"name": "llm"}


def test_a_failed_operation_says_why() -> None:
    handler, _ = answers(httpx.Response(202, json={"id": "op-1", "state": "failed", "reason": "llm is stopping"}))
    with played(handler) as client, pytest.raises(HoldfastError, match="llm is stopping"):
        client.checkpoint("llm")


def test_an_operation_that_nobody_carries_out_is_not_waited_for_for_ever() -> None:
    clock = Clock()
    with (
        played(lambda _: httpx.Response(202, json={"id": "op-1", "state": "pending"}), clock) as client,
        pytest.raises(Unavailable, match="operation op-1"),
    ):
        client.checkpoint("llm", grace_s=30.0)
    assert OPERATION_TIMEOUT_S + 30.0 < clock.now < OPERATION_TIMEOUT_S + 31.0


def test_a_command_is_sent_again_with_the_same_key_while_nobody_leads() -> None:
    handler, requests = answers(
        problem(503, "no leader yet"), httpx.Response(202, json={"id": "op-1", "state": "succeeded"})
    )
    with played(handler) as client:
        client.stop("llm", "enough")
    first, second = (request.headers["Idempotency-Key"] for request in requests)
    assert first == second


def test_two_commands_have_different_keys() -> None:
    done = httpx.Response(202, json={"id": "op-1", "state": "succeeded"})
    handler, requests = answers(done, done)
    with played(handler) as client:
        client.checkpoint("llm")
        client.checkpoint("llm")
    assert len({request.headers["Idempotency-Key"] for request in requests}) == 2


def test_a_lost_answer_is_asked_for_again() -> None:
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.headers["Idempotency-Key"])
        if len(calls) == 1:
            raise httpx.ReadTimeout("", request=request)
        return httpx.Response(202, json={"id": "op-1", "state": "succeeded"})

    with played(handler) as client:
        client.cordon("n1", "noisy")
    assert len(set(calls)) == 1


def test_a_leader_that_never_comes_is_an_error_with_its_reason() -> None:
    clock = Clock()
    with (
        played(lambda _: problem(503, "no leader yet"), clock) as client,
        pytest.raises(Unavailable, match="no leader yet"),
    ):
        client.job("llm")
    assert LEADER_TIMEOUT_S < clock.now < LEADER_TIMEOUT_S + 1


@pytest.mark.parametrize("request_s", [0.0, 0.3, 1.2, 1.4, 1.9, 4.0])
def test_a_redis_that_is_away_is_reported_within_three_seconds_of_a_supervisor_that_answers(request_s: float) -> None:
    """A request takes as long as the supervisor tries to reach Redis."""
    clock = Clock()

    def handler(_: httpx.Request) -> httpx.Response:
        clock.sleep(request_s)
        return problem(503, "Redis at r:6379 does not answer", kind="urn:holdfast:problem:redis-away")

    with played(handler, clock) as client, pytest.raises(RedisAway, match="Redis at r:6379"):
        client.job("llm")
    assert 1.5 < clock.now <= max(3.0, request_s)


def test_a_redis_that_comes_back_at_once_is_waited_for() -> None:
    away = [problem(503, "Redis does not answer", kind="urn:holdfast:problem:redis-away") for _ in range(12)]
    handler, _ = answers(*away, httpx.Response(200, json={"name": "llm"}))
    with played(handler) as client:
        assert client.job("llm")["name"] == "llm"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, NotFound),
        (409, Conflict),
        (401, HoldfastError),
        (400, HoldfastError),
        (405, HoldfastError),
        (500, HoldfastError),
    ],
)
def test_every_problem_becomes_the_error_that_it_is(status: int, kind: type[HoldfastError]) -> None:
    with played(lambda _: problem(status, "what is wrong [here]")) as client, pytest.raises(HoldfastError) as caught:
        client.job("llm")
    assert type(caught.value) is kind
    assert str(caught.value) == "what is wrong [here]"


def test_one_wrong_field_becomes_one_error_that_names_it() -> None:
    handler, _ = answers(problem(422, "…", [{"field": "dp", "value": 9, "expected": "2 to 3", "detail": "…"}]))
    with played(handler) as client, pytest.raises(InvalidSpec) as caught:
        client.resize("llm", 9, "more")
    assert str(caught.value) == "dp: 9 is not valid; expected 2 to 3"


def test_several_wrong_fields_are_all_named_once() -> None:
    errors = [
        {"field": "name", "value": "X", "expected": "lower case", "detail": "…"},
        {"field": "mesh", "expected": "a value: it is required", "detail": "missing"},
    ]
    handler, _ = answers(problem(422, "name: …\nmesh: …", errors))
    with played(handler) as client, pytest.raises(InvalidSpecs) as caught:
        client.submit({})
    assert str(caught.value).splitlines() == [
        "name: 'X' is not valid; expected lower case",
        "mesh: None is not valid; expected a value: it is required",
    ]


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(404, text="<html>nginx</html>"),
        httpx.Response(200, text="hello"),
        httpx.Response(200, json=["a", "list"]),
        httpx.Response(200, json={"jupyter": 7}),
        httpx.Response(307, headers={"location": "/login"}),
        httpx.Response(500, content=b"\xff{", headers={"content-type": "application/problem+json"}),
        httpx.Response(500, json=["?"], headers={"content-type": "application/problem+json"}),
    ],
    ids=["html", "text", "list", "object", "redirect", "torn problem", "odd problem"],
)
def test_another_program_at_the_url_is_not_taken_for_holdfast(response: httpx.Response) -> None:
    with played(lambda _: response) as client, pytest.raises(NoApi, match=r"not a Holdfast API.*--api"):
        client.version()


def test_nothing_at_the_url_says_what_to_do_at_once() -> None:
    clock = Clock()

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[Errno 111] Connection refused", request=request)

    with played(refuse, clock) as client, pytest.raises(NoApi, match=r"8470.*refused.*holdfast up.*--api"):
        client.version()
    assert clock.now == 0


@pytest.mark.parametrize("url", ["", "localhost:8470", "ftp://x", "http://", "http://[::1", "8470"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(InvalidSpec, match=r"--api: .*http://127\.0\.0\.1:8470"):
        Client(url)


@pytest.mark.parametrize(
    ("name", "path"),
    [("a?b#c", "/v1/jobs/a%3Fb%23c"), ("ä b", "/v1/jobs/%C3%A4%20b")],
)
def test_a_name_stays_one_part_of_the_path(name: str, path: str) -> None:
    handler, requests = answers(problem(404, "no such job"))
    with played(handler) as client, pytest.raises(NotFound):
        client.job(name)
    assert requests[0].url.raw_path == path.encode()


@pytest.mark.parametrize("name", ["", ".", "..", "../nodes", "a/b"])
def test_a_name_that_is_none_is_refused_before_it_is_sent(name: str) -> None:
    handler, requests = answers()
    with played(handler) as client, pytest.raises(InvalidSpec, match="holdfast nodes list"):
        client.repaired(name)
    assert not requests


def test_the_token_travels() -> None:
    handler, requests = answers(problem(401, "this API wants a token"))
    with played(handler, token="s3cret") as client, pytest.raises(HoldfastError, match="wants a token"):
        client.job("llm")
    assert requests[0].headers["Authorization"] == "Bearer s3cret"


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy would say that it cannot reach 127.0.0.1, or reach its own."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    for url in ("http://127.0.0.1:2", "http://localhost:2", "http://[::1]:2"):
        with Client(url) as client, pytest.raises(NoApi, match=r"no Holdfast API answers at .*:2 "):
            client.version()


def test_events_are_read_as_they_come() -> None:
    body = b': hello\n\nevent: job\ndata: {"n": 1}\n\nevent: node\ndata: {"n": 2}\n\n'
    with played(lambda _: httpx.Response(200, content=body)) as client:
        assert list(client.events()) == [("job", {"n": 1}), ("node", {"n": 2})]


def test_events_that_are_refused_are_an_error() -> None:
    with played(lambda _: problem(422, "…")) as client, pytest.raises(HoldfastError):
        list(client.events())


def test_a_notice_is_put_with_the_time_that_is_left_and_deleted_without_a_body() -> None:
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(202, json={"id": "op-1", "state": "succeeded"})

    with played(handler) as client:
        client.announce("n1", "rack 7/8", "new switch", 1800.0)
        client.announce("n1", "operator", "now", None)
        client.withdraw("n1", "operator")
    assert [(each.method, each.url.raw_path) for each in requests] == [
        ("PUT", b"/v1/nodes/n1/notices/rack%207%2F8"),
        ("PUT", b"/v1/nodes/n1/notices/operator"),
        ("DELETE", b"/v1/nodes/n1/notices/operator"),
    ]
    assert [each.content for each in requests] == [b'{"event":"new switch","in_s":1800.0}', b'{"event":"now"}', b""]


def test_the_api_of_this_machine_is_asked_with_tls_if_it_speaks_tls_and_a_ca_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speaks = True
    monkeypatch.setattr(connection, "answers_with_tls", lambda _: speaks)
    for name in ("HOLDFAST_API", "HOLDFAST_API_CA", "HOLDFAST_TLS_CA", "HOLDFAST_LOCAL_API_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert default_url() == "http://127.0.0.1:8470"
    monkeypatch.setenv("HOLDFAST_TLS_CA", "ca.crt")
    assert default_url() == "https://127.0.0.1:8470"
    speaks = False
    assert default_url() == "http://127.0.0.1:8470"
    monkeypatch.setenv("HOLDFAST_API", "http://elsewhere")
    speaks = True
    assert default_url() == "http://elsewhere", "what was said is not changed"


def test_the_port_of_this_machines_api_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_API", "HOLDFAST_API_CA", "HOLDFAST_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_LOCAL_API_PORT", "9470")
    assert default_url() == "http://127.0.0.1:9470"
    for wrong in ("0", "65536", "-1", "tcp://10.0.0.7:8470", "٣", "9" * 5000):
        monkeypatch.setenv("HOLDFAST_LOCAL_API_PORT", wrong)
        with pytest.raises(InvalidSpec, match=r"HOLDFAST_LOCAL_API_PORT: .*a port, 1 to 65535"):
            default_url()
    monkeypatch.setenv("HOLDFAST_LOCAL_API_PORT", "")
    assert default_url() == "http://127.0.0.1:8470"
