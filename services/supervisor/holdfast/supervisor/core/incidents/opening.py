"""Creates incidents, from a finding or for a planned change."""

from __future__ import annotations

from holdfast.domain import tracing
from holdfast.domain.findings import Finding
from holdfast.domain.incidents import Incident, IncidentState, LoanRequest
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.turn import Turn


def open_incident(
    turn: Turn, job: Job, finding: Finding, *, fault_at: float, dated: dict[str, str] | None = None
) -> Incident:
    """Open an incident for the finding, and judge the finding. `dated` is added to the evidence."""
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
            fault_at=fault_at,
            detected_at=finding.at,
            last_step=job.progress.step if job.running is not None else None,
            trace_id=trace_id or turn.trace(identifier),
            severity=finding.severity,
            evidence={
                **finding.evidence,
                **(dated or {}),
                **({tracing.TRACEPARENT: finding.traceparent} if trace_id else {}),
            },
            attribution=finding.attribution,
            recommended_actions=finding.recommended_actions,
            confidence=finding.confidence,
            cost_share=finding.cost_share,
        )
    )
    turn.judge(finding, f"opened {identifier}", identifier)
    return incident


def planned_incident(
    turn: Turn,
    job: Job,
    kind: str,
    cause: str,
    *,
    node: str = "",
    evidence: dict[str, str] | None = None,
    loan: LoanRequest | None = None,
) -> Incident:
    """An incident for a planned change. It is not stored in the state yet."""
    identifier = turn.new_incident_id()
    return Incident(
        id=identifier,
        job=job.name,
        kind=kind,
        cause=cause,
        state=IncidentState.OPEN,
        generation=job.number,
        node=node,
        fault_at=turn.at,
        detected_at=turn.at,
        last_step=job.progress.step,
        trace_id=turn.trace(identifier),
        evidence=evidence or {},
        loan=loan,
    )
