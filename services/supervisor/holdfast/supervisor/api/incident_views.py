"""Incidents, findings and actions → response models."""

from __future__ import annotations

from holdfast.domain import spans, tracing
from holdfast.domain.incidents import Incident
from holdfast.domain.rules import rule_of
from holdfast.supervisor.api import incident_models
from holdfast.supervisor.history.protocol import ActionEntry
from holdfast.supervisor.protocol import FindingJudged


def incident(value: Incident) -> incident_models.Incident:
    walk = [incident_models.Rung.of(rung, rung=rung.number, action=rung.steps) for rung in value.walk]
    phases_s = {name: round(seconds, 6) for name, seconds in value.phases_s.items()}
    return incident_models.Incident.of(value, walk=walk, phases_s=phases_s)


def finding(judged: FindingJudged) -> incident_models.Finding:
    rule = rule_of(judged.finding)
    return incident_models.Finding.of(
        judged.finding,
        rule=rule.rule,
        source=rule.source,
        advice=rule.advice,
        judged_at=judged.at,
        verdict=judged.verdict,
        incident=judged.incident,
    )


def trace(value: Incident) -> incident_models.Trace:
    own = [
        incident_models.Span.of(
            span,
            span_id=span.context.span_id,
            parent_id=span.parent,
            attributes={tracing.ATTRIBUTE_PREFIX + name: value for name, value in span.attributes.items()},
        )
        for span in spans.of_trace(value)
    ]
    return incident_models.Trace(incident=value.id, trace_id=value.trace_id, spans=own)


def action(done: ActionEntry) -> incident_models.Action:
    incident = done.incident
    return incident_models.Action.of(
        done.action,
        id=f"{incident.id}.{done.number}",
        incident=incident.id,
        job=incident.job,
        decided_by=incident.decided_by,
        at=done.at,
        generation=incident.generation,
        new_generation=incident.new_generation,
    )
