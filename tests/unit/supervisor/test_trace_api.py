"""`GET /v1/incidents/{id}/trace`: from the record, with no collector."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import JOB, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.tracing import ATTRIBUTE_PREFIX, ATTRIBUTES
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.protocol import IncidentChanged

pytestmark = pytest.mark.anyio


async def test_the_trace_of_an_incident(api: Any) -> None:
    fleet = running(job(dp=3), saved=10)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    incident = fleet.incident
    await api.history.add_events([EventEntry("1-0", IncidentChanged(fleet.now, incident))], "1-0")
    trace = (await api.http.get(f"/v1/incidents/{incident.id}/trace")).json()
    assert (trace["incident"], trace["trace_id"]) == (incident.id, incident.trace_id)
    names = [span["name"] for span in trace["spans"]]
    assert {"incident", "decision", "generation change", "prepare", "first step"} <= set(names)
    known = {span["span_id"] for span in trace["spans"]}
    assert [span["name"] for span in trace["spans"] if span["parent_id"] not in known] == [names[0]]
    for span in trace["spans"]:
        assert span["start"] <= span["end"]
        assert {name.removeprefix(ATTRIBUTE_PREFIX) for name in span["attributes"]} <= set(ATTRIBUTES)
        assert span["attributes"][f"{ATTRIBUTE_PREFIX}job"] == JOB


async def test_an_incident_that_is_not_there(api: Any) -> None:
    answer = await api.http.get("/v1/incidents/nope/trace")
    assert answer.status_code == 404
    assert "`holdfast incidents list`" in answer.json()["detail"]
