"""What the supervisor tells the collector of an incident that has closed: its spans, and the seconds of its phases.

Written after the commit that closed it, from its record: whoever leads then, also when another led while it was open. A leader
that dies between that commit and this writes nothing; the record, and with it `GET /v1/incidents/{id}/trace`, has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from holdfast.domain import spans
from holdfast.domain.incidents import Incident
from holdfast.runtime import metrics, telemetry

_PHASES = ("detect", "decide", "prepare", "start")  # between fault, found, decided, prepared, first step of every rank


def closed(incident: Incident) -> None:
    if not telemetry.on():
        return
    for span in spans.of_incident(incident):
        telemetry.write(span)
    action = incident.action.kind.value if incident.action else "none"
    telemetry.record(metrics.INCIDENTS, 1, job=incident.job, kind=incident.kind, action=action)
    if incident.t_first_step is not None:
        for phase, seconds in _phases(incident):
            telemetry.record(metrics.RECOVERY, seconds, phase=phase)


def _phases(incident: Incident) -> Iterator[tuple[str, float]]:
    moments = (incident.t_fault, incident.t_detected, incident.t_decided, incident.t_prepared, incident.t_first_step)
    for name, (begin, end) in zip(_PHASES, pairwise(moments), strict=True):
        if begin is not None and end is not None:
            yield name, max(0.0, end - begin)
    yield from incident.phases_s.items()
    if incident.t_first_step is not None:
        yield "total", max(0.0, incident.t_first_step - incident.t_fault)
