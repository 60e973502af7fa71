"""`holdfast explain`: a finding as a person reads it."""

from __future__ import annotations

from typing import Any

import httpx

from holdfast.cli.client import Client
from holdfast.cli.explain import look_up, story

FINDING: dict[str, Any] = {
    "id": "worker:gpt:1:2:1000.000",
    "kind": "worker_crash",
    "severity": "error",
    "summary": "Rank 2 on n2 [gpu] was killed by SIGKILL after step 7.",
    "node": "n2",
    "job": "gpt",
    "generation": 1,
    "rank": 2,
    "gpu": None,
    "at": 1000.4,
    "since": 1000.0,
    "confidence": 0.95,
    "rule": "the first rank that ended by itself",
    "source": "NVRx",
    "advice": "read the log",
    "evidence": {"signal": "9", "log": "a\nb", "blame": "unknown", "because": "seen once", "rule": "said above"},
    "recommended_actions": ["restart_process", "replace_node"],
    "ttl_s": 300.0,
    "judged_at": 1000.5,
    "verdict": "opened i-1",
    "incident": "i-1",
}
INCIDENT: dict[str, Any] = {
    "id": "i-1",
    "state": "resolved",
    "cause": "rank 2 died",
    "action": {"kind": "restart", "nodes": [], "reason": "the nodes are healthy", "dp": None},
    "decided_by": "default policy",
    "outcome": "generation 2 steps from step 6 on",
}


def explained(finding: dict[str, Any], incident: dict[str, Any] | None) -> str:
    return "\n".join(line.plain for line in story(finding, incident))


def test_it_says_why_and_what_was_done() -> None:
    text = explained(FINDING, INCIDENT)
    for part in (
        "Rank 2 on n2 [gpu] was killed",
        "confidence 95 %",
        "node n2, rank 2, job gpt, generation 1",
        "0.40 s later",
        "the first rank that ended by itself (source: NVRx)",
        "unknown, because: seen once",
        "restart the process → replace the node",
        "opened i-1",
        "restart, decided by default policy: the nodes are healthy",
        "generation 2 steps from step 6 on",
    ):
        assert part in text, part
    assert "said above" not in text
    assert "a\n                 b" in text


def test_a_warning_has_no_incident_and_an_undecided_one_says_so() -> None:
    assert "action" not in explained({**FINDING, "incident": "", "recommended_actions": []}, None)
    assert "not decided yet" in explained(FINDING, {**INCIDENT, "action": None})


def test_an_incident_is_explained_by_the_finding_that_it_began_with() -> None:
    planned = {**INCIDENT, "id": "i-2", "findings": []}
    known = {
        "/v1/incidents/i-1": {**INCIDENT, "findings": [FINDING["id"], "worker:gpt:1:3:1000.100"]},
        "/v1/incidents/i-2": planned,
        f"/v1/findings/{FINDING['id']}": FINDING,
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=known[request.url.path]))
    with Client("http://holdfast", transport=transport) as client:
        assert look_up(client, "i-1") == (FINDING, known["/v1/incidents/i-1"])
        assert look_up(client, FINDING["id"]) == (FINDING, known["/v1/incidents/i-1"])
        assert look_up(client, "i-2") == (None, planned)
    assert "rank 2 died" in "\n".join(line.plain for line in story(None, planned))


def test_an_estimated_date_is_called_one() -> None:
    assert "(an estimate)" not in explained(FINDING, None)
    guessed = {**FINDING, "evidence": {"dated": "estimate: its last sign of life"}}
    assert "(an estimate), detected" in explained(guessed, None)
