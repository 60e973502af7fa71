"""`/v1/findings`: kept as they were judged, found by id, and a mistyped id gets a hint. A history of the old layout is kept."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.incidents import Incident, IncidentState
from holdfast.domain.rules import RULES, rule_of
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.history.sqlite_file import SCHEMA
from holdfast.supervisor.protocol import FindingJudged, IncidentChanged, Record
from holdfast.wire import records

pytestmark = pytest.mark.anyio

CRASH = Finding(
    id="worker:gpt:1:2:1000.000",
    kind=FindingKind.WORKER_CRASH,
    severity=Severity.ERROR,
    at=1000.4,
    since=1000.0,
    summary="Rank 2 on n2 was killed by SIGKILL after step 7.",
    node="n2",
    job="gpt",
    generation=1,
    rank=2,
    evidence={"signal": "9", "blame": "unknown", "because": "seen once"},
    recommended_actions=(Remedy.RESTART_PROCESS, Remedy.REPLACE_NODE),
)
FULL = replace(
    CRASH, id="pressure:n3:disk:/data:1001", kind=FindingKind.HOST_PRESSURE, severity=Severity.WARNING, node="n3"
)
INCIDENT = Incident("i-1", "gpt", "worker_crash", "rank 2 died", IncidentState.OPEN, 1, node="n2")


async def tell(history: SqliteHistory, *reported: Record) -> None:
    start = int((await history.cursors())[0])
    positions = [str(start + n + 1) for n in range(len(reported))]
    await history.add_events([EventEntry(*each) for each in zip(positions, reported, strict=True)], positions[-1])


async def test_findings_are_listed_newest_first_and_one_is_explained(api: Any) -> None:
    await tell(
        api.history,
        FindingJudged(1000.5, CRASH, "opened i-1", "i-1"),
        FindingJudged(1001.5, FULL, "recorded: a finding of severity warning calls for no action"),
    )
    listed = (await api.http.get("/v1/findings")).json()["items"]
    assert [each["id"] for each in listed] == [FULL.id, CRASH.id]
    assert [each["id"] for each in (await api.http.get("/v1/findings?node=n2")).json()["items"]] == [CRASH.id]
    found = (await api.http.get(f"/v1/findings/{CRASH.id}")).json()
    assert found["verdict"] == "opened i-1"
    assert found["incident"] == "i-1"
    assert found["recommended_actions"] == ["restart_process", "replace_node"]
    assert found["rule"] == RULES[FindingKind.WORKER_CRASH].rule
    assert (await api.http.get(f"/v1/findings/{FULL.id}")).json()["node"] == "n3", "an id may hold a path"


async def test_pages_go_on_where_they_ended(api: Any) -> None:
    await tell(api.history, *(FindingJudged(1.0, replace(CRASH, id=f"f{n}"), "opened") for n in range(5)))
    first = (await api.http.get("/v1/findings?limit=3")).json()
    rest = (await api.http.get(f"/v1/findings?limit=3&cursor={first['next_cursor']}")).json()
    assert [each["id"] for each in (*first["items"], *rest["items"])] == ["f4", "f3", "f2", "f1", "f0"]
    assert rest["next_cursor"] is None


async def test_judged_again_it_keeps_its_place(api: Any) -> None:
    await tell(
        api.history,
        FindingJudged(1.0, CRASH, "contradicted"),
        FindingJudged(2.0, FULL, "recorded"),
        FindingJudged(3.0, CRASH, "opened i-1", "i-1"),
    )
    listed = (await api.http.get("/v1/findings")).json()["items"]
    assert [(each["id"], each["verdict"]) for each in listed] == [(FULL.id, "recorded"), (CRASH.id, "opened i-1")]


async def test_an_unknown_id_gets_a_hint(api: Any) -> None:
    answer = await api.http.get("/v1/findings/worker:gpt:1:2")
    assert answer.status_code == 404
    assert "nothing has been found yet" in answer.json()["detail"]
    await tell(api.history, FindingJudged(1000.5, CRASH, "opened i-1", "i-1"))
    assert f"did you mean {CRASH.id}?" in (await api.http.get("/v1/findings/worker:gpt:1:2")).json()["detail"]
    assert f"the latest are {CRASH.id}" in (await api.http.get("/v1/findings/zzz")).json()["detail"]


async def test_a_node_is_shown_with_its_past(api: Any) -> None:
    api.node("n2")
    await tell(api.history, IncidentChanged(1.0, INCIDENT), IncidentChanged(2.0, replace(INCIDENT, id="i-2", node="x")))
    node = (await api.http.get("/v1/nodes/n2")).json()
    assert [each["id"] for each in node["incidents"]] == ["i-1"]
    assert node["faults"] == []
    assert 0 < node["faults_per_day"] < 0.01
    assert node["quarantined"] is False
    assert [each["id"] for each in (await api.http.get("/v1/incidents?node=x")).json()["items"]] == ["i-2"]


async def test_a_history_of_the_layout_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite3"
    with sqlite3.connect(path) as old:
        old.executescript(f"{SCHEMA} PRAGMA user_version = 1;")
        data = records.dumps(INCIDENT, Incident)
        old.execute("INSERT INTO incidents (id, job, data) VALUES ('i-1', 'gpt', ?)", (data,))
        old.execute("INSERT INTO incidents (id, job, data) VALUES ('i-2', 'gpt', ?)", (b"torn",))
    old.close()
    history = await SqliteHistory.open(path)
    try:
        assert [incident for _, incident in await history.incidents(node="n2", limit=5)] == [INCIDENT]
        await tell(history, FindingJudged(1.0, CRASH, "opened"))
        assert (await history.finding(CRASH.id)) == FindingJudged(1.0, CRASH, "opened")
    finally:
        await history.aclose()


def test_every_kind_of_finding_has_a_rule() -> None:
    assert set(RULES) == set(FindingKind)
    assert all(rule.rule and rule.source and rule.advice for rule in RULES.values())


def test_the_rule_that_fired_is_named_with_its_source() -> None:
    xid = replace(CRASH, kind=FindingKind.GPU_ERROR, evidence={"rule": "79 is off the bus", "source": "NVIDIA"})
    assert rule_of(xid).rule.endswith(": 79 is off the bus")
    assert rule_of(xid).source == "NVIDIA"


@pytest.mark.parametrize(
    ("evidence", "rule"), [({}, "that of the detector inlet_hot"), ({"rule": "above 45 °C"}, "above 45 °C")]
)
def test_the_rule_of_a_plug_in_is_not_that_of_holdfasts_detectors(evidence: dict[str, str], rule: str) -> None:
    hot = replace(CRASH, kind=FindingKind.DEGRADATION, evidence={"plugin": "inlet_hot", **evidence})
    assert (rule_of(hot).rule, rule_of(hot).source) == (rule, "plug-in inlet_hot")
    assert RULES[FindingKind.DEGRADATION].rule not in rule_of(hot).rule
    assert RULES[FindingKind.DEGRADATION].advice != rule_of(hot).advice
    assert FindingJudged in get_args(Record)
