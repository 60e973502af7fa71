"""An incident as the finding describes it with which it opens."""

from __future__ import annotations

from holdfast.domain import tracing
from holdfast.domain.findings import Finding
from holdfast.domain.incidents import Incident, IncidentState
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.turn import Turn


def open_incident(
    turn: Turn, job: Job, finding: Finding, *, t_fault: float, dated: dict[str, str] | None = None
) -> Incident:
    """Put it into the state, and say so of the finding. `dated` goes into the evidence."""
    identifier = turn.new_incident_id()
    trace_id = tracing.trace_id_of(finding.traceparent)
    incident = turn.put_incident(
        Incident(
            id=identifier,
            job=job.name,
            kind=finding.kind,
            cause=finding.summary,
            state=IncidentState.OPEN,
            generation=job.number,
            findings=(finding.id,),
            node=finding.node,
            rank=finding.rank,
            gpu=finding.gpu,
            t_fault=t_fault,
            t_detected=finding.at,
            last_step=job.progress.step if job.running is not None else None,
            trace_id=trace_id or turn.trace(identifier),
            severity=finding.severity,
            evidence={
                **finding.evidence,
                **(dated or {}),
                **({tracing.TRACEPARENT: finding.traceparent} if trace_id else {}),
            },
            attribution=finding.attribution,
            ladder=finding.ladder,
            confidence=finding.confidence,
            cost_share=finding.cost_share,
        )
    )
    turn.judge(finding, f"opened {identifier}", identifier)
    return incident
