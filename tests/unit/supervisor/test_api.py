"""The REST API: what it answers, and the problem+json for everything that can be wrong with a request."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from supervising import job_body

from holdfast.domain.errors import RedisAway
from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.domain.job import PolicySpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inventory
from holdfast.kubernetes.bridge import Sight
from holdfast.log.names import INBOX
from holdfast.policy import restart
from holdfast.supervisor.api.incidents import BEHIND
from holdfast.supervisor.core.model.state import Breaker, Config, State
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.inbox import InboxEvent
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.policies.script import sample_incidents, sample_job
from holdfast.supervisor.protocol import (
    JobStopRequested,
    JobSubmitted,
    NodeCordonRequested,
    NoticeRequested,
    PolicyChangeRequested,
    ResizeRequested,
    TimerFired,
)
from holdfast.supervisor.published import PolicyAsked
from holdfast.supervisor.requests import OperatorRequest
from holdfast.supervisor.timers import StopTimeout
from holdfast.wire import records

pytestmark = pytest.mark.anyio


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert {"type", "title", "detail"} <= set(body)
    return body


async def requests(api: Any) -> list[OperatorRequest]:
    return [records.loads(delivery.entry.data, InboxEvent) for delivery in await api.log.read(INBOX)]


# ---------------------------------------------------------------- commands


async def test_a_submission_goes_into_the_inbox(api: Any) -> None:
    answer = await api.http.post("/v1/jobs", json=job_body())
    assert answer.status_code == 202
    operation = answer.json()
    assert answer.headers["location"] == operation["url"] == f"/v1/operations/{operation['id']}"
    assert operation["state"] == "pending"
    [request] = await requests(api)
    assert request.operation == operation["id"]
    assert isinstance(request.event, JobSubmitted)
    assert request.event.spec.name == "gpt"
    assert len(request.event.token) == 64
    assert (await api.http.get(operation["url"])).json() == operation


async def test_the_other_commands(api: Any) -> None:
    api.node("n1")
    api.job(nodes=2, elastic={"min_dp": 1, "max_dp": 3})
    for path, body in [
        ("/v1/jobs/gpt/resize", {"dp": 3, "reason": "more"}),
        ("/v1/jobs/gpt/stop", None),
        ("/v1/nodes/n1/cordon", {"reason": "fan"}),
        ("/v1/nodes/n1/uncordon", {}),
        ("/v1/nodes/n1/repair", None),
        ("/v1/breaker/reset", {"reason": "looked"}),
    ]:
        assert (await api.http.post(path, json=body)).status_code == 202, path
    assert (await api.http.delete("/v1/jobs/gpt")).status_code == 202
    events = [request.event for request in await requests(api)]
    assert isinstance(events[0], ResizeRequested)
    assert (events[0].dp, events[0].reason) == (3, "more")
    assert isinstance(events[1], JobStopRequested)
    assert events[1].save
    assert isinstance(events[2], NodeCordonRequested)
    assert events[2].cordoned
    assert isinstance(events[-1], JobStopRequested)
    assert not events[-1].save


async def test_a_maintenance_notice_is_put_shown_and_deleted(api: Any) -> None:
    api.node("n1")
    path = "/v1/nodes/n1/notices/slurm"
    before = time.time()
    headers = {"Idempotency-Key": "k1"}
    for _ in range(2):
        answer = await api.http.put(path, json={"event": "drain", "in_s": 600}, headers=headers)
        assert answer.status_code == 202
    [request] = await requests(api)
    asked = request.event
    assert isinstance(asked, NoticeRequested)
    assert (asked.node, asked.source, asked.event) == ("n1", "slurm", "drain")
    assert before + 600 <= asked.starts_at <= time.time() + 600  # type: ignore[operator]

    problem(await api.http.delete(path), 404)  # not folded yet
    api.fold(asked)
    [shown] = (await api.http.get("/v1/nodes/n1")).json()["notices"]
    assert shown == {"source": "slurm", "event": "drain", "starts_at": asked.starts_at}
    assert (await api.http.delete(path)).status_code == 202
    withdrawn = (await requests(api))[-1].event
    assert isinstance(withdrawn, NoticeRequested)
    assert withdrawn.event == ""


@pytest.mark.parametrize(
    ("source", "body", "field"),
    [
        ("slurm", {"starts_at": 2e9, "in_s": 1}, "body"),
        ("slurm", {"in_s": -1}, "in_s"),
        ("slurm", {"event": ""}, "event"),
        ("slurm", {"when": "soon"}, "when"),
        ("file", {}, "source"),
        ("Who?", {}, "source"),
    ],
)
async def test_a_notice_of_the_wrong_shape(api: Any, source: str, body: dict[str, Any], field: str) -> None:
    api.node("n1")
    answer = await api.http.put(f"/v1/nodes/n1/notices/{source}", json=body)
    assert problem(answer, 422)["errors"][0]["field"] == field
    assert await requests(api) == []


async def test_an_idempotency_key_is_one_operation(api: Any) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = await api.http.post("/v1/jobs", json=job_body(), headers=headers)
    again = await api.http.post("/v1/jobs", json=job_body(), headers=headers)
    assert again.json() == first.json()
    assert len(await requests(api)) == 1
    other = await api.http.post("/v1/jobs", json=job_body(name="another"), headers=headers)
    assert problem(other, 422)["errors"][0]["field"] == "Idempotency-Key"


# ---------------------------------------------------------------- what is wrong with a request


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"nodes": "2"}, "nodes", "2"),
        ({"nodes": 0}, "nodes", 0),
        ({"script": "train.py"}, "script", "train.py"),
        ({"mesh": {"dp": 3}}, "mesh", "dp 3"),
        ({"elastic": {"min_dp": 3, "max_dp": 2}}, "elastic.min_dp", 3),
        ({"name": "No Such Name"}, "name", "No Such Name"),
        ({"nodez": 2}, "nodez", 2),
        ({"policy": "/nowhere/policy.py"}, "policy", "/nowhere/policy.py"),
    ],
)
async def test_a_wrong_job_is_named_field_by_field(api: Any, changes: dict[str, Any], field: str, value: Any) -> None:
    body = problem(await api.http.post("/v1/jobs", json=job_body(**changes)), 422)
    [error] = body["errors"]
    assert (error["field"], error["value"]) == (field, value)
    assert error["expected"]
    assert await requests(api) == []


async def test_every_mistake_at_once(api: Any) -> None:
    body = problem(await api.http.post("/v1/jobs", json={"name": "gpt", "nodes": -1, "extra": 1}), 422)
    assert {error["field"] for error in body["errors"]} == {"script", "nodes", "extra"}


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        ("/v1/jobs", b"{", "body"),
        ("/v1/jobs", b"[]", "body"),
        ("/v1/jobs", b"", "body"),
        ("/v1/jobs/gpt/resize", b"{}", "dp"),
        ("/v1/jobs/gpt/resize", b'{"dp": "2"}', "dp"),
        ("/v1/jobs/gpt/resize", b'{"dp": 2, "because": 1}', "because"),
        ("/v1/jobs/gpt/resize", b'{"dp": 9}', "dp"),
        ("/v1/jobs/gpt/stop", b'{"reason": ""}', "reason"),
        ("/v1/nodes/n1/cordon", b'{"reason": 7}', "reason"),
    ],
)
async def test_a_body_of_the_wrong_shape(api: Any, path: str, content: bytes, field: str) -> None:
    api.node("n1")
    api.job()
    answer = await api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert problem(answer, 422)["errors"][0]["field"] == field


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x"])
async def test_a_wrong_query_parameter(api: Any, query: str) -> None:
    assert problem(await api.http.get(f"/v1/jobs?{query}"), 422)["errors"][0]["field"] == "limit"


@pytest.mark.parametrize("cursor", ["x", "-1", "9" * 30])
async def test_a_cursor_that_was_never_given_out(api: Any, cursor: str) -> None:
    assert (
        problem(await api.http.get("/v1/incidents", params={"cursor": cursor}), 422)["errors"][0]["field"] == "cursor"
    )


async def test_a_policy_that_does_not_work_is_refused_with_its_line(api: Any, tmp_path: Path) -> None:
    script = tmp_path / "policy.py"
    script.write_text("from holdfast.policy import restart\n\ndef decide(incident, job):\n    return no_such_thing\n")
    body = problem(await api.http.post("/v1/jobs", json=job_body(policy=str(script))), 422)
    assert f"{script}:4" in body["errors"][0]["expected"]
    assert "no_such_thing" in body["detail"]


async def test_a_policy_that_came_as_a_path_is_read_once(api: Any, tmp_path: Path) -> None:
    script = tmp_path / "policy.py"
    script.write_text("from holdfast.policy import restart\ndef decide(i, j):\n    return restart('x')\n")
    assert (await api.http.post("/v1/jobs", json=job_body(policy=str(script)))).status_code == 202
    [request] = await requests(api)
    assert isinstance(request.event, JobSubmitted)
    assert request.event.spec.policy_spec == PolicySpec(str(script), script.read_text())


async def test_the_policy_of_a_job_is_shown_and_changed(api: Any) -> None:
    text = "from holdfast.policy import restart\ndef decide(i, j):\n    return restart(str(j.params['why']))\n"
    given = {"file": "mine.py", "source": text, "params": {"why": "for a test"}}
    api.job(policy=given)
    shown = (await api.http.get("/v1/jobs/gpt/policy")).json()
    assert (shown["name"], shown["source"], shown["params"]) == ("mine.py", text, {"why": "for a test"})
    assert shown["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert "source" not in (await api.http.get("/v1/jobs/gpt")).json()["spec"]["policy"]
    body = problem(await api.http.post("/v1/jobs/gpt/policy", json={"policy": {**given, "params": {}}}), 422)
    assert "KeyError" in body["detail"]
    for change in ({"policy": given}, {"policy": ""}, {}):
        assert (await api.http.post("/v1/jobs/gpt/policy", json=change)).status_code == 202
    assert [
        request.event.policy for request in await requests(api) if isinstance(request.event, PolicyChangeRequested)
    ] == [
        PolicySpec("mine.py", text, {"why": "for a test"}),
        PolicySpec(),
        PolicySpec(),
    ]


async def test_questions_to_a_policy_are_paged(api: Any) -> None:
    incident = replace(sample_incidents()[0], job="gpt")
    asked = [PolicyAsked(100.0 + n, incident, sample_job(incident), restart("x"), "mine.py") for n in range(5)]
    await api.history.add_events([EventEntry(f"{n}-0", each) for n, each in enumerate(asked, 1)], "5-0")
    path, found = "/v1/jobs/gpt/policy/questions", list[PolicyAsked]()
    cursor: str | None = None
    while True:
        page = (
            await api.http.get(path, params={"limit": 2, "since": 101.0} | ({"cursor": cursor} if cursor else {}))
        ).json()
        found += [records.loads(json.dumps(item).encode(), PolicyAsked) for item in page["items"]]
        if not (cursor := page["next_cursor"]):
            break
    assert found == asked[:0:-1]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/nope"),
        ("GET", "/v1/jobs/nope/policy"),
        ("GET", "/v1/jobs/nope/goodput"),
        ("POST", "/v1/jobs/nope/stop"),
        ("POST", "/v1/jobs/nope/checkpoint"),
        ("GET", "/v1/nodes/nope"),
        ("POST", "/v1/nodes/nope/repair"),
        ("GET", "/v1/incidents/nope"),
        ("GET", "/v1/operations/nope"),
        ("GET", "/v2/jobs"),
    ],
)
async def test_what_is_not_there(api: Any, method: str, path: str) -> None:
    problem(await api.http.request(method, path), 404)


async def test_a_method_that_is_not_possible(api: Any) -> None:
    problem(await api.http.put("/v1/jobs"), 405)
    for method in ("PATCH", "HEAD", "OPTIONS"):  # the dashboard's files answer GET and HEAD on any path
        answer = await api.http.request(method, "/v1/jobs")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST"), method
    assert (await api.http.head("/v1/nowhere")).status_code == 404


async def test_a_body_beyond_all_bounds(api: Any) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65_536

    answer = await api.http.post("/v1/jobs", content=chunks(), headers={"content-type": "application/json"})
    assert "larger than" in problem(answer, 413)["detail"]


async def test_conflicts(api: Any) -> None:
    api.job()
    assert "already" not in problem(await api.http.post("/v1/jobs", json=job_body()), 409)["detail"]
    assert "pending" in problem(await api.http.post("/v1/jobs/gpt/checkpoint"), 409)["detail"]


# ---------------------------------------------------------------- when it cannot answer


async def test_no_leader_yet(api: Any) -> None:
    api.picture = None
    answer = await api.http.get("/v1/jobs")
    assert "no supervisor" in problem(answer, 503)["detail"]
    api.backend.trouble = lambda: "Redis does not serve now: READONLY"  # says more than that there is no state
    assert problem(await api.http.get(answer.request.url), 503)["detail"] == api.backend.trouble()
    assert answer.headers["retry-after"] == "1"


async def test_a_log_that_is_away(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> None:
        raise RedisAway("Redis at 127.0.0.1:1 does not answer")

    for name in ("append", "ping", "last_position"):
        monkeypatch.setattr(api.log, name, away)
    assert "127.0.0.1:1" in problem(await api.http.post("/v1/jobs", json=job_body()), 503)["detail"]
    for path in ("/healthz", "/readyz", "/v1/events"):
        problem(await api.http.get(path), 503)
    assert (await api.http.get("/livez")).status_code == 200
    assert (await api.http.get("/healthz")).json()["type"] == "urn:holdfast:problem:redis-away"


async def test_a_history_that_is_behind_says_so_with_what_it_has(api: Any) -> None:
    """An empty list would say that nothing has happened."""
    assert BEHIND not in (await api.http.get("/v1/incidents")).headers
    api.backend.behind = lambda: (
        "the history /data/h.sqlite3 cannot be written:\ndatabase or disk is full; free space in /dätä"
    )
    for path in ("/v1/incidents", "/v1/findings", "/v1/actions"):
        answer = await api.http.get(path)
        assert answer.json()["items"] == []
        assert answer.headers[BEHIND].endswith("cannot be written: database or disk is full; free space in /d?t?")
    assert BEHIND not in (await api.http.get("/v1/jobs")).headers


async def test_three_probes_answer_three_questions(api: Any) -> None:
    """Redis answers and refuses writes, so nobody leads: a start would not mend it, and requests get the reason here."""
    api.picture = Picture(State())
    assert (await api.http.get("/healthz")).json() == {"status": "ok", "leader": False}, "another one leads"
    api.backend.trouble = lambda: "Redis at 127.0.0.1:1 is full; make room"
    assert problem(await api.http.get("/healthz"), 503)["detail"] == "Redis at 127.0.0.1:1 is full; make room"
    assert (await api.http.get("/readyz")).status_code == 200
    assert (await api.http.get("/livez")).json() == "ok"
    for path, status in (("/livez", 200), ("/readyz", 200), ("/healthz", 503)):
        assert (await api.http.head(path)).status_code == status, "load balancers ask by HEAD"
    api.picture = None
    problem(await api.http.get("/readyz"), 503)
    assert (await api.http.get("/livez")).status_code == 200


async def test_a_bug_is_a_problem_too(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(api.history, "incident", broken)
    assert "oops" in problem(await api.http.get("/v1/incidents/x"), 500)["detail"]


async def test_the_token(make_api: Any) -> None:
    api = await make_api(token="s3cret")
    answer = await api.http.get("/v1/jobs")
    problem(answer, 401)
    assert answer.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer nope", "Bearer ñ", "Basic czNjcmV0"):
        problem(await api.http.get("/v1/jobs", headers={"Authorization": wrong.encode()}), 401)
    assert (await api.http.get("/v1/jobs", headers={"Authorization": "Bearer s3cret"})).status_code == 200
    assert (await api.http.get("/healthz")).status_code == 200


# ---------------------------------------------------------------- reads


async def test_jobs_and_nodes_in_pages(api: Any) -> None:
    for name in ("a", "b", "c"):
        api.job(name=name)
        api.node(f"node-{name}")
    for path, key in (("/v1/jobs", "name"), ("/v1/nodes", "node")):
        first = (await api.http.get(path, params={"limit": 2})).json()
        second = (await api.http.get(path, params={"limit": 2, "cursor": first["next_cursor"]})).json()
        assert len(first["items"]) == 2
        assert [item[key][-1] for item in first["items"] + second["items"]] == ["a", "b", "c"]
        assert second["next_cursor"] is None


async def test_a_job_shows_its_mesh_rank_by_rank_and_never_its_token(api: Any) -> None:
    api.node("n1")
    api.node("n2")
    api.job(mesh={"dp": 1, "pp": 2})
    answer = await api.http.get("/v1/jobs/gpt")
    job = answer.json()
    assert list(job["mesh"].items()) == [("dp", 1), ("pp", 2)]
    assert [(rank["rank"], rank["state"]) for rank in job["ranks"]] == [(0, "active"), (1, "active")]
    assert job["phase"] == "preparing"
    assert job["spec"]["script"] == "/work/train.py"
    assert "secret-token" not in answer.text


async def test_what_is_saved_of_a_job(api: Any) -> None:
    for node in ("n1", "n2"):
        api.node(node)
    api.job(nodes=2, checkpoint={"store": "file:///s"})
    body = (await api.http.get("/v1/jobs/gpt")).json()
    assert body["interval"]["auto"]
    assert "nothing is measured yet" in body["interval"]["reason"]
    assert (await api.http.get("/v1/jobs/gpt/checkpoints")).json()["items"] == []
    mesh = Mesh.of({"dp": 2})
    attempt = 1001
    api.report("n1", Inventory("gpt", tuple(record(attempt, 20, rank, mesh, "memory") for rank in (0, 1))))
    api.report("n2", Inventory("gpt", (record(attempt, 30, 1, mesh, "disk"),), (StoredStep(attempt, 10, mesh, False),)))
    items = (await api.http.get("/v1/jobs/gpt/checkpoints")).json()["items"]
    assert [(each["step"], each["tiers"], each["complete"]) for each in items] == [
        (30, {"memory": 0, "disk": 1, "store": False}, False),
        (20, {"memory": 2, "disk": 0, "store": False}, True),
    ], "the stored step belongs to no attempt of this run"
    holders = (await api.http.get(f"/v1/jobs/gpt/checkpoints/{attempt}/20")).json()
    assert holders == {"attempt": attempt, "step": 20, "ranks": {"0": ["n1"], "1": ["n1"]}}
    problem(await api.http.get("/v1/jobs/none/checkpoints"), 404)
    problem(await api.http.get("/v1/jobs/none/checkpoints/1/1"), 404)


async def test_what_the_disks_must_still_take_of_a_job_that_is_over(api: Any) -> None:
    for node in ("n1", "n2"):
        api.node(node)
    api.job(nodes=2)
    mesh = Mesh.of({"dp": 2})
    written = [record(900, 20, 0, mesh, tier) for tier in ("memory", "disk")]
    in_memory = record(900, 20, 1, mesh, "memory")
    api.report("n1", Inventory("gpt", (*written, record(900, 10, 0, mesh, "memory"))))
    api.report("n2", Inventory("gpt", (in_memory,)))
    api.fold(JobStopRequested(1001.0, "gpt", "enough", save=False), TimerFired(2000.0, StopTimeout("gpt")))
    kept = (await api.http.get("/v1/jobs/gpt")).json()["kept"]
    assert (kept["step"], kept["on_disk"]) == (20, False)
    assert kept["unwritten"] == {"n2": in_memory.size}


async def test_a_name_that_has_checkpoints_wants_to_hear_what_becomes_of_them(api: Any) -> None:
    for node in ("n1", "n2"):
        api.node(node)
    api.job(nodes=2)
    api.report("n1", Inventory("gpt", tuple(record(900, 20, rank, Mesh.of({"dp": 2}), "disk") for rank in (0, 1))))
    body = job_body(nodes=2)
    problem(await api.http.post("/v1/jobs/gpt/resume"), 409)  # it is not over
    api.fold(JobStopRequested(1001.0, "gpt", "enough", save=False), TimerFired(2000.0, StopTimeout("gpt")))
    job = (await api.http.get("/v1/jobs/gpt")).json()
    assert job["phase"] == "stopped"
    on_n1 = {"directories": {"n1": "/disk/n1/gpt"}, "unwritten": {}}
    assert job["kept"] == {"attempt": 900, "step": 20, "on_disk": True, **on_n1}

    refused = problem(await api.http.post("/v1/jobs", json=body), 409)["detail"]
    assert "step 20" in refused
    assert "--resume" in refused
    assert "--fresh" in refused
    for query in ("resume=true&fresh=true", "step=20", "resume=true&step=0"):
        problem(await api.http.post(f"/v1/jobs?{query}", json=body), 422)
    assert (
        "complete steps: 20" in problem(await api.http.post("/v1/jobs?resume=true&step=30", json=body), 404)["detail"]
    )
    for path, given in (
        ("/v1/jobs?resume=true", body),
        ("/v1/jobs?fresh=true", body),
        ("/v1/jobs?resume=true&step=20", body),
        ("/v1/jobs/gpt/resume", None),
        ("/v1/jobs/gpt/resume", {"step": 20}),
    ):
        assert (await api.http.post(path, json=given)).status_code == 202, path
    events = [request.event for request in await requests(api)]
    assert [(event.start.value, event.step) for event in events if isinstance(event, JobSubmitted)] == [
        ("checkpoint", None),
        ("scratch", None),
        ("checkpoint", 20),
        ("checkpoint", None),
        ("checkpoint", 20),
    ]
    problem(await api.http.post("/v1/jobs/none/resume"), 404)


def record(attempt: int, step: int, rank: int, mesh: Mesh, tier: str) -> ShardRecord:
    return ShardRecord(ShardKey(attempt, step, rank), mesh, tier, 1, f"{step}")


async def test_the_openapi_document_is_whole(api: Any) -> None:
    document = (await api.http.get("/openapi.json")).json()
    text = str(document)
    for reference in {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"], reference
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            codes = set(operation["responses"])
            assert codes & {"200", "202"}, (path, method)
            assert list(operation["responses"]["default"]["content"]) == ["application/problem+json"], (path, method)


async def test_the_bridge_to_kubernetes_says_what_it_does_not_see(api: Any, make_api: Any) -> None:
    assert (await api.http.get("/v1/kubernetes")).json() == {"watch": False, "watched": []}
    refused = Sight("nodes", "may not watch nodes: the service account has no right to", 90.0, 80.0)
    watching = await make_api(cluster=lambda: [refused, Sight("pods of namespace ml", "", None, 100.0)])
    assert (await watching.http.get("/v1/kubernetes")).json() == {
        "watch": True,
        "watched": [
            {"what": "nodes", "problem": refused.problem, "problem_since": 90.0, "confirmed_at": 80.0},
            {"what": "pods of namespace ml", "problem": "", "problem_since": None, "confirmed_at": 100.0},
        ],
    }


async def test_the_breaker_says_whether_and_why_it_holds_back(api: Any) -> None:
    closed = (await api.http.get("/v1/breaker")).json()
    assert closed == {"state": "closed", "reason": "", "open_until": None, "failed_nodes": [], "changes": 0}
    why, now = "3 of 5 nodes failed within 300 s", time.time()
    long_ago = now - 2 * Config().breaker_window_s
    failed = ((long_ago, "n0"), (now, "n1"), (now, "n2"))
    breaker = Breaker(
        open_until=now, reason=why, opened_by_node_failures=True, failed_nodes=failed, changes=(long_ago, now)
    )
    api.picture = Picture(State(breaker=breaker), leading=True)
    assert (await api.http.get("/v1/breaker")).json() == {
        "state": "open",
        "reason": why,
        "open_until": now,
        "failed_nodes": ["n1", "n2"],
        "changes": 1,
    }


BROKEN = "\ud800"  # half of a surrogate pair


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/jobs", job_body(name=BROKEN), "name: not valid; expected Unicode text"),
        ("/v1/jobs", job_body(args=["x", f"a{BROKEN}"]), "args.1: not valid"),
        ("/v1/jobs", job_body(env={"A": BROKEN}), "env.A: not valid"),
        ("/v1/jobs", job_body(mesh={BROKEN: 2}), "body.mesh: a key is not valid"),
        ("/v1/jobs", {BROKEN: 1}, "body: a key is not valid"),
        ("/v1/nodes/n1/cordon", {"reason": BROKEN}, "reason: not valid"),
        ("/v1/jobs/gpt/attach", {"token": BROKEN}, "token: not valid"),
        ("/v1/jobs", job_body(nodes=100_000, nproc_per_node=1024, mesh=None), "at most 1000000 ranks in all, not 102400000"),
    ],
)  # fmt: skip
async def test_values_that_nothing_behind_the_api_can_take(
    api: Any, path: str, body: dict[str, Any], said: str
) -> None:
    answer = await api.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert said in problem(answer, 422)["detail"]
    assert await requests(api) == []


@pytest.mark.parametrize("levels", [33, 900, 5_000, 100_000])
@pytest.mark.parametrize("closed", [True, False])
async def test_a_body_that_is_nested_too_deeply(api: Any, levels: int, closed: bool) -> None:
    raw = b'{"name": ' + b"[" * levels + b"1" + (b"]" * levels + b"}" if closed else b"")
    answer = await api.http.post("/v1/jobs", content=raw, headers={"Content-Type": "application/json"})
    said = problem(answer, 422)["detail"]
    assert "nested too deeply; expected at most 32 levels" in said or (not closed and "JSON" in said)


async def test_a_number_of_5000_digits_in_a_body(api: Any) -> None:
    raw = b'{"nodes": ' + b"9" * 5000 + b"}"
    answer = await api.http.post("/v1/jobs", content=raw, headers={"Content-Type": "application/json"})
    assert "a number is too long" in problem(answer, 422)["detail"]


async def test_a_body_in_pieces_is_looked_at_as_a_whole(api: Any) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"reason": "\\ud8', b'00"}'):
            yield piece

    answer = await api.http.post("/v1/nodes/n1/cordon", content=pieces(), headers={"Content-Type": "application/json"})
    assert "reason: not valid" in problem(answer, 422)["detail"]


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(api: Any) -> None:
    page = await api.http.get("/docs")
    assert page.status_code == 200
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)["']""", page.text)
    assert len(loaded) >= 2, page.text
    assert not re.search(r"https?://(?!www\.w3\.org)", page.text)
    for path in loaded:
        answer = await api.http.get(path)
        assert answer.status_code == 200, path
        assert len(answer.content) > 1000


async def test_a_test_of_alerts_says_that_none_are_configured(api: Any) -> None:
    answer = await api.http.post("/v1/alerts/test")
    assert (answer.status_code, answer.json()) == (200, {"addresses": []})
