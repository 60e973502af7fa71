"""The audit log: each kind of request is one line with who, what, how it was before and the answer, and without secrets."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import anyio
import httpx
import pytest
from structlog.testing import capture_logs
from supervising import job_body

from holdfast.cli.client import Client
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Unavailable
from holdfast.domain.faults import FaultKind
from holdfast.domain.job import PolicySpec
from holdfast.runtime.trust.api_tokens import ApiRole, TokensFile, added, text_of
from holdfast.supervisor.api.audit import asked_of
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.protocol import (
    AgentRestartRequested,
    BreakerResetRequested,
    CheckpointRequested,
    FaultRequested,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    JobStopRequested,
    JobSubmitted,
    NodeCordonRequested,
    NodeRepaired,
    NoticeRequested,
    PolicyChangeRequested,
    PruneRequested,
    ResizeRequested,
)
from holdfast.supervisor.requests import OperatorEvent
from holdfast.wire.jobfile import parse_job

MakeApi = Callable[..., Any]
SECRET = "not-to-be-seen"
LONG = "r" * 5000

EVENTS: tuple[tuple[OperatorEvent, str, str], ...] = (
    (JobSubmitted(1.0, parse_job(job_body(env={"KEY": SECRET})), SECRET, launcher=SECRET), "submit", "job gpt"),
    (JobStopRequested(1.0, "gpt", LONG), "stop", "job gpt"),
    (CheckpointRequested(1.0, "gpt"), "checkpoint", "job gpt"),
    (PruneRequested(1.0, "gpt", tuple(CheckpointId(1, step) for step in range(1000))), "prune", "job gpt"),
    (FaultRequested(1.0, "gpt", FaultKind.CRASH, 0, 0.0), "inject", "job gpt"),
    (ResizeRequested(1.0, "gpt", 2, LONG), "resize", "job gpt"),
    (PolicyChangeRequested(1.0, "gpt", PolicySpec("p.py", source=SECRET)), "policy", "job gpt"),
    (NodeCordonRequested(1.0, "n1", cordoned=True, reason=LONG), "cordon", "node n1"),
    (NodeCordonRequested(1.0, "n1", cordoned=False, reason=""), "uncordon", "node n1"),
    (NodeRepaired(1.0, "n1"), "repair", "node n1"),
    (AgentRestartRequested(1.0, "n1", LONG), "restart-agent", "node n1"),
    (NoticeRequested(1.0, "n1", "ops", LONG), "notice", "node n1"),
    (NoticeRequested(1.0, "n1", "ops", ""), "withdraw-notice", "node n1"),
    (BreakerResetRequested(1.0, LONG), "reset", "breaker"),
    (InviteMade(1.0, "5a1f", SECRET, "n1", 1, 60.0), "invite", "invitation 5a1f"),
    (InviteRevoked(1.0, "5a1f"), "revoke", "invitation 5a1f"),
    (InviteUsed(1.0, "5a1f", "n1"), "join", "node n1"),
)


def test_each_kind_of_request_is_tried() -> None:
    assert {type(event) for event, _, _ in EVENTS} == set(get_args(OperatorEvent))


@pytest.mark.parametrize(("event", "what", "subject"), EVENTS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_line_says_what_was_asked_without_secrets_and_is_short(event: OperatorEvent, what: str, subject: str) -> None:
    asked = asked_of(event)
    assert (asked.what, asked.subject) == (what, subject)
    shown = json.dumps(dict(asked.fields))
    assert SECRET not in shown
    assert len(shown) < 500


@pytest.fixture
def token(tmp_path: Path) -> str:
    """Of an operator; its file is `tokens.json`."""
    tokens, token = added((), "ada", ApiRole.OPERATOR, time.time())
    (tmp_path / "tokens.json").write_bytes(text_of(tokens))
    return token


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AuditStore]:
    opened = await AuditStore.open(tmp_path / "audit.sqlite3")
    yield opened
    await opened.aclose()


@pytest.fixture
async def api(make_api: MakeApi, tmp_path: Path, token: str, store: AuditStore) -> Any:
    made = await make_api(tokens=TokensFile(tmp_path / "tokens.json"), audit=store)
    made.http.headers["Authorization"] = f"Bearer {token}"
    made.node("n1")
    made.job(owner="bob")
    return made


def audited(logs: list[Any]) -> list[Any]:
    return [each for each in logs if each["event"] == "audit"]


@pytest.mark.anyio
async def test_who_changed_what_and_how_it_was_before(api: Any) -> None:
    with capture_logs() as logs:
        answer = await api.http.post("/v1/nodes/n1/cordon", json={"reason": "fan"})
        await api.http.post("/v1/jobs/gpt/stop", json={"reason": "enough"})
        await api.http.get("/v1/jobs")
    cordon, stop = audited(logs)
    assert (cordon["who"], cordon["role"], cordon["what"], cordon["subject"]) == (
        "ada",
        "operator",
        "cordon",
        "node n1",
    )
    assert cordon["asked"] == {"reason": "fan"}
    assert cordon["before"]["notices"] == []
    assert (cordon["result"], cordon["operation"]) == ("accepted", answer.json()["id"])
    assert stop["before"]["owner"] == "bob"
    assert stop["before"]["phase"] == str(api.picture.state.jobs["gpt"].phase)


@pytest.mark.anyio
async def test_what_the_state_rules_out_is_a_line_as_well(api: Any) -> None:
    with capture_logs() as logs:
        assert (await api.http.post("/v1/jobs/other/stop")).status_code in (202, 404)
        assert (await api.http.post("/v1/nodes/n9/repair")).status_code == 404
    line = audited(logs)[-1]
    assert (line["subject"], line["before"], line["result"]) == ("node n9", {}, "refused")
    assert "there is no node n9" in line["reason"]


@pytest.mark.anyio
async def test_a_request_that_is_repeated_is_answered_while_nobody_leads(api: Any) -> None:
    headers = {"Idempotency-Key": "1"}
    first = await api.http.post("/v1/nodes/n1/repair", headers=headers)
    api.picture = None
    with capture_logs() as logs:
        again = await api.http.post("/v1/nodes/n1/repair", headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert audited(logs)[0]["before"] == {}


@pytest.mark.anyio
async def test_without_tokens_anybody_has_asked(make_api: MakeApi) -> None:
    api = await make_api()
    api.node("n1")
    with capture_logs() as logs:
        await api.http.post("/v1/nodes/n1/repair")
    assert [(each["who"], each["role"]) for each in audited(logs)] == [("anybody", "admin")]


@pytest.mark.anyio
async def test_lines_are_kept_and_listed_newest_first_by_pages(api: Any) -> None:
    for number in range(3):
        await api.http.post("/v1/nodes/n1/cordon", json={"reason": f"reason {number}"})
    await api.http.post("/v1/nodes/n9/repair")
    first = (await api.http.get("/v1/audit?limit=2")).json()
    second = (await api.http.get(f"/v1/audit?limit=2&cursor={first['next_cursor']}")).json()
    assert [each["what"] for each in first["items"]] == ["repair", "cordon"]
    assert [each["asked"]["reason"] for each in second["items"]] == ["reason 1", "reason 0"]
    assert second["next_cursor"] is None
    refused, accepted = first["items"]
    assert (refused["result"], refused["who"], "no node n9" in refused["reason"]) == ("refused", "ada", True)
    assert accepted["operation"].startswith("op-")
    of_n9 = (await api.http.get("/v1/audit", params={"subject": "node n9", "who": "ada"})).json()
    assert len(of_n9["items"]) == 1
    assert (await api.http.get("/v1/audit?who=eve")).json()["items"] == []
    assert (await api.http.get("/v1/audit?cursor=x")).status_code == 422


@pytest.mark.anyio
async def test_the_newest_lines_survive_a_restart_and_old_ones_make_room(tmp_path: Path) -> None:
    store = await AuditStore.open(tmp_path / "kept.sqlite3", kept_max=5, trim_every=2)
    for number in range(20):
        await store.add(float(number), {"who": "ada", "subject": "breaker", "number": number})
    await store.aclose()
    again = await AuditStore.open(tmp_path / "kept.sqlite3")
    kept = [each.fields["number"] for each in await again.lines(limit=100)]
    assert kept == [19, 18, 17, 16, 15]
    await again.aclose()


@pytest.mark.anyio
async def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    await anyio.Path(tmp_path / "broken.sqlite3").write_text("no database " * 1000)
    with pytest.raises(Unavailable, match=r"broken\.sqlite3 cannot be used"):
        await AuditStore.open(tmp_path / "broken.sqlite3")


@pytest.mark.anyio
async def test_a_request_is_answered_if_its_line_cannot_be_kept(api: Any, store: AuditStore) -> None:
    await store._run(lambda: store._database.execute("DROP TABLE requests"))
    with capture_logs() as logs:
        assert (await api.http.post("/v1/nodes/n1/repair")).status_code == 202
    assert [each["event"] for each in logs if each["log_level"] == "error"] == ["audit line not kept"]
    assert len(audited(logs)) == 1
    assert (await api.http.get("/v1/audit")).status_code == 503


def test_the_command_asks_for_all_pages() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        more = "cursor" not in request.url.params
        return httpx.Response(200, json={"items": [{"what": "stop"}], "next_cursor": "7" if more else None})

    with Client("http://127.0.0.1:1", transport=httpx.MockTransport(answer)) as client:
        assert [each["what"] for each in client.audit("ada", "job llm")] == ["stop", "stop"]
    assert "who=ada" in asked[0]
    assert "subject=job" in asked[0]
    assert "cursor=7" in asked[1]
