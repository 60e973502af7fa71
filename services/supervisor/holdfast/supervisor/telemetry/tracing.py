"""Exports the spans of a closed incident, and the durations of its phases, to the OpenTelemetry Collector.

They are written from the incident's record after the commit that closed it, by the leader at that time, also if another one led
while the incident was open. If the leader ends between the commit and this, they are not exported; the record, and thus
`GET /v1/incidents/{id}/trace`, is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from holdfast.domain import spans
from holdfast.domain.incidents import Incident
from holdfast.runtime.telling import metrics, telemetry

_PHASES = ("detect", "decide", "prepare", "start")  # between fault, found, decided, prepared, first step of every rank


def closed(incident: Incident) -> None:
    if not telemetry.on():
        return
    for span in spans.of_incident(incident):
        telemetry.write(span)
    action = incident.action.kind.value if incident.action else "none"
    telemetry.record(metrics.INCIDENTS, 1, job=incident.job, kind=incident.kind, action=action)
    if incident.first_step_at is not None:
        for phase, seconds in _phases(incident):
            telemetry.record(metrics.RECOVERY, seconds, phase=phase)


def _phases(incident: Incident) -> Iterator[tuple[str, float]]:
    moments = (
        incident.fault_at,
        incident.detected_at,
        incident.decided_at,
        incident.prepared_at,
        incident.first_step_at,
    )
    for name, (begin, end) in zip(_PHASES, pairwise(moments), strict=True):
        if begin is not None and end is not None:
            yield name, max(0.0, end - begin)
    yield from incident.phases_s.items()
    if incident.first_step_at is not None:
        yield "total", max(0.0, incident.first_step_at - incident.fault_at)
